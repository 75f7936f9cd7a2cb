"""`parallel=fsdp2`: the bits of DDP, checkpoints that load into any layout, and what can't be sharded is refused."""

from __future__ import annotations

import contextlib
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from ddp_hydra.config import schema
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.config.project import pack
from ddp_hydra.dispatch import Gang
from ddp_hydra.errors import CheckpointError, RankFailed
from ddp_hydra.job.run import run_job
from ddp_hydra.storage.manifest import find_checkpoint, read_manifest
from ddp_hydra.training.checkpoint import read
from tests.integration.support import training
from tests.integration.support.training import Trained
from tests.integration.test_exactness import assert_equal

pytestmark = pytest.mark.integration

BLOCKS = (
    "data=tiny",
    "model=blocks",
    "optimizer=adamw",
    "optimizer.fused=false",  # its last elements round otherwise on a CPU, by the length of a share
    "scheduler=cosine",
    "trainer.log_every_steps=1",
    "results.keep_checkpoints=null",
)


@pytest.fixture
def train(project, tmp_path) -> Callable[..., Trained]:
    """Run the training loop on some ranks of a cluster."""

    def run(client: Any, name: str, *overrides: str, **options: Any) -> Trained:
        return training.train(client, project, tmp_path / name, *BLOCKS, *overrides, **options)

    return run


def learned(run: Trained) -> dict[str, Any]:
    content = run.checkpoint("last.pt")
    return {
        name: content[name]
        for name in ("model", "optimizer", "position", "best", "scheduler", "ema")
        if name in content
    }


EVERYTHING = (
    "trainer.epochs=2",
    "model.dropout=0.3",
    "trainer.gradient_accumulation_steps=2",
    "data.batch_size=4",
    "trainer.ema_decay=0.9",
    "trainer.activation_checkpointing=[Block]",
    "trainer.freeze=['stem.bias']",
    "trainer.on_nonfinite=rollback",
    "trainer.checkpoint_every_steps=4",
    "faults=['nan,rank=1,step=6']",
)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, EVERYTHING, id="everything"),
        pytest.param(1, ["trainer.max_steps=8"], id="one rank"),
        pytest.param(2, ["trainer.max_steps=8", "model.tied=true"], id="tied"),
        pytest.param(2, ["trainer.max_steps=8", "parallel.blocks=[Block,Linear]"], id="small", marks=pytest.mark.slow),
        pytest.param(
            2, ["trainer.max_steps=8", "parallel.reshard_after_forward=false"], id="kept", marks=pytest.mark.slow
        ),
        pytest.param(2, ["trainer.max_steps=8", "optimizer=sgd", "optimizer.fused=false"], id="sgd"),
    ],
)
def test_it_has_the_bits_of_ddp(client2, train, ranks, options):
    both = [one for one in options if not one.startswith("parallel.")]
    sharded = train(client2, "fsdp2", "parallel=fsdp2", *options, ranks=ranks)
    whole = train(client2, "ddp", "parallel=ddp", *both, ranks=ranks)
    assert_equal(learned(sharded), learned(whole))
    assert sharded.metrics("grad_norm") == whole.metrics("grad_norm")


LAYOUTS = {
    "ddp on 1": (1, ["parallel=ddp"]),
    "ddp on 2": (2, ["parallel=ddp"]),
    "ddp on 4": (4, ["parallel=ddp"]),
    "fsdp2 on 1": (1, ["parallel=fsdp2"]),
    "fsdp2 on 2": (2, ["parallel=fsdp2"]),
    "fsdp2 on 4": (4, ["parallel=fsdp2"]),
    "hsdp on 2x2": (4, ["parallel=fsdp2", "parallel.replicas=2"]),
}
SAVED, STEPS = 4, 6
LEARNS = (
    "model.over_batch=false",
    "model.tell=true",
    "trainer.ema_decay=0.9",
    f"trainer.checkpoint_every_steps={SAVED}",
)
PRUNED = {
    "ddp on 2": ("fsdp2 on 4", "hsdp on 2x2", "fsdp2 on 1"),
    "fsdp2 on 2": ("ddp on 1", "fsdp2 on 4"),
    "hsdp on 2x2": ("fsdp2 on 2",),
}


@pytest.fixture(scope="module")
def saved(client4, project, tmp_path_factory) -> Callable[[str], Trained]:
    """A run of a layout that is not interrupted, with its checkpoint amid it."""
    runs: dict[str, Trained] = {}

    def of(layout: str) -> Trained:
        if layout not in runs:
            runs[layout] = run_in(client4, project, tmp_path_factory.mktemp("saved") / "run", layout)
        return runs[layout]

    return of


