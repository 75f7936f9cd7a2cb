"""Fixtures of tests that run the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from ddp_hydra import heartbeat, results
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.world import ALONE
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.loop import fit, resumed, summarise
from ddp_hydra.training.run import TrainingRun
from tests.ddp_hydra.training.loop_runs import Numbers, Run, config


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    results.connect(None)
    fault_injection.install(0, 0, {})
    heartbeat.connect(None)


@pytest.fixture
def train(group, tmp_path):
    """Run the loop; `stop_at` is the place where it is asked to finish, `whole` replaces nodes and does not merge."""
    runs = 0

    def run(
        resume=None,
        stop_at=None,
        fault=(),
        val=5,
        parts=None,
        start=None,
        data=Numbers,
        into=None,
        whole=None,
        first_save=False,
        **trainer: Any,
    ) -> Run:
        nonlocal runs
        runs += 1
        made = Run(tmp_path / str(runs))
        if into is not None:  # also of a run that fails
            into.append(made)
        made.folder.mkdir()
        heartbeat.connect(None)
        shared_status = heartbeat.here()
        if stop_at is not None:
            heartbeat.on_phase(lambda *place: shared_status.ask_to_finish(1) if place == stop_at else None)
        results.connect(DirectSender(made.records.append, made.folder))
        fault_injection.install(0, 0, {})
        armed = fault_injection.activate(fault)
        cfg = OmegaConf.merge({**config(**trainer), **(whole or {})}, parts or {})
        stop_signal = StopSignal(cfg.trainer.time_limit_s)
        sets = data(9), data(val) if val else None
        run = TrainingRun(cfg, *sets, start, armed, stop_signal, saved=resumed(ALONE, resume))
        fit(run, first_save)
        made.value = summarise(run)
        return made

    return run
