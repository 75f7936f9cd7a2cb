"""Parts of the training loop where ranks differ: statistics, metrics, speed, and what is said of them."""

from __future__ import annotations

import gzip
import json
import math
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from data.pet_names import PetNames
from ddp_hydra.job import summary
from models.char_lstm import CharLSTM
from tests.integration.project.data.tiny import Points
from tests.integration.project.models.tiny import Tiny
from tests.integration.support import training
from tests.integration.test_chaos import chaos as chaos
from tests.integration.test_exactness import assert_equal
from tests.integration.test_exactness import train as train

pytestmark = pytest.mark.integration

# -- BatchNorm ---------------------------------------------------------------------------------------------

OWN = (
    "model.norm=true",
    "parallel.batchnorm=average",
    "trainer.ema_decay=0.9",
    "trainer.checkpoint_every_steps=4",
    "trainer.epochs=2",
)


def test_the_mean_of_all_statistics_is_saved(client2, train):
    """Where weights stay, it is that of the whole batch: a running mean goes by sums."""
    still = (*OWN, "optimizer.lr=1e-30")
    alone = train(client2, "alone", *still, "data.batch_size=16", ranks=1)
    apart = train(client2, "apart", *still, "data.batch_size=8", ranks=2)
    for file in ("step-000004.pt", "step-000006.pt", "last.pt"):
        whole, mean = alone.checkpoint(file), apart.checkpoint(file)
        for name in ("layers.1.running_mean", "layers.1.num_batches_tracked"):
            torch.testing.assert_close(mean["model"][name], whole["model"][name])
            torch.testing.assert_close(mean["ema"]["model"][name], whole["ema"]["model"][name])


def test_it_is_evaluated_too_and_a_resume_is_exact(client2, train):
    settings = (*OWN, "model.dropout=0.5", "optimizer=adam", "optimizer.lr=0.01", "trainer.clip_norm=0.5")
    whole = train(client2, "whole", *settings)
    resumed = train(client2, "resumed", *settings, resume=whole.folder / "checkpoints" / "step-000004.pt")
    assert_equal(resumed.checkpoint("last.pt"), whole.checkpoint("last.pt"))
    assert [line for line in resumed.metrics() if line["step"] > 4] == [
        line for line in whole.metrics() if line["step"] > 4
    ]
    model, judged = Tiny(num_classes=4, norm=True).eval(), Points(37, seed=2)
    model.load_state_dict(whole.checkpoint("last.pt")["ema"]["model"])
    (logged,) = [line["val/loss"] for line in whole.metrics() if line["step"] == 12 and "val/loss" in line]
    assert logged == pytest.approx(F.cross_entropy(model(judged.x), judged.y).item())


@pytest.mark.slow
def test_a_refused_gradient_stays_out_of_what_powersgd_owes(chaos, client2):
    """It adds to each gradient what compression has lost of those before: a NaN would never leave it."""
    hook = (
        "parallel.comm_hook=powersgd",
        "parallel.start_step=2",
        "trainer.on_nonfinite=skip",
        "trainer.max_nonfinite=1",
    )
    story = chaos.done(client2, "nan,rank=1,step=9", overrides=hook)
    assert math.isfinite(story.summary["metrics"]["train/loss"])
    assert all(value.isfinite().all() for value in story.checkpoint()["model"].values())