def run_in(client: Any, project: Any, folder: Any, layout: str, **options: Any) -> Trained:
    ranks, kind = LAYOUTS[layout]
    batch = f"data.batch_size={12 // ranks}"
    steps = f"trainer.max_steps={STEPS}"
    return training.train(client, project, folder, *BLOCKS, *LEARNS, batch, steps, *kind, ranks=ranks, **options)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(one, other, marks=[] if other in PRUNED.get(one, ()) else pytest.mark.slow)
        for one in LAYOUTS
        for other in LAYOUTS
    ],
)
def test_any_checkpoint_goes_on_in_any_layout(client4, project, tmp_path, saved, source, target):
    whole = saved(source)
    file = whole.folder / "checkpoints" / f"step-{SAVED:06d}.pt"
    resumed = run_in(client4, project, tmp_path / "run", target, resume=file)
    rest = [line for line in whole.metrics() if line["step"] > SAVED]
    lines = [line for line in resumed.metrics() if line["step"] > SAVED]
    assert [line["step"] for line in lines] == [line["step"] for line in rest] != []
    assert resumed.samples() == whole.samples()[SAVED:]
    for line, wanted in zip(lines, rest, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)
    if source == target:
        assert lines == rest
        assert_equal(learned(resumed), learned(whole))


ODD = ("model._target_=models.blocks.Odd",)
REFUSED = {
    "Adafactor can't compute with shares of parameters": [
        "optimizer=sgd",
        "optimizer._target_=torch.optim.Adafactor",
        *(f"~optimizer.{key}" for key in ("momentum", "nesterov", "fused")),
    ],
    "does not go with trainer.precision=fp16: give trainer.precision=bf16": ["trainer.precision=fp16"],
    "parallel.replicas=3 does not divide this job's 2 ranks": ["parallel.replicas=3"],
    "parallel.blocks has Bottleneck, but the model has BatchNorm1d, Block, Blocks,": ["parallel.blocks=[Bottleneck]"],
    "does not go with trainer.channels_last=true": ["trainer.channels_last=true"],
    "parallel.cpu_offload=true is for GPUs": ["parallel.cpu_offload=true"],
    "the loss Centres has parameters: make it a part of the model": [
        "loss._target_=models.blocks.Centres",
        "~loss.label_smoothing",
    ],
    "can't share parameters with no axis: scale: make them": [*ODD, "+model.odd=scalar"],
    "and buffers stay as they are": [*ODD, "+model.odd=mask", "trainer.precision=bf16"],
    "Torch said: models/blocks.py, line": [*ODD, "+model.odd=looks"],
    "parameters of a block need one type": [*ODD, "+model.odd=double"],
    "the task's step did not call the model itself": ["task._target_=models.blocks.HeadAlone"],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_can_not_be_sharded_is_refused(client2, train, sentence):
    with pytest.raises(RankFailed, match=re.escape(sentence)):
        train(client2, "run", "parallel=fsdp2", *REFUSED[sentence])


def test_a_rank_where_nothing_counts_takes_part(client2, train):
    """Rank 1 has no sample that counts in any step."""
    counted = ["task._target_=models.blocks.FirstHalf", "trainer.max_steps=4", "model.over_batch=false"]
    sharded, whole = (train(client2, kind, f"parallel={kind}", *counted) for kind in ("fsdp2", "ddp"))
    assert_equal(learned(sharded), learned(whole))


def test_a_function_may_share_parts_of_the_model_otherwise(client2, train, tmp_path):
    """By tensor parallelism, whose sums round otherwise; a checkpoint of it loads into other layouts.

    Ranks have equally many validation samples, as this takes.
    """
    options = [
        "trainer.max_steps=8",
        "data.val.n=32",
        "trainer.clip_norm=1",
        "model.over_batch=false",
        "trainer.ema_decay=0.9",
    ]
    width = ["parallel=fsdp2", "parallel.fn=models.blocks.over_width"]
    shared, whole = (train(client2, kind[-1][-5:], *kind, *options) for kind in (width, ["parallel=ddp"]))
    for line, wanted in zip(shared.metrics(), whole.metrics(), strict=True):
        assert line == pytest.approx(wanted, rel=1e-4)
    file = shared.folder / "checkpoints" / "step-000008.pt"
    (tmp_path / "in").mkdir()
    shutil.copy(file, tmp_path / "in")
    later = [one.replace("=8", "=12") for one in options]
    resumed = [
        train(client2, f"later {kind[-1][-5:]}", *kind, *later, resume=tmp_path / "in" / file.name)
        for kind in (width, ["parallel=ddp"])
    ]
    for line, wanted in zip(*(run.metrics() for run in resumed), strict=True):
        assert line == pytest.approx(wanted, rel=1e-4)


def test_parameters_are_unfrozen_after_a_validation_and_shown(client2, train):
    """They are shares, of which all ranks make a histogram."""
    options = [
        "trainer.epochs=2",
        "trainer.freeze=['*','!head*']",
        "+callbacks.unfreeze={_target_: ddp_hydra.training.callbacks.Unfreeze, after_epochs: 1}",
        "+callbacks.show={_target_: ddp_hydra.training.callbacks.Histograms, every_steps: 4}",
    ]
    sharded, whole = (train(client2, kind, f"parallel={kind}", *options) for kind in ("fsdp2", "ddp"))
    assert_equal(learned(sharded), learned(whole))
    shown = [[(one.step, one.data) for one in run.records if one.kind == "histogram"] for run in (sharded, whole)]
    assert shown[0] == shown[1] != []


def test_it_computes_in_bf16_and_keeps_fp32(client2, train):
    run = train(client2, "run", "parallel=fsdp2", "trainer.precision=bf16", "trainer.max_steps=12")
    losses = [line["train/loss"] for line in run.metrics() if "train/loss" in line]
    assert losses[-1] < losses[0]
    assert {value.dtype for value in run.checkpoint("last.pt")["model"].values()} == {torch.float32, torch.int64}


PARTS = ["trainer.shard_above_gb=0", "trainer.ema_decay=0.9", "model.over_batch=false", "data.batch_size=6"]


@pytest.fixture(scope="module")
def in_parts(client2, project, tmp_path_factory) -> Trained:
    """A run of two ranks whose checkpoints are folders."""
    folder, steps = (
        tmp_path_factory.mktemp("parts") / "run",
        ("trainer.max_steps=6", "trainer.checkpoint_every_steps=4"),
    )
    return training.train(client2, project, folder, *BLOCKS, *PARTS, *steps, "parallel=fsdp2")


def test_a_large_checkpoint_is_a_folder_of_which_each_rank_writes_a_part(client2, train, in_parts):
    one = train(client2, "one", *PARTS[1:], "trainer.max_steps=6", "trainer.checkpoint_every_steps=4", "parallel=fsdp2")
    found = read(in_parts.folder / "checkpoints" / "step-000006")
    assert_equal({**found, "config": None}, {**one.checkpoint("last.pt"), "config": None})
    assert found["model"]._metadata == one.checkpoint("last.pt")["model"]._metadata
    entry = read_manifest(in_parts.folder / "checkpoints")["step-000004"]
    assert [(part.name, part.rank) for part in entry.parts] == [
        (".metadata", 0), ("__0_0.distcp", 0), ("__1_0.distcp", 1), ("state.pt", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["ddp on 1", "fsdp2 on 2", "hsdp on 2x2"])
def test_a_checkpoint_in_parts_goes_on_in_any_layout(client4, train, in_parts, layout):
    ranks, kind = LAYOUTS[layout]
    steps, batch = "trainer.max_steps=6", f"data.batch_size={12 // ranks}"
    folder = in_parts.folder / "checkpoints" / "step-000004"
    resumed = train(client4, "run", *PARTS, steps, batch, *kind, ranks=ranks, resume=folder)
    lines, rest = ([line for line in run.metrics() if line["step"] > 4] for run in (resumed, in_parts))
    for line, wanted in zip(lines, rest, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)
    if layout == "fsdp2 on 2":
        assert lines == rest
        both = (read(run.folder / "checkpoints" / "step-000006") for run in (resumed, in_parts))
        assert_equal(*({**content, "config": None} for content in both))


FAULTS = [
    "kill,rank=1,step=4,at=write",
    "kill,rank=0,step=4,at=write",
    "raise,rank=1,step=4,at=save",
    "kill,rank=1,step=6,at=write",
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_in_parts_that_is_cut_off_is_none(client2, project, tmp_path, monkeypatch, in_parts, fault):
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(project))
    monkeypatch.setattr("ddp_hydra.cluster.connect.connect", lambda *_, **__: contextlib.nullcontext(client2))
    schema.register()
    steps = ("trainer.max_steps=6", "trainer.checkpoint_every_steps=4", "trainer.threads=1", "dispatch.ranks=2")
    with initialize_config_dir(str(project / "conf"), **VERSION_BASE):
        cfg = compose("config", [*BLOCKS, *PARTS, *steps, "parallel=fsdp2", f"faults=['{fault}']"])
    run_job(cfg, tmp_path / "run")
    found, wanted = (read(find_checkpoint(folder)) for folder in (tmp_path / "run", in_parts.folder))
    names = ("model", "ema", "optimizer", "position")
    assert_equal(*({name: content[name] for name in names} for content in (found, wanted)))


def evaluated(client: Any, project: Path, checkpoint: Path, ranks: int) -> dict[str, Any]:
    job = {"split": "val", "overrides": [], "groups": [], "trust": True, "faults": []}
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
