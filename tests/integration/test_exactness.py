"""DDP is right: neither the number of ranks nor a stop and resume changes the data order or the losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

from tests.integration.support import training
from tests.integration.support.training import Trained

pytestmark = pytest.mark.integration

TINY = ("data=tiny", "model=tiny", "optimizer.lr=0.1", "trainer.log_every_steps=1", "results.keep_checkpoints=null")


@pytest.fixture
def train(project, tmp_path) -> Callable[..., Trained]:
    """Run the training loop on some ranks of a cluster."""

    def run(client: Any, name: str, *overrides: str, **options: Any) -> Trained:
        return training.train(client, project, tmp_path / name, *TINY, *overrides, **options)

    return run


def assert_equal(a: Any, b: Any) -> None:
    """Bit for bit, all the way down."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b


def test_one_two_and_four_ranks_see_the_same_samples_and_have_the_same_losses(client4, train):
    runs = {
        ranks: train(
            client4, f"{ranks}", f"data.batch_size={24 // ranks}", "model.tell=true", "trainer.epochs=3", ranks=ranks
        )
        for ranks in (1, 2, 4)
    }
    reference = runs[1]
    steps = [line for line in reference.metrics() if "train/loss" in line]
    assert len(steps) == len(reference.samples()) == 3 * 96 // 24
    assert sorted(chain(*reference.samples()[:4])) == list(range(96))  # an epoch is every sample once
    assert reference.samples()[:4] != reference.samples()[4:8]
    for run in (runs[2], runs[4]):
        assert run.samples() == reference.samples()
        assert len(run.metrics()) == len(reference.metrics())
        for line, expected in zip(run.metrics(), reference.metrics(), strict=True):
            assert line == pytest.approx(expected, rel=1e-5)


DROPOUT = (
    "model.dropout=0.5",
    "optimizer=adam",
    "scheduler=cosine",
    "trainer.epochs=3",
    "trainer.checkpoint_every_steps=4",
)


@pytest.fixture(scope="module")
def whole(client2, project, tmp_path_factory) -> Trained:
    """A run that is not interrupted."""
    return training.train(client2, project, tmp_path_factory.mktemp("whole") / "run", *TINY, *DROPOUT)


@pytest.mark.parametrize(
    "step",
    [4, pytest.param(6, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)],
    ids=["mid-epoch", "epoch's end", "mid-epoch of the third"],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(client2, train, whole, step):
    """With dropout, momentum and a schedule; 6 steps an epoch."""
    resumed = train(client2, "resumed", *DROPOUT, resume=whole.folder / "checkpoints" / f"step-{step:06d}.pt")
    rest = [line for line in whole.metrics() if line["step"] > step]
    assert {line["step"] for line in rest} == set(range(step + 1, 19))
    assert [line for line in resumed.metrics() if line["step"] > step] == rest
    assert_equal(resumed.checkpoint("last.pt"), whole.checkpoint("last.pt"))
    assert_equal(resumed.checkpoint("step-000016.pt"), whole.checkpoint("step-000016.pt"))


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        pytest.param(3, ["parallel.comm_hook=none"], marks=pytest.mark.slow),
        pytest.param(4, ["parallel.comm_hook=none"], marks=pytest.mark.slow),
        pytest.param(3, ["parallel.comm_hook=shared"], marks=pytest.mark.slow),
        (4, ["parallel.comm_hook=shared", "parallel.static_graph=true"]),
    ],
    ids=str,
)
def test_with_more_than_two_ranks_gradients_are_summed_in_the_same_order_after_a_resume(client4, train, ranks, way):
    settings = (*DROPOUT, "data.batch_size=4", *way)
    whole = train(client4, "whole", *settings, ranks=ranks)
    first = whole.folder / "checkpoints" / "step-000004.pt"
    resumed = train(client4, "resumed", *settings, ranks=ranks, resume=first)
    assert_equal(resumed.checkpoint("last.pt"), whole.checkpoint("last.pt"))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_validation_counts_every_sample_once_whatever_the_number_of_ranks(client4, train, ranks):
    """37 samples do not divide by 3."""
    run = train(client4, "run", "trainer.max_steps=2", "data.batch_size=4", ranks=ranks)
    (validation,) = [line for line in run.metrics() if "val/accuracy" in line]
    correct = validation["val/accuracy"] * 37
    assert correct == pytest.approx(round(correct), abs=1e-9)
    again = evaluate_by_hand(run)
    assert validation["val/accuracy"] == again["accuracy"]
    assert validation["val/loss"] == pytest.approx(again["loss"], rel=1e-6)


