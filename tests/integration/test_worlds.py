"""A process lives through two worlds: a gang trains, loses a member, forms again, and trains on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from ddp_hydra import heartbeat, results
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.world import joined, leave_process_group
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.loop import fit, furthest
from ddp_hydra.training.run import TrainingRun
from tests.ddp_hydra.training.loop_runs import Numbers, config

pytestmark = pytest.mark.integration

GLOBAL_BATCH, KILLED = 12, 2
FORK = multiprocessing.get_context("fork")
"""No child computes with several threads: OpenMP does not survive a fork once it has threads."""


def settings(ranks: int, **parts: Any) -> Any:
    adam = {"optimizer": {"_target_": "torch.optim.Adam", "lr": 0.1, "momentum": None}}
    changed = OmegaConf.merge(
        config(epochs=3, ema_decay=0.9),
        {"data": {"batch_size": GLOBAL_BATCH // ranks}, "objective": {"metric": "train/loss", "direction": "minimize"}},
        adam,
        parts,
    )
    del changed.optimizer.momentum
    return changed


def live(
    number: int, worlds: Sequence[Sequence[int]], ports: Sequence[int], folder: Path, told: Connection, parts: Any
) -> None:
    """Be the member `number` of each world that has it."""
    heartbeat.connect(None)
    results.connect(DirectSender(lambda record: None, folder))
    fault_injection.install(number, 0, {})
    fault = fault_injection.activate([f"kill,rank={KILLED},step=3,at=backward"])
    data, run = Numbers(2 * GLOBAL_BATCH), None
    for generation, members in enumerate(worlds):
        if number not in members:
            continue
        store, size = dist.TCPStore("127.0.0.1", ports[generation], None, False), len(members)
        try:
            with joined(store, members.index(number), size, size, "gloo", 60) as world:
                given = (None, fault, StopSignal(), None, world)
                run = TrainingRun(settings(size, **parts), data, None, *given, partial(furthest, world, run))
                began = run.position.step
                fit(run)
                weights = {name: value.tolist() for name, value in run.model.state_dict().items()}
                told.send((began, run.position.step, weights, run.metrics["train/loss"]))
        except RuntimeError:  # a member is lost
            leave_process_group()


BY_GLOO = {"parallel": {"comm_hook": "none"}}
CASES = {
    "smaller": ([0, 1], {}),
    "with other ranks": ([1, 0], {}),
    "a newcomer is rank 0": ([3, 0, 1], {}),
    "smaller, by gloo": ([0, 1], BY_GLOO),
    "with other ranks, by gloo": pytest.param([1, 0], BY_GLOO, marks=pytest.mark.slow),
    "a newcomer is rank 0, by gloo": pytest.param([3, 0, 1], BY_GLOO, marks=pytest.mark.slow),
}


@pytest.mark.parametrize(("later", "parts"), CASES.values(), ids=CASES.keys())
def test_a_gang_that_loses_a_member_forms_again_and_trains_on(alone, later, parts, tmp_path):
    servers = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in range(2)]
    worlds, pipes, members = ([0, 1, KILLED], later), {}, {}
    for number in sorted({*worlds[0], *later}):
        pipes[number], end = FORK.Pipe(False)
        given = (number, worlds, [server.port for server in servers], tmp_path, end, parts)
        members[number] = FORK.Process(target=live, args=given)
        members[number].start()
        end.close()
    assert all(pipes[number].poll(120) for number in later)
    found = [pipes[number].recv() for number in later]
    for member in members.values():
        member.join(60)
    assert {number: member.exitcode for number, member in members.items()} == {
        number: -9 if number == KILLED else 0 for number in members
    }
    for began, ended, weights, loss in found:
        assert (began, ended) == (2, 6)  # the step under way is done again, no other
        for name, value in alone[0].items():
            torch.testing.assert_close(torch.tensor(weights[name]), value, rtol=1e-5, atol=1e-6)
        assert loss == pytest.approx(alone[1], rel=1e-5)


@pytest.fixture
def alone(tmp_path):
    """What one rank comes to that nothing disturbs."""
    results.connect(DirectSender(lambda record: None, tmp_path))
    fault_injection.install(0, 0, {})
    run = TrainingRun(settings(1), Numbers(2 * GLOBAL_BATCH), None, None, fault_injection.activate([]), StopSignal())
    fit(run)
    yield run.model.state_dict(), run.metrics["train/loss"]
    results.connect(None)
    heartbeat.connect(None)
