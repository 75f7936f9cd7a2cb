"""A process lives through two worlds: a gang trains, loses a member, forms again, and trains on."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from omegaconf import OmegaConf

from ddp_hydra import heartbeat, results
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.world import World, in_world
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.loop import fit, furthest
from ddp_hydra.training.run import TrainingRun
from tests.ddp_hydra.training import loop_runs
from tests.integration.support.worlds import WorldGang

pytestmark = pytest.mark.integration

GLOBAL_BATCH, KILLED = 12, 2
BY_GLOO = {"parallel": {"comm_hook": "none"}}
CASES = {
    "smaller": (2, {0: 0, 1: 1}, {}),
    "with a new process": (3, {0: 0, 1: 1}, {}),
    "a newcomer is rank 0": pytest.param(3, {1: 0, 2: 1}, BY_GLOO, marks=pytest.mark.slow),
    "with other ranks": pytest.param(2, {0: 1, 1: 0}, {}, marks=pytest.mark.slow),
    "smaller, by gloo": pytest.param(2, {0: 0, 1: 1}, BY_GLOO, marks=pytest.mark.slow),
    "with other ranks, by gloo": pytest.param(2, {0: 1, 1: 0}, BY_GLOO, marks=pytest.mark.slow),
    "a newcomer is rank 0, in shared memory": pytest.param(3, {1: 0, 2: 1}, {}, marks=pytest.mark.slow),
}


def settings(ranks: int, **parts: Any) -> Any:
    changed = OmegaConf.merge(
        loop_runs.config(epochs=3, ema_decay=0.9),
        {"data": {"batch_size": GLOBAL_BATCH // ranks}, "objective": {"metric": "train/loss", "direction": "minimize"}},
        parts,
    )
    changed.optimizer = {"_target_": "torch.optim.Adam", "lr": 0.1}
    return changed


def built(world: World, parts: Any, faults: list[str]) -> TrainingRun:
    data, fault, before = loop_runs.Numbers(2 * GLOBAL_BATCH), fault_injection.activate(faults), world.kept.get("run")
    given = (data, None, None, fault, StopSignal(), None, world, furthest(world, before))
    run = TrainingRun(settings(world.size, **parts), *given, before and before.parallel)
    assert before is None or run.model is before.model
    return run


@in_world
def member(world: World, parts: Any, faults: list[str]) -> tuple[Any, ...]:
    run = world.kept["run"] = built(world, parts, faults)
    began = run.position.step
    print(f"process {os.getpid()} is rank {world.rank} from step {began}")
    fit(run)
    names = "RANK", "WORLD_SIZE"
    environment = [int(os.environ[name]) for name in names]
    weights = {name: value.tolist() for name, value in run.model.state_dict().items()}
    done = heartbeat.here().steps_done
    return os.getpid(), environment, began, done, weights, run.state.metrics["train/loss"]


@in_world
def waiting_member(world: World) -> Any:
    """Train, and stay in step 2 until this rank is asked to leave."""

    def stay(phase: str, step: int) -> None:
        if (phase, step) == ("update", 2):
            print("waits to be asked")
            until = time.monotonic() + 100
            while not heartbeat.here().leave and time.monotonic() < until:
                time.sleep(0.01)

    heartbeat.on_phase(stay)
    return member(world, {}, [])


@pytest.fixture
def gang(client2) -> Iterator[WorldGang]:
    cloudpickle.register_pickle_by_value(loop_runs)
    gang = WorldGang(client2)
    yield gang
    gang.close()
    cloudpickle.unregister_pickle_by_value(loop_runs)


def pids(output: str) -> dict[int, int]:
    """Return rank -> process, as the first world has said."""
    said = re.findall(r"process (\d+) is rank (\d+) from step 0$", output, re.MULTILINE)
    return {int(rank): int(pid) for pid, rank in said}


def check(gang: WorldGang, places: dict[int, int], alone: tuple[Any, float]) -> None:
    former = pids(gang.output)
    for rank, (pid, environment, began, done, weights, loss) in enumerate(gang.values()):
        if rank in places:
            assert pid == former[places[rank]], gang.output
        else:
            assert pid not in former.values()
        assert environment == [rank, len(gang.workers.specs)]
        assert (began, done) == (2, 6), gang.output  # the step under way is done again, no other
        for name, value in alone[0].items():
            torch.testing.assert_close(torch.tensor(weights[name]), value, rtol=1e-5, atol=1e-6)
        assert loss == pytest.approx(alone[1], rel=1e-5)


@pytest.mark.parametrize(("ranks", "places", "parts"), CASES.values(), ids=CASES.keys())
def test_a_gang_that_loses_a_member_forms_again_and_trains_on(alone, gang, ranks, places, parts):
    gang.start(3, member, (parts, [f"kill,rank={KILLED},step=3,at=backward"]), {})
    gang.read(lambda: KILLED in gang.ended)
    assert gang.ended[KILLED].failure.kind == "killed", (gang.ended, gang.output)
    assert gang.ended.keys() == {KILLED}, gang.output
    gang.form(ranks, places, member, (parts, []), {})
    check(gang, places, alone)


def test_ranks_that_are_asked_to_leave_do_so_after_the_same_step(alone, gang):
    gang.start(2, waiting_member, (), {})
    gang.read(lambda: gang.output.count("waits to be asked") == 2)
    gang.send({"leave": True})
    gang.read(lambda: gang.output.count("waits for another world") == 2)
    gang.form(3, {1: 0, 2: 1}, member, ({}, []), {})
    former, values = pids(gang.output), gang.values()
    assert [values[1][0], values[2][0]] == [former[0], former[1]]
    assert {value[2:4] for value in map(tuple, values)} == {(3, 6)}, gang.output
    for name, value in alone[0].items():
        torch.testing.assert_close(torch.tensor(values[0][4][name]), value, rtol=1e-5, atol=1e-6)


@pytest.fixture
def alone(tmp_path):
    """What one rank comes to that nothing disturbs."""
    results.connect(DirectSender(lambda record: None, tmp_path))
    fault_injection.install(0, 0, {})
    run = built(World(), {}, [])
    fit(run)
    yield run.model.state_dict(), run.state.metrics["train/loss"]
    results.connect(None)
    heartbeat.connect(None)
