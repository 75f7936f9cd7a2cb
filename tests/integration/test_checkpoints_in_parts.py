"""Checkpoints in a folder: each rank writes its part, reads what it needs, and unpickles nothing but descriptions."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_hydra.config.project import pack
from ddp_hydra.dispatch import Gang
from ddp_hydra.errors import CheckpointError
from ddp_hydra.storage.manifest import read_manifest
from ddp_hydra.training.checkpoint import read
from tests.integration.support import training
from tests.integration.support.training import BLOCKS, Trained
from tests.integration.test_exactness import assert_equal

pytestmark = pytest.mark.integration

PARTS = ["trainer.shard_above_gb=0", "trainer.ema_decay=0.9", "model.over_batch=false"]
STEPS = ("trainer.max_steps=6", "trainer.checkpoint_every_steps=4")
LAYOUTS = {
    "ddp on 1": (1, ["parallel=ddp"]),
    "fsdp2 on 2": (2, ["parallel=fsdp2"]),
    "hsdp on 2x2": (4, ["parallel=fsdp2", "parallel.replicas=2"]),
}


@pytest.fixture
def train(project, tmp_path) -> Callable[..., Trained]:
    """Run the training loop on some ranks of a cluster."""

    def run(client: Any, name: str, *overrides: str, ranks: int = 2, **options: Any) -> Trained:
        words = (*BLOCKS, *STEPS, f"data.batch_size={12 // ranks}", *overrides)
        return training.train(client, project, tmp_path / name, *words, ranks=ranks, **options)

    return run


@pytest.fixture(scope="module")
def in_parts(client2, project, tmp_path_factory) -> Trained:
    """A run of two ranks whose checkpoints are folders."""
    folder = tmp_path_factory.mktemp("parts") / "run"
    return training.train(client2, project, folder, *BLOCKS, *PARTS, *STEPS, "data.batch_size=6", "parallel=fsdp2")


def test_a_large_checkpoint_is_a_folder_of_which_each_rank_writes_a_part(client2, train, in_parts):
    one = train(client2, "one", *PARTS[1:], "parallel=fsdp2")
    found = read(in_parts.folder / "checkpoints" / "step-000006")
    assert_equal({**found, "config": None}, {**one.checkpoint("last.pt"), "config": None})
    assert found["model"]._metadata == one.checkpoint("last.pt")["model"]._metadata
    entry = read_manifest(in_parts.folder / "checkpoints")["step-000004"]
    assert [(part.name, part.rank) for part in entry.parts] == [
        (".metadata", 0), ("__0_0.distcp", 0), ("__1_0.distcp", 1), ("state.pt", 0),
    ]  # fmt: skip


def test_amid_an_epoch_the_statistics_of_norms_are_those_of_rank_0_as_in_one_file(client2, train):
    words = ("trainer.ema_decay=0.9", "trainer.checkpoint_every_steps=1", "trainer.max_steps=2")
    one = train(client2, "one", *words)
    for kind in ("ddp", "fsdp2"):
        parts = train(client2, kind, "trainer.shard_above_gb=0", f"parallel={kind}", *words)
        found = read(parts.folder / "checkpoints" / "step-000001")
        assert any("running_var" in name for name in found["model"])
        assert_equal({**found, "config": None}, {**one.checkpoint("step-000001.pt"), "config": None})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_in_parts_goes_on_in_any_layout(client4, train, in_parts, layout):
    ranks, kind = LAYOUTS[layout]
    folder = in_parts.folder / "checkpoints" / "step-000004"
    resumed = train(client4, "run", *PARTS, *kind, ranks=ranks, resume=folder)
    lines, rest = ([line for line in run.metrics() if line["step"] > 4] for run in (resumed, in_parts))
    for line, wanted in zip(lines, rest, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)
    if layout == "fsdp2 on 2":
        assert lines == rest
        both = (read(run.folder / "checkpoints" / "step-000006") for run in (resumed, in_parts))
        assert_equal(*({**content, "config": None} for content in both))


@pytest.mark.slow
def test_parts_of_ranks_that_have_no_share_of_some_tensors_go_on_on_one(client4, train):
    """Megatron-FSDP's documentation warns that the default planner corrupts checkpoints of uneven shares."""
    few = (*PARTS, "model._target_=models.blocks.Odd", "+model.odd=few")
    whole = train(client4, "whole", *few, "parallel=fsdp2", ranks=4)
    resumed = train(client4, "resumed", *few, ranks=1, resume=whole.folder / "checkpoints" / "step-000004")
    lines, rest = ([line for line in run.metrics() if line["step"] > 4] for run in (resumed, whole))
    for line, wanted in zip(lines, rest, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)


NESTED = (
    *("optimizer=sgd", "optimizer._target_=models.blocks.Nested", "model.over_batch=false"),
    *(f"~optimizer.{name}" for name in ("momentum", "nesterov", "weight_decay", "fused")),
    *("model._target_=models.blocks.Odd", "+model.odd=one"),
)


