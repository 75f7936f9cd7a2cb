"""The experiments that show what a task can be: each learns something, and a GAN is resumed exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.support import training
from tests.integration.support.training import Trained
from tests.integration.test_exactness import assert_equal

pytestmark = pytest.mark.integration


@pytest.fixture
def train(project, tmp_path) -> Callable[..., Trained]:
    def run(client: Any, name: str, *overrides: str, **options: Any) -> Trained:
        return training.train(client, project, tmp_path / name, *overrides, **options)

    return run


@pytest.mark.slow
def test_regression_explains_the_variance(client2, train):
    run = train(client2, "run", "experiment=regression", "trainer.epochs=15")
    last = run.value["metrics"]
    assert last["val/r2"] > 0.3
    assert {"train/loss", "train/mae", "train/r2", "val/loss", "val/mae"} <= last.keys()


@pytest.mark.slow
def test_segmentation_finds_the_pixels_of_a_digit(client2, train):
    run = train(client2, "run", "experiment=segmentation", "model.width=8", "trainer.epochs=4")
    assert run.value["metrics"]["val/accuracy"] > 0.7
    assert 0.15 < run.value["metrics"]["val/iou"] < run.value["metrics"]["val/accuracy"]
    assert not any(name.endswith("n") for name in run.value["metrics"])


def test_a_language_model_gets_less_perplexed(client2, train, tmp_path):
    chance = random.Random(0)
    names = [
        "".join(chance.choices(("lu", "na", "bel", "la", "max", "co"), k=chance.randint(1, 3))) for _ in range(400)
    ]
    (tmp_path / "names.json").write_text(json.dumps(names))
    source = (f"data.source={tmp_path}/names.json", "data.batch_size=64", "model.hidden_size=32")
    run = train(client2, "run", "experiment=language_model", *source, "trainer.epochs=4")
    perplexity = [line["val/perplexity"] for line in run.metrics() if "val/perplexity" in line]
    assert len(perplexity) == 4
    assert perplexity[-1] < perplexity[0] < 31
    assert perplexity[-1] == pytest.approx(torch.tensor(run.value["metrics"]["val/loss"]).exp().item())


@pytest.mark.slow
def test_a_batch_may_be_a_dict_and_a_model_return_its_loss(client2, train):
    run = train(client2, "run", "experiment=digit_tokens", "trainer.epochs=2")
    losses = [line["val/loss"] for line in run.metrics() if "val/loss" in line]
    assert losses[-1] < losses[0] < 2.4


@pytest.mark.slow
def test_a_small_model_learns_from_a_trained_one(client2, train):
    base = ("data=digits", "model=mlp", "trainer.epochs=3")
    teacher = train(client2, "teacher", *base, "optimizer=adamw", "optimizer.lr=0.01")
    student = train(
        client2, "student", "experiment=distillation", f"task.teacher={teacher.folder}", "trainer.epochs=10"
    )
    assert student.value["metrics"]["val/accuracy"] > 0.6
    saved = student.checkpoint("last.pt")["model"]
    assert saved.keys() == {"layers.1.0.weight", "layers.1.0.bias", "layers.2.weight", "layers.2.bias"}
    assert saved["layers.2.weight"].shape == (10, 16)


GAN = ("experiment=gan_digits", "trainer.epochs=2", "trainer.log_every_steps=5", "results.keep_checkpoints=null")


@pytest.mark.slow
def test_a_gan_trains_both_parts_and_shows_images(client2, train):
    run = train(client2, "run", *GAN, "trainer.clip_norm=1")
    names = {name for line in run.metrics() for name in line}
    assert {f"train/{part}/loss" for part in ("generator", "discriminator")} < names
    assert {"train/discriminator/accuracy", "generator/lr", "discriminator/lr", "generator/grad_norm"} < names
    images = [record for record in run.records if record.kind == "image"]
    assert [record.data.name for record in images] == ["samples"] * 2
    first, last = (run.checkpoint(name)["model"] for name in ("step-000011.pt", "last.pt"))
    assert not any(torch.equal(first[name], last[name]) for name in first if name.endswith("weight"))
    state = run.checkpoint("last.pt")["optimizer"]
    assert [state[part]["param_groups"][0]["lr"] for part in ("generator", "discriminator")] == [0.001, 0.0005]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "accumulate"),
    [(1, 1), (2, 2), (4, 1)],
    ids=str,
)
def test_a_gan_is_resumed_exactly(client4, train, ranks, accumulate):
    given = (
        *(*GAN, "data.batch_size=16", f"trainer.gradient_accumulation_steps={accumulate}"),
        *("trainer.checkpoint_every_steps=4", "scheduler=cosine", "trainer.max_steps=7"),
    )
    whole = train(client4, "whole", *given, ranks=ranks)
    resumed = train(client4, "resumed", *given, ranks=ranks, resume=whole.folder / "checkpoints" / "step-000004.pt")
    assert_equal(whole.checkpoint("last.pt"), resumed.checkpoint("last.pt"))
    assert whole.metrics()[-1] == resumed.metrics()[-1]


@pytest.mark.slow
def test_a_step_of_a_gan_that_is_left_out_changes_neither_part_nor_the_average(client2, train):
    policy = ("trainer.on_nonfinite=skip", "trainer.ema_decay=0.9")
    nan = "nan,rank=1,step=3"
    run = train(
        client2, "run", *GAN, *policy, f"faults=['{nan}']", "trainer.checkpoint_every_steps=1", "trainer.max_steps=4"
    )
    steps = {step: run.checkpoint(f"step-{step:06d}.pt") for step in (2, 3, 4)}
    for part in ("model", "ema", "optimizer"):
        assert_equal(steps[2][part], steps[3][part])
    assert (steps[3]["ema"]["steps"], steps[4]["ema"]["steps"]) == (2, 3)
    for part in ("generator", "discriminator"):
        changed = [name for name in steps[4]["model"] if name.startswith(part) and name.endswith("weight")]
        assert changed
        assert not any(torch.equal(steps[3]["model"][name], steps[4]["model"][name]) for name in changed)


@pytest.mark.slow
def test_a_gan_that_loses_a_rank_comes_to_the_same(module_cli, tmp_path):
    given = (*GAN, "trainer.checkpoint_every_steps=5", "trainer.threads=1", "data.batch_size=32")
    for name, more in (("whole", ()), ("killed", ("+fault=kill,rank=1,step=13",))):
        module_cli.done(*given, *more, f"hydra.run.dir={tmp_path / name}")
    whole, killed = (saved(tmp_path / name) for name in ("whole", "killed"))
    assert json.loads((tmp_path / "killed" / "summary.json").read_text())["restarts"] == 1
    assert_equal(whole["model"], killed["model"])
    assert_equal(whole["optimizer"], killed["optimizer"])
    assert_equal(whole["ema"], killed["ema"])


def saved(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    return content
