"""Runs one rank in this process: the only one, so that breakpoints and profilers work, or one of a launcher's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hydra import heartbeat, results
from ddp_hydra.console.signals import Interrupts
from ddp_hydra.errors import ClusterError, ConfigError, DdpHydraError, Failure, RankFailed
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.failure import explain, root_cause
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.results import Record

if TYPE_CHECKING:
    from torch.distributed import Store

ALONE = RankSpec(0, 1, 0, 1, 0, worker="", host="127.0.0.1")
CAUSE_S = 1.0
"""Seconds that a rank whose partners failed waits for their reason."""
CHOICES = "ddp_hydra/choices"
"""Key of the store under which rank 0 publishes what only it knows."""
MAX_NAMED = 5
"""Config keys that a message names; the rest are counted."""
BURST_S = 2.0
"""Seconds in which a second Ctrl-C counts as the same: a launcher's process gets it from the terminal and from the
launcher."""


class DirectSender:
    """Passes records directly to their reader.

    Args:
        on_record: called with each record, one at a time.
        outbox: folder for files on their way.
    """

    def __init__(self, on_record: Callable[[Record], None], outbox: Path) -> None:
        self.on_record = on_record
        self.outbox = outbox
        self.lock = threading.Lock()

    def send(self, record: Record) -> None:
        """Pass on one record."""
        if record.kind == "warning":
            return  # this process has logged it already
        with self.lock:
            self.on_record(Record.decode(record.encode()))


def run(
    fn: Callable[..., Any] | str,
    *args: Any,
    on_record: Callable[[Record], None],
    threads: int = 0,
    spec: RankSpec = ALONE,
    backend: str = "auto",
    timeout_s: float = 1800.0,
    wait_timeout_s: float | None = None,
    notice: Callable[[], str] = str,
    attempt: int = 0,
    retry_s: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Run a function as one rank of a process group.

    Args:
        fn: the function, or "module:name".
        args: passed to it; must be the same on all ranks.
        on_record: called with each record of this rank.
        threads: CPU threads; 0 for this rank's share of the host; a single rank leaves the number as it is.
        spec: this rank's place; if there are several ranks, a launcher has set the environment.
        backend: gloo, nccl or auto.
        timeout_s: of collectives.
        wait_timeout_s: how long other ranks may take to come; None for as long as collectives.
        notice: returns the text that is printed when the user wants to end; "" for none.
        attempt: number of this start, in its records.
        retry_s: how long to wait for room if the disk for temporary files is full.
        kwargs: passed to the function; all ranks get rank 0's `files`.

    Returns:
        A list with this rank's return value.

    Raises:
        RankFailed: there are several ranks, and this one or another has failed.
    """
    import cloudpickle

    from ddp_hydra.rank import process

    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder, variables_restored():
        if threads or spec is not ALONE:
            process.set_threads(threads, spec.local_world_size)
        results.connect(DirectSender(on_record, Path(folder)), spec.rank, attempt, retry_s)
        interrupts = FinishOnInterrupt(notice) if spec is ALONE else FinishLaunched(notice)
        fault_injection.install(spec.rank, 0, {})
        heartbeat.connect(None)
        try:
            with interrupts.caught():
                store = meet_nobody(timeout_s) if spec is ALONE else meet_launched(spec, timeout_s, wait_timeout_s)
                mine = fingerprints(args) if spec.world_size > 1 else {}
                kwargs, wanted = agree(store, spec, kwargs, mine)
                call = cloudpickle.dumps((fn, args, kwargs))
                with (
                    reporting_failure(store, spec),
                    process.process_group(store, spec.rank, spec.world_size, backend, timeout_s),
                ):
                    check_same(mine, wanted, spec)
                    return [process.perform(call)]
        except Exception:
            heartbeat.await_saved()
            raise
        finally:
            results.connect(None)
            heartbeat.connect(None)
            process.leave_process_group()


def meet_nobody(timeout_s: float) -> Store:
    """Return the store of a rank that is alone."""
    from ddp_hydra.rank import process, rendezvous

    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
    os.environ.update(names)
    listener = rendezvous.bind("127.0.0.1")
    port = listener.getsockname()[1]
    return process.meet(0, "127.0.0.1", port, timeout_s, listener.detach())


