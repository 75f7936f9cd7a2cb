"""Runs the only rank of a job in this process, so that breakpoints and profilers work."""

from __future__ import annotations

import os
import pkgutil
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_hydra import heartbeat, results
from ddp_hydra.console.signals import Interrupts, held_back
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.processes import RANK_PID
from ddp_hydra.rank.spec import GangSettings
from ddp_hydra.record import File, Notice, Record

ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}

_SET = (*ONLY_RANK, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", RANK_PID)
"""Variables that a rank sets. The other ones belong to the program, whose other threads may set them meanwhile."""

_one_at_a_time = threading.RLock()
"""For threads: a process can be one rank."""


class DirectSender:
    """Passes records directly to their reader, one at a time."""

    def __init__(self, on_record: Callable[[Record], None], outbox: Path) -> None:
        self.on_record = on_record
        self.outbox = outbox
        self.lock = threading.Lock()

    def send(self, record: Record) -> None:
        if isinstance(record.data, Notice):
            return  # this process has logged it already
        with self.lock:
            self.on_record(Record.decode(record.encode()))


def run(
    fn: Callable[..., Any] | str,
    *args: Any,
    on_record: Callable[[Record], None],
    settings: GangSettings | None = None,
    notice: Callable[[], str] = str,
    attempt: int = 0,
    **kwargs: Any,
) -> list[Any]:
    """Run a function as the only rank of a process group.

    Args:
        fn: the function, or "module:name".
        settings: threads (0 leaves their number as it is), backend, timeout_s and retry_s.
        notice: returns the text that is printed when the user wants to end; "" for none.
        attempt: number of this start, in its records.
    """
    with held_back():
        from unittest import mock

        import cloudpickle

        from ddp_hydra.rank import environment, process
        from ddp_hydra.rank.world import joined, leave_process_group, meet

        if isinstance(fn, str):
            pkgutil.resolve_name(fn)
    settings = settings or GangSettings()
    restored = mock.patch.object(sys, "excepthook", sys.excepthook)
    with _one_at_a_time, tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder, restored, variables_restored():
        if settings.threads:
            process.set_threads(settings.threads)
        results.connect(DirectSender(on_record, Path(folder)), 0, attempt, settings.retry_s)
        fault_injection.install(0, attempt, {})
        heartbeat.connect(None)
        try:
            with FinishOnInterrupt(notice).caught():
                os.environ.update({RANK_PID: str(os.getpid()), **ONLY_RANK})
                listener = environment.bind("127.0.0.1")
                port = listener.getsockname()[1]
                store = meet(0, "127.0.0.1", port, settings.timeout_s, listener.detach())
                call = cloudpickle.dumps((fn, args, kwargs))
                with joined(store, 0, 1, 1, settings.backend, settings.timeout_s) as world:
                    return [process.perform(call, world)]
        except Exception:
            heartbeat.await_saved()
            raise
        finally:
            results.connect(None)
            heartbeat.connect(None)
            leave_process_group()


@contextmanager
def variables_restored() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _SET}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class FinishOnInterrupt(Interrupts):
    """Lets the training loop of this process finish at its next step after Ctrl-C, if it runs."""

    def _on_signal(self, number: int, frame: Any) -> None:
        self.is_deferring = heartbeat.here().read().phase not in heartbeat.UNREADY
        super()._on_signal(number, frame)
        heartbeat.here().ask_to_finish(heartbeat.REASONS.index("interrupt"))


def fetch(record: Record, target: Path) -> None:
    assert isinstance(record.data, File)
    assert record.data.source
    shutil.move(record.data.source, target)
