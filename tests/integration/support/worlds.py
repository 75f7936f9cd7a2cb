"""Processes that live through several worlds; `python -m tests.integration.support.worlds <worlds> <parts> <folder>`.

They are forks of a process that has no threads and has computed nothing. It prints, as JSON, how each has ended, and
what the members of the last world came to.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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

GLOBAL_BATCH, KILLED = 12, 2
FORK = multiprocessing.get_context("fork")


def settings(ranks: int, **parts: Any) -> Any:
    changed = OmegaConf.merge(
        config(epochs=3, ema_decay=0.9),
        {"data": {"batch_size": GLOBAL_BATCH // ranks}, "objective": {"metric": "train/loss", "direction": "minimize"}},
        parts,
    )
    changed.optimizer = {"_target_": "torch.optim.Adam", "lr": 0.1}
    return changed


def data() -> Numbers:
    return Numbers(2 * GLOBAL_BATCH)


def live(
    number: int, worlds: Sequence[Sequence[int]], ports: Sequence[int], folder: Path, told: Connection, parts: Any
) -> None:
    """Be the member `number` of each world that has it."""
    torch.set_num_threads(1)
    heartbeat.connect(None)
    results.connect(DirectSender(lambda record: None, folder))
    fault_injection.install(number, 0, {})
    fault = fault_injection.activate([f"kill,rank={KILLED},step=3,at=backward"])
    run = None
    for generation, members in enumerate(worlds):
        if number not in members:
            continue
        store, size = dist.TCPStore("127.0.0.1", ports[generation], None, False), len(members)
        try:
            with joined(store, members.index(number), size, size, "gloo", 60) as world:
                given = (None, fault, StopSignal(), None, world, partial(furthest, world, run), run and run.parallel)
                model = run and run.model
                run = TrainingRun(settings(size, **parts), data(), None, *given)
                assert model in (None, run.model)
                began = run.position.step
                fit(run)
                weights = {name: value.tolist() for name, value in run.model.state_dict().items()}
                told.send((began, run.position.step, weights, run.metrics["train/loss"]))
        except RuntimeError:  # a member is lost
            traceback.print_exc()
            leave_process_group()


def main(worlds: Sequence[Sequence[int]], parts: Any, folder: Path) -> None:
    servers = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in worlds]
    ports, pipes, members = [server.port for server in servers], {}, {}
    for number in sorted({number for world in worlds for number in world}):
        pipes[number], end = FORK.Pipe(False)
        members[number] = FORK.Process(target=live, args=(number, worlds, ports, folder, end, parts))
        members[number].start()
        end.close()
    found = [pipes[number].recv() for number in worlds[-1]]
    for member in members.values():
        member.join()
    print(json.dumps({"exits": [member.exitcode for member in members.values()], "found": found}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