# -- metrics -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
def test_perplexity_is_that_of_all_characters_of_all_ranks(client2, project, tmp_path):
    source = tmp_path / "names.json"
    source.write_text(json.dumps([f"{a}{b}{c}" for a in "abcdef" for b in "aeiou" for c in ("", "na", "lo", "mi")]))
    settings = ("experiment=pet_names", "data=pet_names_holdout", "metrics=perplexity", f"data.source={source}")
    small = (
        "data.batch_size=8",
        "model.hidden_size=8",
        "model.num_layers=1",
        "optimizer.lr=0.05",
        "trainer.max_steps=3",
    )
    run = training.train(client2, project, tmp_path / "run", *settings, *small)
    judged, model = PetNames(str(source), holdout=0.1, split="val"), CharLSTM(31, hidden_size=8, num_layers=1)
    assert len(judged) % 16 not in (0, 8)  # ranks have different shares
    model.load_state_dict(run.checkpoint("last.pt")["model"])
    x, y = judged.prepare(judged.collate(judged.__getitems__(range(len(judged)))))
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    (logged,) = [line for line in run.metrics() if "val/token_perplexity" in line]
    assert logged["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert logged["val/token_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


# -- early stopping ----------------------------------------------------------------------------------------


def test_all_ranks_stop_where_it_gets_no_better(client2, train):
    run = train(
        client2, "run", "trainer.early_stopping_patience=1", "trainer.early_stopping_min_delta=9", "trainer.epochs=5"
    )
    assert (run.value["steps"], run.value["interrupted"]) == (12, "")
    assert run.checkpoint("last.pt")["early_stopping"]["validations_without_progress"] == 1


# -- who is slow -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_waits_for_its_data_is_named_at_the_end(chaos, client2, capsys, monkeypatch):
    monkeypatch.setattr(summary, "ENOUGH_S", 0.0)
    slow = ("data.slow_rank=1", "data.delay_s=0.02", "trainer.epochs=4")  # 24 steps: of fewer nothing is said
    story = chaos.done(client2, overrides=slow)
    assert story.summary["slowest"] == {
        "rank": 1,
        "times": pytest.approx(1.6, abs=0.45),
    }
    waited_s = story.summary["exchange_s"]
    assert 0 < waited_s < story.summary["train_s"]
    assert "slow: rank 1 took " in capsys.readouterr().out
    assert max(line.get("slowest_rank", 0) for line in map(json.loads, metrics_of(story))) > 1.2


def metrics_of(story: Any) -> list[str]:
    return (story.folder / "metrics.jsonl").read_text().splitlines()


def test_a_rank_that_computes_for_long_is_found_and_one_that_only_validates_for_long_is_not(client2, gang):
    from ddp_hydra.rank.world import World, in_world

    @in_world
    def measured(world: World) -> tuple[dict[str, float], dict[str, float]]:
        import time

        from ddp_hydra.training.monitor import Stragglers

        class Sleepy(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                time.sleep(0.3 if self.training == (world.rank == 1) else 0)
                return x

        model = Sleepy()
        stragglers = Stragglers(SimpleNamespace(waited_s=0.0), torch.device("cpu"))
        stragglers.watch(model)
        for _ in range(3):
            model.train()(torch.ones(1))
            model.eval()(torch.ones(1))
        return stragglers.interval(world.gather_objects(stragglers.local_seconds())), stragglers.totals()

    for lap, total in gang(client2, backend="gloo").run(measured):
        assert total == {"rank": 1, "times": lap["slowest_rank"]}
        assert lap["slowest_rank"] > 1.2


# -- debugging ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_profile_has_a_trace_of_each_rank_and_what_they_exchange(client2, train):
    run = train(client2, "run", "debug=profile")
    for rank in (0, 1):
        with gzip.open(run.folder / "profile" / f"rank-{rank}.json.gz") as trace:
            events = json.load(trace)["traceEvents"]
        assert any(event["name"].startswith("shared:average") for event in events)  # gradients in shared memory
        spans = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert {spans.count(name) for name in ("forward", "backward", "update")} == {10}
    table = (run.folder / "profile" / "table.md").read_text()
    assert "the mean of 10;" in table
    assert float(table.partition("Communication: ")[2].split()[0]) > 0
    rows = [line.split("|") for line in table.splitlines()]
    spent = {row[1].strip(): float(row[2]) for row in rows if len(row) == 5 and row[2].strip()[:1].isdigit()}
    assert spent.keys() >= {"waiting for data", "forward pass", "optimizer", "results: metrics", "validation"}
    assert spent.pop("all") == pytest.approx(sum(spent.values()), abs=0.1)


def test_overfitting_sees_one_global_batch_again_and_again(client2, train):
    run = train(client2, "run", "debug=overfit", "trainer.max_steps=8", "model.tell=true")
    assert len(run.samples()) == 8
    assert all(batch == run.samples()[0] for batch in run.samples())
    losses = [line["train/loss"] for line in run.metrics()]
    assert losses[-1] < 0.5 * losses[0]
    assert not any("val/loss" in line for line in run.metrics())
