"""Runs a gang in a thread, and gives its results as futures; writes what it sends into a run directory."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_hydra.console.signals import Interrupts, own_handler
from ddp_hydra.console.text import expanded, message_of
from ddp_hydra.errors import ConfigError
from ddp_hydra.record import Record
from ddp_hydra.run_state import Status, Summary
from ddp_hydra.writers.files import Fetch
from ddp_hydra.writers.handler import ResultsHandler, default_writers
from ddp_hydra.writers.run_dir import locked, read_summary, summary_written

log = logging.getLogger(__name__)
CLOSE_S = 15.0
"""Seconds that the end of the program waits for what runs in the background."""
_at_exit: dict[object, tuple[Callable[[], object], Callable[[float], object]]] = {}
os.register_at_fork(after_in_child=_at_exit.clear)


def stop_at_exit(running: object, stop: Callable[[], object], wait: Callable[[float], object]) -> None:
    """Have the end of the program stop what runs in a thread, unless `forget` is called before.

    Args:
        stop: asks it to end.
        wait: waits for its end, but no longer than the seconds that it is given.
    """
    _register()
    _catch_signals()
    _at_exit[running] = stop, wait


def forget(running: object) -> None:
    """Undo `stop_at_exit` for what has ended."""
    _at_exit.pop(running, None)


@functools.cache
def _register() -> None:
    # Handlers of `atexit` come too late: Dask then has no pools of threads any more, and nothing could be saved.
    import concurrent.futures.thread  # noqa: F401  its own handler, which ends the pools, is to come after this one

    try:
        threading._register_atexit(_stop_all)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise ConfigError("the program is ending: start it while the main thread runs") from error


def _catch_signals() -> None:
    """Stop it also where a signal would end the program, as Jupyter ends a kernel, and batch systems a job."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, own_handler(_end_by))


def _end_by(number: int, frame: Any) -> None:
    _stop_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _stop_all() -> None:
    calls, until, interrupts = list(_at_exit.values()), time.monotonic() + CLOSE_S, Interrupts()
    with contextlib.suppress(KeyboardInterrupt), interrupts.caught(), interrupts.deferred():
        for stop, _ in calls:
            stop()
        for _, wait in calls:
            wait(max(0.0, until - time.monotonic()))


class RankFuture(Future):
    """The return value of one rank, as a future of `concurrent.futures`. `cancel` stops all ranks of the gang.

    Args:
        gang: that runs.
        rank: of the gang.
    """

    def __init__(self, gang: Running, rank: int) -> None:
        super().__init__()
        self.gang, self.rank = gang, rank

    def cancel(self) -> bool:
        """Stop the gang; return False if it has ended already."""
        return self.gang.cancel()

    def result(self, timeout: float | None = None) -> Any:
        """Return the rank's value as soon as all ranks have ended; raises as `Running.result`."""
        self.gang.wait(timeout)
        return super().result(0)


