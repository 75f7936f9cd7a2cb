"""The gang of one: a job in this very process, so that breakpoints, pdb and profilers work."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_hydra import faults, pulse, results
from ddp_hydra.interrupts import Interrupts
from ddp_hydra.results import Record


class DirectSender:
    """Hands records straight to their reader.

    Args:
        on_record: called with each record, one at a time.
        spool: folder for files on their way.
    """

    def __init__(self, on_record: Callable[[Record], None], spool: Path) -> None:
        self.on_record = on_record
        self.spool = spool
        self.lock = threading.Lock()

    def send(self, record: Record) -> None:
        """Hand over one record."""
        with self.lock:
            self.on_record(Record.decode(record.encode()))


def run(
    fn: Callable[..., Any] | str,
    *args: Any,
    on_record: Callable[[Record], None],
    threads: int = 0,
    **kwargs: Any,
) -> list[Any]:
    """Run a function as the only rank of a process group.

    Args:
        fn: the function, or "module:name".
        args: passed to it.
        on_record: called with each record.
        threads: CPU threads; 0 leaves them as they are.
        kwargs: passed to it.

    Returns:
        A list of its one value.
    """
    import cloudpickle

    from ddp_hydra import rank
    from ddp_hydra.rank_host import rendezvous

    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder, variables_restored():
        names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
        os.environ.update(names)
        if threads:
            rank.set_threads(threads, local_world_size=1)
        listener = rendezvous.bind("127.0.0.1")
        port = listener.getsockname()[1]
        results.connect(DirectSender(on_record, Path(folder)))
        interrupts = FinishHere()
        faults.arm(0, 0, {})
        pulse.connect(None)
        try:
            with (
                interrupts.caught(),
                rank.process_group(0, 1, "127.0.0.1", port, backend="auto", listener_fd=listener.detach()),
            ):
                return [rank.perform(cloudpickle.dumps((fn, args, kwargs)))]
        finally:
            results.connect(None)
            pulse.connect(None)
            rank.leave_process_group()


class FinishHere(Interrupts):
    """Ctrl-C has the loop of this process finish at its next step, once there is one."""

    def _on_signal(self, *signals: Any) -> None:
        self.patient = pulse.here().read().phase not in pulse.UNREADY
        super()._on_signal(*signals)
        pulse.here().ask_to_finish(pulse.REASONS.index("interrupt"))


def fetch(file: Mapping[str, Any], target: Path) -> None:
    """Move a spooled file to `target`."""
    shutil.move(file["source"], target)


@contextmanager
def variables_restored() -> Iterator[None]:
    """Put the environment back as it was."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
