"""What users of other trainers have reported of checkpoints works here: one test for each report."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_hydra import results
from ddp_hydra.dispatch import inline
from ddp_hydra.rank.world import World
from ddp_hydra.storage.manifest import find_checkpoint, read_manifest
from ddp_hydra.training.checkpoint import CheckpointSaver, read
from ddp_hydra.training.lr_schedules import constant
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.state import Position, TrainingState
from tests.integration.support import training
from tests.integration.support.training import BLOCKS, Trained

pytestmark = pytest.mark.integration

SAVED, STEPS = 4, 6
PARTS, FILE = "trainer.shard_above_gb=0", "trainer.shard_above_gb=null"
COMPILED = ("trainer.compile=default", "model.backend=eager")
FSDP2, DDP = "parallel=fsdp2", "parallel=ddp"
FEW = ("model._target_=models.blocks.Odd", "+model.odd=few")


@pytest.fixture(scope="module")
def train(client4, project, tmp_path_factory) -> Callable[..., Trained]:
    """Run the training loop; a run that saves is done once."""
    runs: dict[Any, Trained] = {}

    def run(ranks: int, *overrides: str, resume: Path | None = None) -> Trained:
        key = (ranks, overrides, resume)
        if key not in runs:
            saves = (f"trainer.checkpoint_every_steps={SAVED}", f"trainer.max_steps={STEPS}")
            split = ("model.over_batch=false", "trainer.ema_decay=0.9", f"data.batch_size={12 // ranks}")
            folder, words = tmp_path_factory.mktemp("run") / "run", (*BLOCKS, *saves, *split, *overrides)
            runs[key] = training.train(client4, project, folder, *words, ranks=ranks, resume=resume)
        return runs[key]

    return run


def checkpoint(run: Trained, step: int = SAVED) -> Path:
    entries = read_manifest(run.folder / "checkpoints")
    return find_checkpoint(run.folder / "checkpoints" / next(name for name in entries if f"step-{step:06d}" in name))


REPORTS = {
    # A sharded checkpoint is written, and can't be loaded.
    "Lightning#20373": ((2, PARTS, FSDP2), (2, PARTS, FSDP2)),
    # Loading it: "Missing key optimizer.state.0.step".
    "accelerate#3971": ((2, PARTS, FSDP2), (2, PARTS, DDP)),
    # One file of a compiled model: KeyError in the state of the optimizer.
    "Lightning#21357": ((2, FILE, FSDP2, *COMPILED), (2, FILE, FSDP2)),
    # Another number of workers: sizes don't match.
    "Lightning#16815": ((2, PARTS, FSDP2), (4, PARTS, FSDP2)),
    # Whether a checkpoint is sharded or whole has to be said at a resume.
    "axolotl#3609": ((2, PARTS, FSDP2), (2, FILE, FSDP2)),
    # Uneven shares: the default planner "silently corrupts the checkpoint".
    "Megatron-FSDP's documentation": ((4, PARTS, FSDP2, *FEW), (1, PARTS, DDP, *FEW)),
}


@pytest.mark.slow  # test_resume_matrix.py and test_checkpoints_in_parts.py have the quick ones
@pytest.mark.parametrize("report", REPORTS)
def test_a_resume_that_fails_elsewhere_goes_on(train, report):
    saving, resuming = REPORTS[report]
    whole = train(*saving)
    resumed = train(*resuming, resume=checkpoint(whole))
    lines, rest = ([line for line in run.metrics() if line["step"] > SAVED] for run in (resumed, whole))
    assert len(lines) == len(rest) > 0
    for line, wanted in zip(lines, rest, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)
    found, wanted = (read(checkpoint(run, STEPS)) for run in (resumed, whole))
    assert not any("_orig_mod" in name for name in found["model"])
    assert {float(slots["step"]) for slots in found["optimizer"]["state"].values()} == {float(STEPS)}
    for name, value in wanted["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-5, atol=1e-7)


# accelerate#3896: a load right after a save in one process fails, in a new process it works.
@pytest.mark.parametrize("form", [PARTS, pytest.param(FILE, marks=pytest.mark.slow)])
def test_a_process_loads_what_it_has_saved(client2, project, tmp_path, form):
    again = f"{{_target_: models.disturbed.Reload, step: {SAVED}, folder: {tmp_path / 'run' / 'checkpoints'}}}"
    saves = (
        f"trainer.checkpoint_every_steps={SAVED}",
        f"trainer.max_steps={STEPS}",
        "trainer.ema_decay=0.9",
        "model.over_batch=false",
    )
    training.train(client2, project, tmp_path / "run", *BLOCKS, *saves, form, FSDP2, f"+callbacks.again={again}")


# NeMo Automodel#3125: what copies the state works once only. pytorch#170163: each save leaks memory.
@pytest.mark.parametrize("shard_above_gb", [None, 0.0], ids=["one file", "parts"])
def test_many_saves_of_one_process_take_the_memory_of_one(tmp_path, shard_above_gb):
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    state = TrainingState(Parallel().adopt(model), optimizer, constant(optimizer, 1), Position(), {})
    results.connect(inline.DirectSender(lambda record: Path(record.data.source).unlink(), tmp_path))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        saver, sizes = CheckpointSaver(World(group=dist.group.WORLD), shard_above_gb), []
        for number in range(25):
            state.position.step += 1
            saver.save(state, {}, best=False)
            saver.wait()
            if number in (4, 24):
                gc.collect()
                sizes.append(psutil.Process().memory_info().rss)
    finally:
        dist.destroy_process_group()
        results.connect(None)
    assert sizes[1] - sizes[0] < 4 * state.n_bytes(), "20 saves later"