def meet_launched(spec: RankSpec, timeout_s: float, wait_timeout_s: float | None = None) -> Store:
    """Connect to the store that a launcher's variables point to, served by itself or by rank 0.

    Raises:
        ClusterError: rank 0 or another rank does not come.
    """
    from datetime import timedelta

    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    from ddp_hydra.rank import environment

    os.environ.update(environment.own_gpu_first(os.environ, spec.local_rank))
    wait_s = timeout_s if wait_timeout_s is None else wait_timeout_s
    try:
        place = rendezvous("env://", spec.rank, spec.world_size, timeout=timedelta(seconds=wait_s))
        store: Store = next(place)[0]
    except DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ClusterError(
            f"rank {spec.rank} of {spec.world_size} did not meet the others at {where} in {wait_s:g} s: start all of "
            "them, with the same MASTER_ADDR and MASTER_PORT, or wait longer with cluster.wait_timeout_s="
            f"{round(3 * wait_s) or 60}. {str(error).partition(chr(10))[0]}"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def agree(
    store: Store, spec: RankSpec, kwargs: dict[str, Any], mine: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Give all ranks rank 0's files, and the fingerprints of its arguments.

    Anybody who reaches the store can write to it. So only plain data is read from it, and no code.

    Returns:
        The arguments of this rank, and the fingerprints of rank 0.

    Raises:
        DdpHydraError: the data in the store does not come from a rank 0.
    """
    if spec.rank == 0:
        if spec.world_size > 1:
            store.set(CHOICES, json.dumps({"files": kwargs.get("files", {}), "arguments": mine}))
        return kwargs, mine
    while not store.check([CHOICES]):  # a wait in Python, so that signals of the launcher are handled
        time.sleep(0.02)
    try:
        choices = json.loads(store.get(CHOICES))
        files, theirs = (
            {str(name): str(value) for name, value in choices[key].items()} for key in ("files", "arguments")
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DdpHydraError(f"rank {spec.rank} can't read the files and arguments of rank 0: {error!r:.200}") from None
    return {**kwargs, "files": files}, theirs


def fingerprints(value: Any, name: str = "") -> dict[str, str]:
    """Return a hash of each value of nested lists and dicts, by its dotted name."""
    if isinstance(value, (Mapping, list, tuple)) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        return {key: its for part, inner in items for key, its in fingerprints(inner, f"{name}.{part}").items()}
    return {name: hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()[:16]}


def check_same(mine: dict[str, str], theirs: dict[str, str], spec: RankSpec) -> None:
    """Check that this rank has the same arguments as rank 0.

    Raises:
        ConfigError: names those that differ.
    """
    names = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
    if names:
        differing = ", ".join(sorted(name.lstrip(".0123456789") for name in names)[:MAX_NAMED])
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        raise ConfigError(
            f"rank {spec.rank} on {spec.host} has composed another config than rank 0: {differing}{more} differ. Type "
            "the same command on all hosts, with the same conf/, and give such keys a value that does not depend on "
            "the host or the time, e.g. data.root=<folder>"
        )


@contextmanager
def reporting_failure(store: Store, spec: RankSpec) -> Iterator[None]:
    """Report an error of the block to the other ranks, and name the rank that caused it.

    Raises:
        RankFailed: on rank 0, with the cause; on others a DdpHydraError of one line, for rank 0 reports the rest.
    """
    from ddp_hydra.rank import process

    try:
        yield
    except Exception as error:
        if spec.world_size == 1:
            raise
        end = {**process.describe(error), "time_s": time.time()}
        mine = Failure.from_end(end, spec.rank, spec.host, 0)
        assert mine is not None
        others: list[Failure] = []
        with contextlib.suppress(Exception):  # the store may be gone with its host
            store.set(f"ddp_hydra/failed/{spec.rank}", json.dumps({"end": end, "host": spec.host}))
            others = failures(store, spec, until=time.monotonic() + CAUSE_S * mine.is_symptom)
        if spec.rank != 0:
            raise DdpHydraError(f"rank {spec.rank}: {mine.message.partition(chr(10))[0]}") from error
        cause, symptoms = root_cause([mine, *others])
        raise RankFailed(explain(cause, symptoms), cause, symptoms) from error


def failures(store: Store, spec: RankSpec, until: float) -> list[Failure]:
    """Return the failures of other ranks; wait until `until` for one that is not just a symptom."""
    while True:
        found = []
        for other in range(spec.world_size):
            key = f"ddp_hydra/failed/{other}"
            if other != spec.rank and store.check([key]):
                report = json.loads(store.get(key))
                found.append(Failure.from_end(report["end"], other, report["host"], 0))
        known = [failure for failure in found if failure is not None]
        if time.monotonic() > until or any(not failure.is_symptom for failure in known):
            return known
        time.sleep(0.02)


class FinishOnInterrupt(Interrupts):
    """Lets the training loop of this process finish at its next step after Ctrl-C, if it runs."""

    def _on_signal(self, number: int, frame: Any) -> None:
        self.is_deferring = heartbeat.here().read().phase not in heartbeat.UNREADY
        super()._on_signal(number, frame)
        heartbeat.here().ask_to_finish(heartbeat.REASONS.index("interrupt"))


class FinishLaunched(FinishOnInterrupt):
    """Does the same in a process that a launcher has started."""

    def __init__(self, notice: Callable[[], str]) -> None:
        super().__init__(notice)
        self.since = float("-inf")

    @contextmanager
    def caught(self, graceful: bool = True) -> Iterator[None]:
        """Catch the signals inside the block; if it fails, ignore SIGTERM, so that this process ends by itself."""
        try:
            with super().caught(graceful):
                yield
        except BaseException:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the launcher sends to the ranks that are left
            raise

    def _on_signal(self, number: int, frame: Any) -> None:
        if time.monotonic() - self.since > BURST_S:
            self.since = time.monotonic()
            super()._on_signal(number, frame)


def fetch(file: Mapping[str, Any], target: Path) -> None:
    """Move the file of a record to `target`."""
    shutil.move(file["source"], target)


def ignore(record: Record) -> None:
    """Drop a record and its file."""
    if record.kind == "file" and "source" in record.data:
        Path(record.data["source"]).unlink(missing_ok=True)


@contextmanager
def variables_restored() -> Iterator[None]:
    """Restore the environment variables after the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
