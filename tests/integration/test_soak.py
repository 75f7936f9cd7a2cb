"""A job that is hit every few seconds comes to its end with the right result, and nothing grows meanwhile.

`DDP_HYDRA_SOAK_S=3600 pytest tests/integration/test_soak.py` lets it go on for about an hour.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from distributed import Client

from tests.integration.conftest import wait_for
from tests.integration.support.chaos import Chaos, Dask, Story, assert_same, dask

SOAK_S = float(os.environ.get("DDP_HYDRA_SOAK_S", "60"))
"""About how long to go on; read before the tests clear the environment."""
FAULT_S = 4.0
"""About how long it takes from one fault to the next: up to 3 s of training, a hang now and then, a restart."""
RANKS = 3
EPOCH, CHECKPOINT = 8, 4
"""In steps."""

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(200 + 5 * SOAK_S)]

KINDS = {
    "raise": "raised", "exit": "exited", "kill": "killed", "segv": "killed", "hang": "hung", "stop": "hung",
    "worker": "lost",
}  # fmt: skip
PLACES = {"load": 1, "forward": 1, "backward": 1, "update": 1, "log": 1, "save": CHECKPOINT, "validate": EPOCH}
"""And every how many steps they come."""


@dataclass
class Plan:
    """What goes wrong.

    Args:
        faults: one for each attempt but the last.
        kinds: of failures that they make.
        epochs: until after the last of them.
    """

    faults: list[str]
    kinds: list[str]
    epochs: int


def planned(seed: int, n: int) -> Plan:
    """Choose faults: each kind about equally often, on any rank, in any place, every 20 to 60 steps."""
    chance, faults, kinds, step = random.Random(seed), [], [], 0
    rounds = -(-n // len(KINDS))
    for kind in [kind for _ in range(rounds) for kind in chance.sample(sorted(KINDS), len(KINDS))][:n]:
        place, every = chance.choice(list(PLACES.items()))
        step = -(-(step + chance.randint(20, 60)) // every) * every
        faults.append(f"{kind},rank={chance.randrange(RANKS)},step={step},at={place},attempt={len(faults)}")
        kinds.append(KINDS[kind])
    return Plan(faults, kinds, step // EPOCH + 2)


@dataclass
class Use:
    """What a process holds.

    Args:
        memory: resident, in MiB.
        descriptors: open, but for Dask's own connections, which it opens and closes as it likes.
        threads: of it.
    """

    memory: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> Use:
        open_now = process.num_fds() - len(process.net_connections("tcp"))
        return cls(process.memory_info().rss / 2**20, open_now, process.num_threads())


@dataclass
class Uses:
    """What everyone holds while no rank runs."""

    cluster: Dask
    client: Client
    server: psutil.Process

    def take(self) -> dict[str, Use]:
        processes = {"client": psutil.Process(), "scheduler": self.cluster.scheduler, "warm server": self.server}
        uses = {name: Use.of(process) for name, process in processes.items()}
        workers = [Use.of(psutil.Process(pid)) for pid in self.client.run(os.getpid, on_error="ignore").values()]
        most = Use(*(max(getattr(use, name) for use in workers) for name in ("memory", "descriptors", "threads")))
        return uses | {"a worker": most}


@pytest.fixture(scope="module")
def cluster(warm_server, tmp_path_factory) -> Iterator[tuple[Dask, Client]]:
    with dask(tmp_path_factory.mktemp("soak"), 1, workers_each=RANKS) as (cluster, client):
        yield cluster, client


MORE_MEMORY = 24
"""MiB that a process may have more at the end than after the first round of faults: what it has heard, read and
written once, and how its allocator feels."""
MORE_DESCRIPTORS = 8
MORE_THREADS = 6


def test_faults_every_few_seconds_cost_no_result_and_leave_nothing_behind(
    project, tmp_path, ranks_alive, cluster, warm_server
):
    plan = planned(seed=7, n=int(SOAK_S / FAULT_S))
    uses = Uses(*cluster, warm_server)
    chaos = Chaos(project, tmp_path, ranks_alive)
    seen: list[dict[str, Use]] = []

    def look(story: Story) -> None:
        wait_for(lambda: not ranks_alive(), "no rank is left")
        seen.append(uses.take())
        story.records.clear()

    settings = (
        "data.batch_size=4", f"trainer.epochs={plan.epochs}", f"trainer.checkpoint_every_steps={CHECKPOINT}",
        "trainer.log_every_steps=1", "trainer.checkpoint_every_epochs=2", f"dispatch.max_restarts={len(plan.faults)}",
        "dispatch.hang_timeout_s=15", "dispatch.first_step_timeout_s=60",
    )  # fmt: skip
    slow = (*settings, "data.delay_s=0.01")
    story = chaos.done(cluster[1], *plan.faults, ranks=RANKS, on_failure=look, overrides=slow)

    assert [failure.kind for failure in story.failures] == plan.kinds
    assert [over.ranks for over in story.over] == [[]] * len(plan.kinds)
    whole = chaos.done(cluster[1], ranks=RANKS, overrides=settings)
    assert_same(story.checkpoint(), whole.checkpoint())
    assert story.curve() == whole.curve()

    first, last = seen[len(KINDS) - 1], seen[-1]
    print(first, last, sep="\n")
    for name, use in last.items():
        assert use.memory < first[name].memory + MORE_MEMORY, (name, seen)
        assert use.descriptors <= first[name].descriptors + MORE_DESCRIPTORS, (name, seen)
        assert use.threads <= first[name].threads + MORE_THREADS, (name, seen)
