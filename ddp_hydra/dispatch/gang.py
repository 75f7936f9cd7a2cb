"""Runs a gang: one task for each worker, started together, watched, stopped together, and started again after failures.

As a library:

    values = dispatch.run(client, train, "resnet18", lr=0.1)      # on every worker, inside a process group
    dispatch.run(client, dispatch.script("train.py", "--epochs", 2))    # a script that makes its own process group
    values = dispatch.Gang(client, ranks=4, backend="gloo").run(train, "resnet18", lr=0.1)
    running = dispatch.start(client, train, "resnet18", run_dir="outputs/mine")    # returns at once
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distributed import Client, Future
from msgspec import structs

from ddp_hydra.cluster import preflight
from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.cluster.reservation import Reservation
from ddp_hydra.config.project import Project
from ddp_hydra.console.signals import Interrupts, default_notice
from ddp_hydra.console.text import counted
from ddp_hydra.dispatch import background, placement
from ddp_hydra.dispatch.attempt import Attempt
from ddp_hydra.dispatch.background import Running
from ddp_hydra.dispatch.call import Call, Script, check_arguments, pickled_call, script, show, signature_of
from ddp_hydra.dispatch.health import Restarts
from ddp_hydra.errors import ClusterError, ConfigError, RankFailed, explain
from ddp_hydra.rank.spec import GangSettings, JobSpec
from ddp_hydra.record import File, Metrics, Notice, Record, Up
from ddp_hydra.run_state import AttemptEntry, FailureEntry, Status
from ddp_hydra.writers.run_dir import next_attempt

__all__ = ["Call", "Gang", "Running", "run", "script", "show", "start"]
log = logging.getLogger(__name__)
POLL_S = 0.25
FOR_READERS = {"metrics": "metrics record", "text": "text", "image": "image", "histogram": "histogram", "file": "file"}
"""Kinds of records that `results.log`, `text`, `image`, `histogram` and `submit` send; a name for one record."""


def run(
    client: Client, fn: Callable[..., Any] | str, /, *args: Any, run_dir: str | Path | None = None, **kwargs: Any
) -> list[Any]:
    """Run a function on every worker, each call one rank of a process group.

    Args:
        client: of the Dask cluster.
        fn: the function, "module:name" to import it on the ranks only, or a `script`.
        args: passed to it.
        run_dir: folder for what it sends with `results.*` and prints, see `Gang`; a function that has a parameter
            of this name is run by `Gang(client, run_dir=...).run(...)`.
        kwargs: passed to it.

    Returns:
        The ranks' return values, in order of rank: plain data, arrays and tensors.

    Raises:
        RankFailed: a rank raised, exited or was killed; the message names the first.
        ClusterError: the workers are held by other jobs.
        ConfigError: the function does not take these arguments, or `run_dir` holds another run.
    """
    return _gang(client, fn, run_dir).run(fn, *args, **kwargs)


def start(
    client: Client, fn: Callable[..., Any] | str, /, *args: Any, run_dir: str | Path | None = None, **kwargs: Any
) -> Running:
    """Start a function on every worker, as `run` does, and return at once.

    Args:
        client, fn, args, run_dir, kwargs: see `run`.

    Returns:
        The running gang: `done()`, `result(timeout)`, `cancel()`, and `futures`, one for each rank. The end of this
        program, or of its client, stops the ranks.

    Raises:
        ConfigError: the function does not take these arguments.
    """
    return _gang(client, fn, run_dir).start(fn, *args, **kwargs)


def check_client(client: object) -> None:
    """Check that a client can be used from here.

    Raises:
        ConfigError: it is none, or it is closed or asynchronous.
    """
    if not isinstance(client, Client):
        given = f"Client({client!r})" if isinstance(client, str) else "Client(cluster) or Client('tcp://<scheduler>')"
        raise ConfigError(f"a {type(client).__name__} is no client of a Dask cluster: give a distributed.{given}")
    if client.asynchronous:
        raise ConfigError(
            "this client is asynchronous, and a gang is waited for: give it a client of its own, "
            "distributed.Client(client.scheduler.address), in a thread, as asyncio.to_thread does"
        )
    if client.status in ("closing", "closed"):
        raise ConfigError(f"this client is {client.status}: give a new one, distributed.Client('tcp://<scheduler>')")


def _gang(client: Client, fn: Callable[..., Any] | str, run_dir: str | Path | None) -> Gang:
    signature = None if run_dir is None else signature_of(fn)
    if signature is not None and "run_dir" in signature.parameters:
        raise ConfigError(
            "run_dir is ambiguous, because the function has a parameter run_dir, too: type "
            "dispatch.Gang(client, run_dir=<folder>).run(function, ..., run_dir=<the function's>)"
        )
    return Gang(client, run_dir=run_dir)


class Gang:
    """Starts the ranks of one job, watches them, and starts them again after failures.

    Args:
        client: of the Dask cluster.
        ranks: how many; None for as many as the workers take.
        on_record: called with each record, on a thread of its own, in each rank's order; a file that it does not
            `fetch` is dropped. Without it, a script's output on rank 0 is shown; other records are counted, and a
            warning says that they were dropped.
        run_dir: a folder of this machine for what the function prints and sends with `results.*`. It becomes what a job
            leaves: metrics.jsonl, tensorboard/, checkpoints/, submitted files, logs/rank-<r>.log, and at the end
            summary.json. It holds one run; after a failure or an interruption, it may be given again.
        project: packed project space that the ranks import from.
        files: files of this machine that rank 0 needs, see `Call`.
        stop: asks a gang that runs in the background to end.
        settings: all others.
        changes: those that differ from `settings`, by name.

    Raises:
        ConfigError: there is no such setting, or its value is not allowed.
    """

    def __init__(
        self,
        client: Client,
        ranks: int | None = None,
        *,
        on_record: Callable[[Record], None] | None = None,
        run_dir: str | Path | None = None,
        project: Project | None = None,
        files: Mapping[str, Path] | None = None,
        stop: threading.Event | None = None,
        settings: GangSettings | None = None,
        **changes: Any,
    ) -> None:
        given = {} if settings is None else structs.asdict(settings)
        self.settings = GangSettings.make(given | ({} if ranks is None else {"ranks": ranks}) | changes)
        self.client, self.on_record, self.run_dir, self.project = client, on_record, run_dir, project
        self.files, self.stop = files or {}, stop or threading.Event()
        self.lock, self.in_use = threading.Lock(), threading.Lock()
        self.readers: list[Callable[[Record], None]] = [] if on_record is None else [on_record]
        self.read_from: Attempt | None = None
        self.is_fetched = False
        self.unread = UnreadRecords()
        self.notice: Callable[[], str] | None = None
        self.interrupts = Interrupts(lambda: (self.notice or default_notice)())
        self.attempt: Attempt | None = None
        self.first_attempt = 0
        self.restarts = Restarts(0)
        self.world_size, self.slots, self.logged_step = 0, 1, 0

    def run(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on each rank; see `dispatch.run`. All arguments are the function's."""
        return self.run_recorded(self.checked_call(fn, args, kwargs))

    def start(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Running:
        """Start `fn(*args, **kwargs)` on each rank, and return at once; see `dispatch.start`."""
        call = self.checked_call(fn, args, kwargs)
        try:
            workers = len(workers_of(self.client))
            slots_of_each = placement.slots_of_workers(self.client, self.settings.ranks_per_worker)
            folder = None if self.run_dir is None else background.local_path(self.run_dir)
            ranks, is_graceful = self.settings.ranks or max(1, workers) * slots_of_each, self.settings.grace_s > 0
            return Running(lambda: self.run_recorded(call), self.stop, ranks, self.interrupts, is_graceful, folder)
        except BaseException:
            self.in_use.release()
            raise

    def checked_call(self, fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return the call of a function that takes these arguments; from here until its end, this gang is in use.

        Raises:
            ConfigError: this gang runs already.
        """
        check_client(self.client)
        call = Call(fn, args, kwargs, self.files)
        check_arguments(call)
        if not self.in_use.acquire(blocking=False):
            raise ConfigError("this gang runs already: make another one, dispatch.Gang(client, ...)")
        self.stop.clear()
        self.interrupts.wanted = False  # a gang that was cancelled leaves it set
        return call

    def run_recorded(self, call: Call) -> list[Any]:
        """Run a checked call on each rank; write what the ranks send into `run_dir`, if there is one."""
        try:
            shown = [show] if isinstance(call.fn, Script) and self.on_record is None else []
            if self.run_dir is None:
                return self.run_attempts(lambda number, world_size: call, *shown)
            folder, give_up, status = background.local_path(self.run_dir), threading.Event(), Status()
            first, settings = next_attempt(folder), (self.settings.retry_s, give_up)
            with background.recorded(folder, self.fetch, *settings, self.summary, status) as write:
                earlier = status.attempts

                def begin(number: int, world_size: int) -> Call:
                    status.world_size, status.attempts = world_size, [*earlier, *self.restarts.ended]
                    with self.lock:
                        write(Record(Up(), attempt=number))
                    return call

                return self.run_attempts(begin, write, *shown, first_attempt=first, on_give_up=give_up.set)
        finally:
            self.in_use.release()

    def summary(self) -> dict[str, Any]:
        """Return the number of ranks, how many attempts have begun, and those that have failed."""
        return {
            "world_size": self.world_size,
            "begun": self.attempt.number - self.first_attempt + 1 if self.attempt else 0,
            "attempts": list(self.restarts.ended),
        }

    def run_attempts(
        self,
        call_of: Callable[[int, int], Call],
        *readers: Callable[[Record], None],
        first_attempt: int = 0,
        ranks_before: int | None = None,
        expected: int | None = None,
        notice: Callable[[], str] | None = None,
        goes_on: Callable[[int], str] = lambda done: "",
        on_give_up: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Start the ranks, and start them again after failures.

        Args:
            call_of: returns what an attempt runs, for its number and world size; called before each attempt.
            readers: called with each record, before `on_record`.
            first_attempt: number of the first attempt; the others count on from it.
            ranks_before: ranks of an earlier attempt, whose process was lost, 0 if it had none yet, or if this process
                may find the cluster after a loss; its workers are waited for as after a failure. None: there was none.
            expected: how many workers the cluster was waited for. Without a number of ranks, it begins with no fewer.
            notice: returns what is printed when the user wants to end.
            goes_on: returns, in words, where a new attempt begins, given the steps that the last attempt has done.
            on_give_up: called when the user ends the job at once: `write` should stop waiting for anything.
        """
        self.readers = [*readers, *([self.on_record] if self.on_record else [])]
        self.notice, self.attempt, self.first_attempt = notice, None, first_attempt
        settings, name = self.settings, f"{self.settings.name}-{secrets.token_hex(4)}"
        self.restarts, self.unread = Restarts(settings.max_restarts), UnreadRecords()
        with ExitStack() as stack:
            stack.callback(self.unread.report)
            stack.enter_context(self.interrupts.caught(settings.grace_s > 0))
            stack.callback(self._clear_outboxes)  # after the release of the workers, for which other gangs may wait
            self.slots = self.find_slots(may_wait=ranks_before is not None)
            wanted, least = self.workers_for(ranks_before or settings.ranks), self.workers_for(settings.min_ranks)
            there = expected or 0
            if ranks_before is not None:
                there = wanted or expected or 1
            if not ranks_before and expected:  # more ranks than the cluster has ever had workers for
                there = min(there, expected)
            reservation = Reservation(self.client, name, wanted, settings.sweep, self.check_stop, self.slots, there)
            stack.enter_context(reservation)
            stack.callback(self._release_tasks)
            settings = structs.replace(settings, cwd=settings.cwd or str(Path.cwd()))
            job = JobSpec(gang=name, attempt=first_attempt, ranks=(), project=self.project, settings=settings)
            timeouts = settings.queue_timeout_s, settings.restart_wait_s
            workers = reservation.reserve(job.topic, *timeouts, least=(least or wanted) if ranks_before else None)
            preflight.check_workers(self.client, workers, settings.pip, settings.interface)
            while True:
                places = tuple(placement.plan(workers, self.slots, settings.ranks))
                job = structs.replace(job, ranks=places, ranks_on_host=self.ranks_on_host())
                waiting: Mapping[str, Future] = {} if self.attempt is None else self.attempt.waiting
                self.attempt = Attempt(self.client, job, self.interrupts, self.read, self.stop, on_give_up, waiting)
                try:
                    return self.run_attempt(self.attempt, call_of(job.attempt, len(job.ranks)))
                except RankFailed as error:
                    silent = self.attempt.silent
                    self.decide_restart(error, goes_on)
                    self.attempt.workers.clear()
                    job = structs.replace(job, attempt=job.attempt + 1)
                    try:
                        workers = reservation.renew(job.topic, silent, least, settings.restart_wait_s)
                        preflight.check_workers(self.client, workers, settings.pip, settings.interface)
                    except ClusterError as why_not:
                        error.add_reason(str(why_not))
                        raise error from None

    def find_slots(self, may_wait: bool) -> int:
        """Return how many ranks each worker holds; where its GPUs tell, wait for one if all workers are lost."""
        settings = self.settings
        until = time.monotonic() + settings.restart_wait_s
        if may_wait and settings.ranks_per_worker == "auto" and not workers_of(self.client):
            log.info("waiting for workers: the cluster has none")
            while not workers_of(self.client) and time.monotonic() < until:
                self.check_stop()
                time.sleep(POLL_S)
        return placement.slots_of_workers(self.client, settings.ranks_per_worker)

    def ranks_on_host(self) -> dict[str, int]:
        """Return host -> ranks of all jobs of the sweep; {} outside of a sweep."""
        if not self.settings.sweep:
            return {}
        known = workers_of(self.client).values()
        return {host: n * self.slots for host, n in Counter(worker["host"] for worker in known).items()}

    def check_stop(self) -> None:
        """Raise KeyboardInterrupt if a gang that runs in the background is to end."""
        if self.stop.is_set():
            raise KeyboardInterrupt

    def workers_for(self, ranks: int | None) -> int | None:
        """Return how many workers some ranks need; None for None."""
        return None if ranks is None else -(-ranks // self.slots)

    @property
    def trains(self) -> bool:
        """Return whether the ranks are in the training loop, where they can be asked to finish."""
        attempt = self.attempt
        return attempt is not None and attempt.health.in_loop(attempt.rank_states.running)

    def _release_tasks(self) -> None:
        if self.attempt is not None:
            self.attempt.release(self.attempt.waiting.values())

    def _clear_outboxes(self) -> None:
        if self.attempt is not None:
            self.attempt.workers.clear()

    def run_attempt(self, attempt: Attempt, call: Call) -> list[Any]:
        """Run one attempt to its end."""
        self.world_size, self.logged_step = len(attempt.specs), 0
        kwargs = dict(call.kwargs)
        if call.files:
            kwargs["files"] = attempt.send_files(call.files)
        with self.interrupts.deferred():
            return attempt.run(pickled_call(call.fn, call.args, kwargs), is_script=isinstance(call.fn, Script))

    def decide_restart(self, error: RankFailed, goes_on: Callable[[int], str]) -> None:
        """Raise the error again unless there is another attempt."""
        assert self.attempt is not None
        done = max(self.attempt.health.steps_done, error.failure.step - 1, self.logged_step)
        wall_s = time.monotonic() - self.attempt.begun_at
        begun, planned = time.time() - wall_s, self.attempt.was_planned(error.failure)
        entry = AttemptEntry(
            attempt=self.attempt.number, world_size=self.world_size, steps_done=done, started=begun, wall_s=wall_s,
            failure=FailureEntry(**error.failure.as_dict()),
        )  # fmt: skip
        why_not = self.restarts.note(entry, error.failure, planned)
        if why_not is not None or self.interrupts.wanted or self.attempt.records.error:
            if why_not:
                error.add_reason(why_not)
            raise error
        cause = explain(error.failure).partition("\n")[0]
        count = "a planned end" if planned else f"restart {self.restarts.used} of {self.restarts.most}"
        log.warning("%s%s: %s", count, goes_on(done), cause)

    def read(self, attempt: Attempt, record: Record) -> None:
        """Pass on one record at a time: records of a failed attempt may still be read when the next one begins."""
        if isinstance(record.data, Notice):
            return  # the attempt has logged it already
        with self.lock:
            self.read_from, self.is_fetched = attempt, False
            if isinstance(record.data, Metrics):
                self.logged_step = max(self.logged_step, record.step or 0)
            for read in self.readers:
                read(record)
            is_unfetched = isinstance(record.data, File) and record.data.source is not None and not self.is_fetched
            if is_unfetched or self.readers in ([], [show]):
                self.unread.note(record)
            if is_unfetched:  # the rank may be waiting for room in its outbox
                attempt.workers.drop(record)

    def fetch(self, record: Record, target: Path) -> None:
        """Fetch the file of a record; only `on_record` may call it."""
        assert self.read_from is not None, "fetch is for on_record"
        self.is_fetched = True
        self.read_from.workers.fetch(record, target)


class UnreadRecords:
    """Counts records by kind that are dropped because nothing reads them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def note(self, record: Record) -> None:
        if record.kind in FOR_READERS:
            self.counts[record.kind] += 1
            self.bytes += record.data.size if isinstance(record.data, File) else 0

    def report(self) -> None:
        """Warn of what was dropped, and say how to receive it."""
        named = [counted(self.counts[kind], name) for kind, name in FOR_READERS.items() if self.counts[kind]]
        if named:
            log.warning(
                "dropped, because nothing reads what the ranks sent with results.*: %s%s; have it written with "
                "run_dir=<folder>, or receive it with dispatch.Gang(client, on_record=<function of a record>) "
                "and files in there with the gang's fetch(record, path)",
                ", ".join(named), f" ({self.bytes / 2**20:,.1f} MiB)" if self.counts["file"] else "",
            )  # fmt: skip
