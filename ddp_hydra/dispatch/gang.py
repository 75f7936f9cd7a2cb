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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client, Future

from ddp_hydra.cluster import preflight
from ddp_hydra.cluster.reservation import Reservation
from ddp_hydra.console.signals import Interrupts
from ddp_hydra.dispatch import placement, run_dir, slots
from ddp_hydra.dispatch.attempt import Attempt
from ddp_hydra.dispatch.background import Running
from ddp_hydra.dispatch.call import Call, check_arguments, pickled, show, signature_of
from ddp_hydra.dispatch.record_queue import UnreadRecords
from ddp_hydra.dispatch.restarts import Ended, Restarts
from ddp_hydra.dispatch.settings import Settings
from ddp_hydra.dispatch.user_script import Script, script
from ddp_hydra.errors import ClusterError, ConfigError, RankFailed, explain
from ddp_hydra.rank.spec import LaunchSpec, RankSpec
from ddp_hydra.record import File, Notice, Record
from ddp_hydra.writers.run_dir import next_attempt

__all__ = ["Call", "Gang", "Running", "run", "script", "show", "start"]
log = logging.getLogger(__name__)


def run(
    client: Client, fn: Callable[..., Any] | str, /, *args: Any, run_dir: str | Path | None = None, **kwargs: Any
) -> list[Any]:
    """Run a function on every worker, each call one rank of a process group.

    Args:
        client: of the Dask cluster.
        fn: the function, "module:name" to import it on the ranks only, or a `script`.
        args: passed to it.
        run_dir: folder for what it sends with `results.*` and prints, see `Settings`; a function that has a parameter
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


def _gang(client: Client, fn: Callable[..., Any] | str, run_dir: str | Path | None) -> Gang:
    signature = None if run_dir is None else signature_of(fn)
    if signature is not None and "run_dir" in signature.parameters:
        raise ConfigError(
            "run_dir is ambiguous, because the function has a parameter run_dir, too: type "
            "dispatch.Gang(client, run_dir=<folder>).run(function, ..., run_dir=<the function's>)"
        )
    return Gang(client, run_dir=run_dir, on_record=show if isinstance(fn, Script) else None)


@dataclass
class Gang(Settings):
    """Starts the ranks of one job, watches them, and starts them again after failures; see `Settings`."""

    lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    attempt: Attempt | None = field(default=None, init=False, repr=False)
    read_from: Attempt | None = field(default=None, init=False, repr=False)
    fetched: bool = field(default=False, init=False, repr=False)
    unread: UnreadRecords = field(default_factory=UnreadRecords, init=False, repr=False)
    interrupts: Interrupts = field(default_factory=Interrupts, init=False, repr=False)
    restarts: Restarts = field(default_factory=lambda: Restarts(0), init=False, repr=False)
    world_size: int = field(default=0, init=False, repr=False)
    workers_on_host: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    slots: int = field(default=1, init=False, repr=False)
    grouped: bool = field(default=True, init=False, repr=False)
    unique_name: str = field(default="", init=False, repr=False)
    in_use: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    record: Callable[[Record], None] | None = field(default=None, init=False, repr=False)

    def run(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on each rank; see `dispatch.run`. All arguments are the function's."""
        call = Call(fn, args, kwargs, self.files)
        check_arguments(call)
        self.stop.clear()
        return self.run_recorded(call)

    def start(self, fn: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Running:
        """Start `fn(*args, **kwargs)` on each rank, and return at once; see `dispatch.start`."""
        call = Call(fn, args, kwargs, self.files)
        check_arguments(call)
        self.stop.clear()
        workers = len(self.client.scheduler_info(n_workers=-1)["workers"])
        slots_of_each = slots.of_workers(self.client, self.ranks_per_worker)
        folder = None if self.run_dir is None else run_dir.local_path(self.run_dir)
        ranks = self.ranks or max(1, workers) * slots_of_each
        return Running(lambda: self.run_recorded(call), self.stop, ranks, self.interrupts, self.grace_s > 0, folder)

    def run_recorded(self, call: Call) -> list[Any]:
        """Run a call on each rank; write what the ranks send into `run_dir`, if there is one.

        Raises:
            ConfigError: this gang runs already.
        """
        if not self.in_use.acquire(blocking=False):
            raise ConfigError("this gang runs already: make another one, dispatch.Gang(client, ...)")
        try:
            if self.run_dir is None:
                return self.run_attempts(lambda number, world_size: call)
            folder, give_up = run_dir.local_path(self.run_dir), threading.Event()
            self.on_give_up, self.first_attempt = give_up.set, next_attempt(folder)
            with run_dir.recorded(folder, self.fetch, self.retry_s, give_up, self.summary) as self.record:
                return self.run_attempts(lambda number, world_size: call)
        finally:
            self.record = None
            self.in_use.release()

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says of the attempts."""
        return {
            "world_size": self.world_size,
            "restarts": len(self.restarts.ended),
            "attempts": [attempt.entry() for attempt in self.restarts.ended],
        }

    def run_attempts(self, call_of: Callable[[int, int], Call]) -> list[Any]:
        """Start the ranks, and start them again after failures.

        Args:
            call_of: returns what an attempt runs, for its number and world size; called before each attempt.
        """
        self.unique_name = name = f"{self.name}-{secrets.token_hex(4)}"
        self.restarts, self.unread = Restarts(self.max_restarts), UnreadRecords()
        self.attempt = None
        with ExitStack() as stack:
            stack.callback(self.report_dropped)
            stack.enter_context(self.interrupts.caught(self.grace_s > 0))
            stack.callback(self.clean_up)  # after the release of the workers, for which other gangs may wait
            self.slots = slots.of_workers(self.client, self.ranks_per_worker)
            wanted = self.workers_for(self.ranks)
            reservation = Reservation(self.client, name, wanted, self.sweep, self.check_stop, self.slots)
            stack.enter_context(reservation)
            stack.callback(self.release_tasks)
            number, topic = self.first_attempt, name
            workers = reservation.reserve(topic, self.queue_timeout_s)
            preflight.check_workers(self.client, workers, self.pip, self.interface)
            while True:
                if self.sweep:  # those of its other jobs count, too
                    known = self.client.scheduler_info(n_workers=-1)["workers"].values()
                    self.workers_on_host = Counter(worker["host"] for worker in known)
                specs = placement.plan(workers, self.slots, self.ranks)
                waiting: Mapping[str, Future] = {} if self.attempt is None else self.attempt.waiting
                self.attempt = Attempt(
                    self, number, topic, specs, self.interrupts, self.read, self.launch_spec, name, waiting
                )
                try:
                    return self.run_attempt(self.attempt, call_of(number, len(specs)))
                except RankFailed as error:
                    silent = self.attempt.watchdog.silent
                    self.decide_restart(error)
                    self.attempt.clean_up()
                    number, topic = number + 1, f"{name}-{number + 1}"
                    try:
                        workers = reservation.renew(
                            topic, silent, self.workers_for(self.min_ranks), self.restart_wait_s
                        )
                        preflight.check_workers(self.client, workers, self.pip, self.interface)
                    except ClusterError as why_not:
                        error.add_reason(str(why_not))
                        raise error from None

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

    def report_dropped(self) -> None:
        """Warn if records were dropped because nothing reads them."""
        if sentence := self.unread.sentence():
            log.warning("%s", sentence)

    def release_tasks(self) -> None:
        """End the tasks that wait for another attempt."""
        if self.attempt is not None:
            self.attempt.release(self.attempt.waiting.values())

    def clean_up(self) -> None:
        """Empty the outboxes of the last attempt."""
        if self.attempt is not None:
            self.attempt.clean_up()

    def run_attempt(self, attempt: Attempt, call: Call) -> list[Any]:
        """Run one attempt to its end."""
        self.world_size = len(attempt.specs)
        self.grouped = self.group and not isinstance(call.fn, Script)
        kwargs = dict(call.kwargs)
        if call.files:
            kwargs["files"] = attempt.send_files(call.files)
        with self.interrupts.deferred():
            return attempt.run(pickled((call.fn, call.args, kwargs)))

    def decide_restart(self, error: RankFailed) -> None:
        """Raise the error again unless there is another attempt."""
        assert self.attempt is not None
        done = max(self.attempt.health.steps_done, error.failure.step - 1)
        wall_s = time.monotonic() - self.attempt.begun_at
        ended = Ended(self.attempt.number, self.world_size, done, time.time() - wall_s, wall_s, error.failure)
        why_not = self.restarts.note(ended)
        if why_not is not None or self.interrupts.wanted or self.attempt.records.error:
            if why_not:
                error.add_reason(why_not)
            raise error
        cause, count = explain(error.failure).partition("\n")[0], len(self.restarts.ended)
        log.warning("restart %d of %d%s: %s", count, self.max_restarts, self.goes_on(done), cause)

    def read(self, attempt: Attempt, record: Record) -> None:
        """Pass on one record at a time: those of a failed attempt may still be read when the next one begins."""
        if isinstance(record.data, Notice):
            return  # the attempt has logged it already
        with self.lock:
            self.read_from, self.fetched = attempt, False
            for read in (self.record, self.on_record):
                if read is not None:
                    read(record)
            is_unfetched = isinstance(record.data, File) and record.data.source is not None and not self.fetched
            if is_unfetched or (self.record is None and self.on_record in (None, show)):
                self.unread.note(record)
            if is_unfetched:  # the rank may be waiting for room in its outbox
                attempt.workers.drop(record)

    def fetch(self, record: Record, target: Path) -> None:
        """Fetch the file of a record; only `on_record` may call it."""
        assert self.read_from is not None, "fetch is for on_record"
        self.fetched = True
        self.read_from.workers.fetch(record, target)

    def launch_spec(self, number: int, name: str, specs: Sequence[RankSpec], call: bytes) -> LaunchSpec:
        """Return the launch spec of some ranks, of one worker or of several."""
        return LaunchSpec(
            gang=name,
            attempt=number,
            specs=tuple(specs),
            call=call,
            project=self.project,
            backend=self.backend,
            timeout_s=self.timeout_s,
            retry_s=self.retry_s,
            group=self.grouped,
            threads=self.threads,
            data_workers=self.data_workers,
            ports=self.port_range,
            interface=self.interface,
            cwd=self.cwd or str(Path.cwd()),
            owner=self.unique_name,
            keep_warm_s=self.keep_warm_s or 0.0,
            ranks_on_host={host: workers * self.slots for host, workers in self.workers_on_host.items()},
            stays=self.max_restarts > 0,
        )
