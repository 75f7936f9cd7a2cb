"""Iterable data sets on a gang: the same samples on any ranks, an end that none misses, exact resume and restart."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.integration.project.data.tiny import Points
from tests.integration.support import training
from tests.integration.support.training import Trained
from tests.integration.test_chaos import assert_survived
from tests.integration.test_chaos import chaos as chaos
from tests.integration.test_exactness import assert_equal

pytestmark = pytest.mark.integration

SETTINGS = (
    "data=stream",
    "model=tiny",
    "optimizer=adam",
    "scheduler=cosine",
    "trainer.log_every_steps=1",
    "trainer.checkpoint_every_steps=4",
    "trainer.epochs=3",
    "trainer.max_steps=1000",
    "results.keep_checkpoints=null",
)


@pytest.fixture
def train(project, tmp_path) -> Callable[..., Trained]:
    def run(client: Any, name: str, *overrides: str, **options: Any) -> Trained:
        return training.train(client, project, tmp_path / name, *SETTINGS, *overrides, **options)

    return run


def header(run: Trained) -> str:
    (start,) = (record for record in run.records if record.kind == "start")
    return "\n".join(start.data.lines)


def test_one_two_and_four_ranks_see_the_same_samples_and_accumulation_changes_nothing(client4, train):
    """The last steps of an epoch are those of all data: its length is not known."""
    ways = {"1": (1, 24, 1), "2": (2, 12, 1), "4": (4, 6, 1), "2 micro-batches": (2, 6, 2)}
    runs = {
        name: train(
            client4, name, "model.tell=true", "trainer.checkpoint_every_steps=0", f"data.batch_size={batch_size}",
            f"trainer.gradient_accumulation_steps={micro_batches}", ranks=ranks,
        )
        for name, (ranks, batch_size, micro_batches) in ways.items()
    }  # fmt: skip
    reference = runs["1"]
    assert len(reference.samples()) == 3 * 96 // 24
    assert sorted(chain(*reference.samples()[:4])) == list(range(96))
    assert reference.samples()[:4] != reference.samples()[4:8]
    for name, run in runs.items():
        assert run.value["steps"] == 12
        if name != "2 micro-batches":  # which come in another order
            assert run.samples() == reference.samples()
        assert len(run.metrics()) == len(reference.metrics())
        for line, expected in zip(run.metrics(), reference.metrics(), strict=True):
            assert line == pytest.approx(expected, rel=1e-4)
    assert "each rank reads all samples and takes its share; resumes by counting" in header(runs["2"])
    assert "steps     1,000 at most" in header(runs["2"])


def written(folder: str, files: int, n: int = 96, seed: int = 1) -> str:
    """Write the points into Parquet files; return a pattern of their names."""
    points = Points(n, seed)
    Path(folder).mkdir(exist_ok=True)
    for number in range(files):
        own = slice(n * number // files, n * (number + 1) // files)
        table = pyarrow.table({"x": points.x[own].tolist(), "labels": points.y[own].tolist()})
        pyarrow.parquet.write_table(table, Path(folder) / f"{number}.parquet", row_group_size=10)
    return f"{folder}/*.parquet"


PARQUET = (
    "data=huggingface", "data.batch_size=8", "data.path=parquet", "data.streaming=true", "model=with_loss",
    "task=model_loss",
)  # fmt: skip


@pytest.fixture(
    params=[
        "counted",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("workers", "files", "odd files", "buffer")),
    ]
)
def kind(request, tmp_path) -> list[str]:
    """The settings of a kind of stream."""
    if request.param == "counted":
        return ["model.dropout=0.5"]
    if request.param == "workers":  # of a DataLoader in the project
        return ["model.dropout=0.5", "data.train._target_=data.streams.by_workers"]
    files = written(str(tmp_path / "points"), 3 if request.param == "odd files" else 4)
    judged = written(str(tmp_path / "judged"), 1, n=37, seed=2)
    buffer = 20 if request.param == "buffer" else 0
    return [*PARQUET, f"data.files='{files}'", f"data.val_files='{judged}'", f"data.shuffle_buffer={buffer}",
            "model.dropout=0.5"]  # fmt: skip


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(client2, train, kind, step):
    whole = train(client2, "whole", *kind)
    assert whole.value["steps"] == 18
    resumed = train(client2, "resumed", *kind, resume=whole.folder / "checkpoints" / f"step-{step:06d}.pt")
    rest = [line for line in whole.metrics() if line["step"] > step]
    assert [line for line in resumed.metrics() if line["step"] > step] == rest
    assert_equal(resumed.checkpoint("last.pt"), whole.checkpoint("last.pt"))
    assert_equal(resumed.checkpoint("step-000016.pt"), whole.checkpoint("step-000016.pt"))


def test_a_run_resumed_with_another_number_of_ranks_reads_on_where_it_stopped(client4, train):
    settings = ("model.tell=true", "trainer.epochs=2", "trainer.checkpoint_every_steps=2")
    whole = train(client4, "whole", *settings, "data.batch_size=12", ranks=2)
    first = whole.folder / "checkpoints" / "step-000002.pt"
    resumed = train(client4, "resumed", *settings, "data.batch_size=6", ranks=4, resume=first)
    assert resumed.samples() == whole.samples()[2:]


def test_the_rank_that_runs_dry_ends_the_epoch_of_all_and_validation_counts_each_sample_once(client4, train):
    """Ranks have 24, 19, 14 and 9 samples: two steps of four. Of 37 samples, ranks judge 10, 9, 9 and 9."""
    unequal = ("data.train._target_=data.streams.UnequalParts", "data.batch_size=4", "trainer.epochs=2")
    run = train(client4, "unequal", *unequal, "model.tell=true", ranks=4)
    assert run.value["steps"] == 4
    assert [len(step) for step in run.samples()] == [16] * 4
    (*_, validation) = [line for line in run.metrics() if "val/accuracy" in line]
    correct = validation["val/accuracy"] * 37
    assert correct == pytest.approx(round(correct), abs=1e-9)
    assert validation["step"] == 4
    assert run.checkpoint("last.pt")["position"] == {"step": 4, "epoch": 2, "samples": 64, "offset": 0}


@pytest.mark.parametrize(
    "kind",
    ["counted", *(pytest.param(name, marks=pytest.mark.slow) for name in ("workers", "files", "odd files", "buffer"))],
    indirect=True,
)
def test_a_killed_rank_is_started_again_and_makes_no_difference(chaos, client2, kind):
    settings = ("data=stream", *kind, "trainer.max_steps=1000", "results.keep_checkpoints=null")
    whole = chaos.done(client2, overrides=settings)
    story = chaos.done(client2, "kill,rank=1,step=11", overrides=settings)
    assert [failure.kind for failure in story.failures] == ["killed"]
    assert_survived(story, whole, restarts=1)
    for left in Path(tempfile.gettempdir()).glob(
        "pymp-*"
    ):  # of the killed rank's own DataLoader, as of any torch script
        shutil.rmtree(left)


def test_an_epoch_of_given_length_is_planned_and_ends_there(client2, train):
    run = train(client2, "planned", "+data.n_samples=50", "trainer.max_steps=null", "scheduler.warmup_epochs=1")
    assert run.value["steps"] == 3 * 3
    assert "steps     9, 3 in an epoch" in header(run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["counted", "files"], indirect=True)
def test_a_roll_back_reads_on_where_the_checkpoint_was(chaos, client2, kind):
    settings = ("data=stream", *kind, "trainer.max_steps=1000")
    left_out, rolled_back = (
        chaos.done(client2, "nan,rank=1,step=10", overrides=(*settings, f"trainer.on_nonfinite={policy}"))
        for policy in ("skip", "rollback")
    )
    for part in ("model", "optimizer", "stream"):
        assert_equal(rolled_back.checkpoint()[part], left_out.checkpoint()[part])