def evaluate_by_hand(run: Trained) -> dict[str, float]:
    """The same numbers in plain torch: the model of tests/integration/project over all of its validation data."""
    generator = torch.Generator().manual_seed(2)
    y = torch.arange(37) % 4
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))[y] + 0.5 * torch.randn(37, 6, generator=generator)
    x[:, 0] = torch.arange(37) / 1024
    weights = run.checkpoint("last.pt")["model"]
    hidden = torch.tanh(x @ weights["layers.0.weight"].T + weights["layers.0.bias"])
    logits = hidden @ weights["layers.3.weight"].T + weights["layers.3.bias"]
    loss = torch.nn.functional.cross_entropy(logits, y)
    return {"accuracy": (logits.argmax(1) == y).double().mean().item(), "loss": loss.item()}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([(1, 2, 6)], id="more"),
        pytest.param([(2, 1, 8), (4, 2, 4), (2, 2, 12), (2, 2, 4)], id="fewer", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumed_with_another_global_batch_keeps_to_its_schedule(client4, train, changes):
    """With more or fewer ranks, or another batch size: learning rate, loss and end, against plain torch."""
    settings = ("model.tell=true", "trainer.epochs=4", "scheduler=cosine", "scheduler.warmup_steps=5")
    settings += ("trainer.checkpoint_every_steps=6",)
    begin = {ranks for ranks, *_ in changes}
    starts = {ranks: train(client4, f"{ranks}", *settings, "data.batch_size=6", ranks=ranks) for ranks in begin}
    for run in starts.values():
        follows(run, run.checkpoint("step-000006.pt"), 6, rates(run, len(run.samples()[0])))
    for ranks, now, batch_size in changes:
        begun, first = starts[ranks], starts[ranks].folder / "checkpoints" / "step-000006.pt"
        name, batch = f"{ranks} to {now}, {batch_size}", f"data.batch_size={batch_size}"
        resumed = train(client4, name, *settings, batch, ranks=now, resume=first)
        follows(resumed, begun.checkpoint("step-000006.pt"), 0, rates(resumed, 6 * ranks, 6))
        last = resumed.checkpoint("last.pt")
        assert last["position"]["epoch"] == 4
        assert last["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0, abs=1e-12)


def rates(run: Trained, first_batch: int, step: int = 0) -> list[float]:
    """The rate of each step of a cosine over 4 epochs of 96 samples, behind 5 steps of the batch that it began with."""
    batch, seen, taken = len(run.samples()[0]), step * first_batch, []
    for _ in run.samples():
        done, total = seen / first_batch, 4 * 96 / first_batch
        taken.append(0.1 * ((done + 1) / 6 if done < 5 else (1 + math.cos(math.pi * (done - 5) / (total - 5))) / 2))
        seen += batch
        seen += 96 - seen % 96 if 96 - seen % 96 < batch else 0  # what does not fill a batch is left out
    return taken


def follows(run: Trained, start: dict[str, Any], behind: int, rates: list[float]) -> None:
    """Its steps after the start, in plain torch with these rates, have these losses.

    Args:
        run: with a record of each step.
        start: the checkpoint to go on from.
        behind: steps of the run that are in it.
        rates: of each step of the run.
    """
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Dropout(0), torch.nn.Linear(32, 4))
    model.load_state_dict({name.removeprefix("layers."): value for name, value in start["model"].items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(start["optimizer"])
    y = torch.arange(96) % 4
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))[y]
    x += 0.5 * torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.arange(96) / 1024
    lines = [line for line in run.metrics() if "train/loss" in line]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-9)
    for line, batch, rate in list(zip(lines, run.samples(), rates, strict=True))[behind:]:
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
