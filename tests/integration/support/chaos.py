"""Jobs with faults on their way, on clusters that are there already: what became of them, and what was left.

story = chaos(client, "kill,rank=1,step=9")
story.failures[0].kind, story.summary["restarts"], story.checkpoint()
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
import torch
from distributed import Client
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from ddp_hydra.cluster import connect
from ddp_hydra.config import schema
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.dispatch import Gang, gang
from ddp_hydra.errors import DdpHydraError, Failure, RankFailed
from ddp_hydra.job.run import run_job
from ddp_hydra.record import Record
from tests.integration.conftest import wait_for

SETTINGS = (
    "data=tiny", "model=tiny", "model.dropout=0.5", "optimizer=adam", "optimizer.lr=0.01", "scheduler=cosine",
    "trainer.epochs=3", "trainer.threads=1", "trainer.log_every_steps=3", "trainer.checkpoint_every_steps=4",
    "dispatch.max_restarts=3", "dispatch.hang_timeout_s=60", "dispatch.first_step_timeout_s=60",
    "dispatch.restart_wait_s=100",
)  # fmt: skip
"""Whatever a resume could lose is there: dropout, Adam's moments, a schedule, and stops in the middle of an epoch. An
epoch has 6 steps: 96 samples, 16 in a global batch."""
CLOCKS = ("time", "samples_per_s", "tokens_per_s", "slowest_rank", "data_wait")
SHARES = {2: ("data.batch_size=8",), 4: ("data.batch_size=4",)}
"""The same global batch on 2 and on 4 ranks."""


@dataclass
class Over:
    failure: Failure
    ranks: list[str]


@dataclass
class Story:
    """What became of a job."""

    folder: Path
    gang: Gang | None = None
    over: list[Over] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def failures(self) -> list[Failure]:
        return [over.failure for over in self.over]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def strikes(self) -> int:
        """Count the faults that struck, as far as the rank could still say it."""
        return sum(r.kind == "log" and "fault on purpose: " in r.data.text for r in self.records)

    def checkpoint(self, name: str = "last.pt") -> dict[str, Any]:
        """A checkpoint, but for the config: there are faults in it."""
        content = torch.load(self.folder / "checkpoints" / name, weights_only=True)
        return {key: value for key, value in content.items() if key != "config"}

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without what is measured by a clock."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]

    def curve(self) -> list[dict[str, Any]]:
        """The same, where a step was done again only as it was done last, and without the attempt."""
        kept = {}
        for line in self.lines():
            kept[line["step"], *line] = {name: value for name, value in line.items() if name != "attempt"}
        return [kept[key] for key in sorted(kept, key=lambda key: key[0])]

    def samples(self, accumulate: Mapping[int, int] = MappingProxyType({})) -> dict[int, list[int]]:
        """The global batch of each step as the model saw it last, the ranks' parts one after the other.

        Each rank of an attempt tells its part of each step, and begins after the step that the start names.

        Args:
            accumulate: attempt -> how often each of its ranks tells in a step, where that is not once.
        """
        seen: dict[int, list[int]] = {}
        for attempt in sorted({record.attempt for record in self.records}):
            its = [record for record in self.records if record.attempt == attempt]
            begin = next((r.step for r in its if r.kind == "start"), None)
            told = [r for r in its if r.kind == "text" and r.data.name == "samples"]
            ranks = sorted({r.rank for r in told})
            times = accumulate.get(attempt, 1)
            texts = ([json.loads(r.data.text) for r in told if r.rank == rank] for rank in ranks)
            parts = [[list(chain(*said[n : n + times])) for n in range(0, len(said), times)] for said in texts]
            for count, batch in enumerate(zip(*parts, strict=False), (begin or 0) + 1):
                seen[count] = list(chain(*batch))
        return seen


@functools.cache
def composed(project: Path, *overrides: str) -> DictConfig:
    schema.register()
    with initialize_config_dir(str(project / "conf"), **VERSION_BASE):
        return compose("config", [*SETTINGS, *overrides])


@dataclass
class Chaos:
    """Runs jobs, just as the command line does, on clusters that are there already.

    Args:
        project: the project space.
        folder: for the run directories.
        ranks_alive: tells the ranks that run.
        stories: of the jobs so far, and of the one that runs.
    """

    project: Path
    folder: Path
    ranks_alive: Callable[[], list[str]]
    stories: list[Story] = field(default_factory=list)

    def __call__(
        self,
        client: Client,
        *faults: str,
        ranks: int = 2,
        on_record: Callable[[Record], Any] = lambda record: None,
        on_failure: Callable[[Story], Any] = lambda story: None,
        resume: Story | None = None,
        overrides: tuple[str, ...] = (),
    ) -> Story:
        """Run a job to its end, whatever that is.

        Args:
            client: of the cluster.
            faults: that strike it.
            ranks: how many.
            on_record: called with each record, before the writers.
            on_failure: called before each new attempt.
            resume: the job to go on with.
            overrides: of its config.
        """
        story = Story(self.folder / str(len(self.stories)))
        self.stories.append(story)
        cfg = composed(self.project, *SHARES.get(ranks, ()), f"dispatch.ranks={ranks}", *overrides).copy()
        cfg.faults = list(faults)
        cfg.resume = str(resume.folder) if resume else None
        ranks_alive = self.ranks_alive

        class Watched(Gang):
            def run_attempts(self, call_of: Any, write: Any, **options: Any) -> list[Any]:
                story.gang = self

                def read(record: Record) -> None:
                    story.records.append(record)
                    on_record(record)
                    write(record)

                return super().run_attempts(call_of, read, **options)

            def decide_restart(self, error: RankFailed, *args: Any) -> None:
                if error.failure.kind == "lost":  # its worker can't say when the rank has ended
                    wait_for(lambda: not ranks_alive(), "the end of the ranks of a lost worker")
                story.over.append(Over(error.failure, ranks_alive()))
                super().decide_restart(error, *args)
                on_failure(story)

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DDP_HYDRA_PROJECT", str(self.project))
            patch.setattr(gang, "Gang", Watched)
            patch.setattr(connect, "connect", lambda cfg, logs=None: contextlib.nullcontext(client))
            try:
                run_job(cfg, story.folder)
            except (DdpHydraError, KeyboardInterrupt) as error:
                story.error = error
        nothing_left(client)
        return story

    def done(self, client: Client, *faults: str, **options: Any) -> Story:
        story = self(client, *faults, **options)
        if story.error is not None:
            raise story.error
        assert story.summary["status"] == "done"
        return story


def nothing_left(client: Client) -> None:
    """No task, topic or reservation on the scheduler, and no file of a job on a worker that is there."""

    def look(dask_scheduler: Any) -> list[str]:
        topics = [name for name in dask_scheduler._broker._topics if name.startswith("job-")]
        held = getattr(dask_scheduler, "_ddp_hydra_reservations", {})
        return [str(key) for key in dask_scheduler.tasks] + topics + list(held)

    def spooled(dask_worker: Any) -> list[str]:
        from pathlib import Path

        return [str(path) for path in (Path(dask_worker.local_directory) / "ddp_hydra").glob("*")]

    def left() -> list[str]:
        files = client.run(spooled, on_error="ignore").values()
        return client.run_on_scheduler(look) + list(chain(*files))

    wait_for(lambda: not left(), "nothing left on the scheduler and the workers")


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Bit for bit, all the way down."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), f"{where}: {one} is not {other}"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}/{number}")
    else:
        assert one == other, f"{where}: {one} is not {other}"


IDLE = "15 minutes"
"""After so long, a cluster ends that was left behind by tests that were killed."""


class Dask:
    """A cluster as people start it by hand: `dask scheduler` and some `dask worker`. No children of the tests."""

    def __init__(self, folder: Path, programs: int, workers_each: int = 1) -> None:
        self.folder, self.file, self.workers_each = folder, folder / "scheduler.json", workers_each
        self.started = 0
        self.scheduler = self.start("scheduler", "--host", "127.0.0.1", "--port", "0", "--idle-timeout", IDLE)
        self.programs = [self.add() for _ in range(programs)]

    def start(self, what: str, *arguments: str) -> psutil.Process:
        self.started += 1
        pid = self.folder / f"{self.started}.pid"
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", "--scheduler-file", str(self.file)]
        command += ["--no-dashboard", "--pid-file", str(pid), *arguments]
        with (self.folder / "log").open("ab") as log:
            subprocess.run(["setsid", "--fork", *command], stdout=log, stderr=log, cwd=self.folder, check=True)
        wait_for(lambda: pid.exists() and pid.read_text(), f"dask {what} is up")
        return psutil.Process(int(pid.read_text()))

    def add(self) -> psutil.Process:
        where = ("--host", "127.0.0.1", "--local-directory", str(self.folder))
        return self.start("worker", "--nthreads", "1", "--nworkers", str(self.workers_each), *where)

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        wait_for(lambda: self.file.exists() and self.file.read_text().endswith("}"), "the scheduler is up")
        with Client(scheduler_file=str(self.file), timeout="100s", set_as_default=False) as client:
            client.wait_for_workers(len(self.programs) * self.workers_each, timeout=100)
            yield client

    def heal(self, client: Client) -> None:
        """Start new programs for those that have ended or are about to; returns once all workers are there."""

        def healed() -> bool:
            self.programs = [program if program.is_running() else self.add() for program in self.programs]
            workers = client.run(os.getppid, on_error="ignore").values()
            return set(workers) == {program.pid for program in self.programs}

        wait_for(healed, "all workers are there")

    def close(self) -> None:
        for program in (*self.programs, self.scheduler):
            signal_all(program, signal.SIGKILL)


def signal_all(program: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (program, *program.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@contextlib.contextmanager
def dask(folder: Path, programs: int, workers_each: int = 1) -> Iterator[tuple[Dask, Client]]:
    folder.mkdir(exist_ok=True)
    cluster = Dask(folder, programs, workers_each)
    try:
        with cluster.client() as client:
            yield cluster, client
    finally:
        cluster.close()
