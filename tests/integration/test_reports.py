"""What users of other trainers have reported of checkpoints works here: one test for each report."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_hydra import results
from ddp_hydra.dispatch import inline
from ddp_hydra.rank.world import World
from ddp_hydra.training.checkpoint import CheckpointSaver
from ddp_hydra.training.lr_schedules import constant
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.state import Position, TrainingState
from tests.integration.support import training
from tests.integration.support.training import BLOCKS

pytestmark = pytest.mark.integration

SAVED, STEPS = 4, 6
PARTS, FILE = "trainer.shard_above_gb=0", "trainer.shard_above_gb=null"


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
    training.train(
        client2, project, tmp_path / "run", *BLOCKS, *saves, form, "parallel=fsdp2", f"+callbacks.again={again}"
    )


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