@pytest.mark.parametrize(
    ("saved", "layout"),
    [
        (["parallel=fsdp2", "trainer.shard_above_gb=0"], "fsdp2 on 2"),
        (["parallel=fsdp2", "trainer.shard_above_gb=0"], "ddp on 1"),
        (["parallel=fsdp2"], "fsdp2 on 2"),
        (["parallel=ddp"], "fsdp2 on 2"),
        pytest.param(["parallel=ddp", "trainer.shard_above_gb=0"], "hsdp on 2x2", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_moments_in_dicts_and_lists_are_shared_and_counters_are_not(client4, train, saved, layout):
    whole = train(client4, "whole", *NESTED, *saved)
    (file,) = (whole.folder / "checkpoints").glob("step-000004*")
    slots = read(file)["optimizer"]["state"]["scale"]
    assert {value.shape for value in (slots["n"], slots["more"]["mean"], *slots["last"], slots["pair"][0])} == {(1,)}
    ranks, kind = LAYOUTS[layout]
    resumed = train(client4, "resumed", *NESTED, *kind, *saved[1:], ranks=ranks, resume=file)
    lines, rest = ([line for line in run.metrics() if line["step"] > 4] for run in (resumed, whole))
    for line, wanted in zip(lines, rest, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)
    if saved[0] == kind[0]:
        assert lines == rest
        both = (read(next((run.folder / "checkpoints").glob("step-000006*"))) for run in (resumed, whole))
        assert_equal(*({**content, "config": None} for content in both))


@pytest.mark.parametrize("parts", [(), ("trainer.shard_above_gb=0",)], ids=["one file", "parts"])
def test_a_model_may_save_a_parameter_under_another_name(client2, project, train, parts):
    renamed = ("model._target_=models.blocks.Odd", "+model.odd=renamed", "parallel=fsdp2", "trainer.ema_decay=0.9")
    whole = train(client2, "whole", *renamed, *parts)
    first, last = (next((whole.folder / "checkpoints").glob(f"step-00000{step}*")) for step in (4, 6))
    assert "old.weight" in read(first)["model"]
    resumed = train(client2, "resumed", *renamed, *parts, resume=first)
    assert_equal(*({**read(one), "config": None} for one in (resumed.folder / "checkpoints" / last.name, last)))
    (line,) = [one for one in whole.metrics() if one["step"] == 6 and "val/loss" in one]
    assert evaluated(client2, project, last, 2)["val/loss"] == pytest.approx(line["val/loss"], rel=1e-6)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_save_in_parts_waits_for_space_on_any_rank(client2, train, in_parts, rank, caplog):
    full = f"+callbacks.full={{_target_: models.disturbed.FullDisk, rank: {rank}, tries: 2}}"
    found = train(client2, "run", *PARTS, "parallel=fsdp2", full)
    waited = [record.getMessage() for record in caplog.records if f"rank {rank}" in record.getMessage()]
    assert re.search(r"folder .* is full \(.* free\): trying again for up to 60 s; free some space there", waited[0])
    assert "there is room again, after" in waited[1]
    contents = (read(run.folder / "checkpoints" / "step-000004") for run in (found, in_parts))
    assert_equal(*({**content, "config": None, "callbacks": None} for content in contents))


def evaluated(client: Any, project: Path, checkpoint: Path, ranks: int) -> dict[str, Any]:
    job = {"split": "val", "overrides": [], "groups": [], "trust": True, "faults": [], "environment": {}}
    gang = Gang(client, ranks=ranks, threads=1, project=pack(project), files={"checkpoint": checkpoint})
    return gang.run("ddp_hydra.training.inference:evaluate", job)[0]["metrics"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_evaluated_in_shares(client4, project, in_parts, ranks):
    """37 samples, on ranks that don't have equally many."""
    found = evaluated(client4, project, in_parts.folder / "checkpoints" / "step-000006", ranks)
    (last,) = [line for line in in_parts.metrics() if line["step"] == 6 and "val/loss" in line]
    assert found == pytest.approx({name: value for name, value in last.items() if name.startswith("val/")}, rel=1e-6)


def test_nothing_of_a_checkpoint_in_parts_is_unpickled_but_descriptions_of_tensors(in_parts, tmp_path):
    folder = tmp_path / "step-000006"
    shutil.copytree(in_parts.folder / "checkpoints" / "step-000006", folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Path("x").exists))
    with pytest.raises(CheckpointError, match=r"has a .*, which describes no tensor"):
        read(folder)
    shutil.copy(in_parts.folder / "checkpoints" / "step-000006" / ".metadata", folder)
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"step-000006 can't be read as a checkpoint \(.*__1_0.distcp"):
        read(folder)