class Running:
    """A gang that runs while this program does something else; made by `dispatch.start`.

    Args:
        run: runs the gang; it has to raise KeyboardInterrupt soon after `stop` is set.
        stop: asks the gang to end.
        ranks: how many futures to make.
        interrupts: of the gang.
        graceful: whether the ranks may save a checkpoint before they end.
        run_dir: where its results are written.

    Attributes:
        futures: one for each rank. With fewer ranks than expected, the last ones are cancelled.
    """

    def __init__(
        self,
        run: Callable[[], list[Any]],
        stop: threading.Event,
        ranks: int,
        interrupts: Interrupts,
        graceful: bool,
        run_dir: Path | None,
    ) -> None:
        self._run, self._stop, self._interrupts, self._graceful = run, stop, interrupts, graceful
        self.run_dir = run_dir
        self.futures = [RankFuture(self, rank) for rank in range(ranks)]
        self._values: list[Any] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        # A daemon: the end of the program does not wait for it but stops the gang.
        self._thread = threading.Thread(target=self._work, name="ddp_hydra-gang", daemon=True)
        stop_at_exit(self, self.cancel, self._ended.wait)
        self._thread.start()

    def done(self) -> bool:
        """Return whether all ranks have ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for the ranks, and return their values in order of rank. Ctrl-C meanwhile stops the ranks.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            TimeoutError: they have not ended in time; they go on.
            CancelledError: `cancel` was called.
            Exception: as `dispatch.run`.
        """
        self.wait(timeout)
        if self._error is not None:
            raise self._error
        return self._values

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the ranks, and return the error that `result` would raise; None if there is none.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            TimeoutError: they have not ended in time; they go on.
        """
        self.wait(timeout)
        return self._error

    def cancel(self) -> bool:
        """Ask all ranks to end, as Ctrl-C does in `dispatch.run`; return False if they have ended already."""
        if self.done():
            return False
        self._stop.set()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the ranks have ended; on Ctrl-C, stop them and wait for their end.

        Raises:
            TimeoutError: they have not ended in `timeout` seconds.
        """
        graceful = self._graceful and not self._stop.is_set()
        deferred = self._interrupts.deferred() if graceful else contextlib.nullcontext()
        try:
            with self._interrupts.caught(graceful), deferred:
                ended = self._ended.wait(timeout)
        except KeyboardInterrupt:
            self.cancel()
            self._ended.wait()
            raise
        if not ended:
            if graceful and self._interrupts.wanted:  # which the next wait sets back
                self._stop.set()
            what_now = "are ending" if self._stop.is_set() else "go on"
            raise TimeoutError(f"the ranks have not ended after {timeout:g} s; they {what_now}")
        self._thread.join()
        if graceful and self._interrupts.wanted and not self._stop.is_set():
            raise KeyboardInterrupt

    def _work(self) -> None:
        """Run the gang, and note how it ended."""
        try:
            self._values = self._run()
        except BaseException as error:
            is_stopped = self._stop.is_set() or isinstance(error, KeyboardInterrupt)
            self._error = CancelledError("the ranks were stopped") if is_stopped else error
            if not is_stopped:
                what = "the ranks were not started" if isinstance(error, ConfigError) else "the ranks have failed"
                log.error("%s: %s", what, message_of(error).partition("\n")[0])
        for future in self.futures:
            if future.rank < len(self._values):
                future.set_result(self._values[future.rank])
            elif self._error is None or isinstance(self._error, CancelledError):
                Future.cancel(future)
                future.set_running_or_notify_cancel()
            else:
                future.set_exception(self._error)
        forget(self)
        self._ended.set()


ANOTHER = "give another folder, run_dir=<folder>"


def local_path(run_dir: str | Path) -> Path:
    """Return a run directory as a path.

    Raises:
        ConfigError: it is a URL.
    """
    if "://" in str(run_dir):
        raise ConfigError(f"run_dir={str(run_dir)!r} is a URL: give a folder of this machine, and copy it afterwards")
    return expanded(run_dir).absolute()


@contextmanager
def recorded(
    run_dir: Path,
    fetch: Fetch,
    retry_s: float,
    give_up: threading.Event,
    describe: Callable[[], dict[str, Any]],
    status: Status,
) -> Iterator[Callable[[Record], None]]:
    """Write records into a run directory, and at the end summary.json, also when the block fails.

    What an earlier call has measured there stays, and so do its attempts.

    Args:
        describe: returns what `Gang.summary` says of the attempts of this call.
        status: what status.json says; it is given what the earlier call has left.

    Raises:
        ConfigError: the folder holds a run that is done, or another process writes it.
    """
    with locked(run_dir, ANOTHER):
        if (before := read_summary(run_dir)) is not None and before.status == "done":
            raise ConfigError(f"{run_dir} holds a run that is done, and its results would be mixed: {ANOTHER}")
        summary, before = Summary(status="failed"), before or Summary(status="failed")
        kept = ("steps", "samples", "metrics", "attempts", "restarts")
        summary.update({name: getattr(before, name) for name in kept})
        status.attempts, status.metrics = before.attempts, dict(before.metrics)
        with summary_written(run_dir, summary):
            writers = default_writers(run_dir, fetch, retry_s=retry_s, give_up=give_up, progress=False, status=status)
            try:
                with ResultsHandler(writers, retry_s, give_up, summary) as handler:
                    yield handler.handle
            finally:
                told = describe()
                summary.world_size = told["world_size"]
                summary.count_attempts(before.attempts, told["attempts"], told["begun"])
            summary.status = "done"
