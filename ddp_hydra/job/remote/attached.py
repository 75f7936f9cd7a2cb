"""Shows a remote run from its store alone."""

from __future__ import annotations

import logging
import time
from typing import Any

from msgspec import ValidationError, convert
from msgspec.structs import replace

from ddp_hydra.console.text import printable, typed
from ddp_hydra.errors import ConfigError, RecordError, RunFailed
from ddp_hydra.job.remote.status import ENDED, LOST, STOP, conclude, read
from ddp_hydra.record import Record
from ddp_hydra.run_state import Status
from ddp_hydra.storage import Store
from ddp_hydra.writers.handler import ResultsHandler
from ddp_hydra.writers.run_dir import SUMMARY, json_object
from ddp_hydra.writers.status import NAME

POLL_S = 1.0
METRICS = "metrics.jsonl"
TAIL_BYTES = 128 * 1024
"""How much of the metrics is read each time."""
RESTART_FACTOR = 4
"""A driver that is restarted when lost may be silent this many times as long."""

log = logging.getLogger(__name__)


class Attached:
    """Follows one run.

    Args:
        store: the run's folder.
        lost_timeout_s: a driver that has not updated its status for so long is considered lost, in seconds.
    """

    def __init__(self, store: Store, lost_timeout_s: float) -> None:
        from ddp_hydra.writers.progress import ProgressWriter

        self.store, self.lost_timeout_s = store, lost_timeout_s
        self.handler = ResultsHandler([ProgressWriter(restarts=True)])
        self.status = Status()
        self.updated = time.monotonic()
        self.size, self.attempt = 0, -1
        self.newest: tuple[float, ...] = (-1.0, 0.0)  # attempt and time of what was read

    def begin(self) -> None:
        found = read(self.store)
        if found is None:
            raise ConfigError(f"there is no run of results.handler=cluster in {self.store.url}: it has no {NAME}")
        self.status = found
        if found.state == "starting":
            log.info("the run is starting, or waits for workers")

    def stop(self) -> None:
        if self.status.state not in ENDED:
            self.store.put(STOP, b"stop\n")
            log.info("the run is asked to save a checkpoint and to end")

    def follow(self) -> None:
        with self.handler:
            while True:
                has_ended = self.store.size_or_none(SUMMARY) is not None
                self.read_status()
                self.show_metrics()
                if has_ended:
                    break
                self.check_driver()
                time.sleep(POLL_S)
        conclude(self.status.state, printable(self.status.message))

    def check_driver(self) -> None:
        """Raise if the driver is silent for too long; that is longer if the scheduler restarts it when it is lost."""
        timeout_s = self.lost_timeout_s * (RESTART_FACTOR if self.status.max_restarts else 1)
        if time.monotonic() - self.updated <= timeout_s:
            return
        again = typed("resume", self.store.url)
        if self.status.state == LOST:
            raise RunFailed(printable(f"{self.status.message}\nno other driver has followed; {again} goes on"))
        silent = f"process {self.status.pid} on {self.status.host}, has not updated its status for {timeout_s:g} s"
        raise RunFailed(printable(f"the run's driver, {silent}: go on with {again}"))

    def read_status(self) -> None:
        status = read(self.store)
        if status is not None and status.time != self.status.time:
            self.updated = time.monotonic()
            self.status = status

    def show_metrics(self) -> None:
        """Show the metrics of rank 0 that are new; the first time, the last validation and what came last.

        Where a run starts again, or another one begins in its folder, the file loses lines. So its tail is read each
        time, and a line is new by its attempt and time.
        """
        size = self.store.size_or_none(METRICS) or 0
        if size == self.size or self.status.start is None:
            return
        is_first, self.size = not self.size, size
        content: bytes = self.store.get_range(METRICS, max(0, size - TAIL_BYTES), size)
        lines = [line for line in map(json_object, content.split(b"\n")[:-1]) if line and not line.get("rank")]
        lines = [line for line in lines if any(new > old for new, old in zip(_when(line), self.newest, strict=True))]
        for line in lines:
            self.newest = tuple(map(max, self.newest, _when(line)))
        if is_first and lines:
            self.show_start(step=lines[-1].get("step"))
            validated = [line for line in lines[:-1] if any(name.startswith("val/") for name in line)]
            lines = [*validated[-1:], lines[-1]]
        for line in lines:
            self.show_line(line)

    def show_start(self, step: Any = None) -> None:
        if (start := self.status.start) is not None:
            self.attempt = start.attempt
            step = step if isinstance(step, int) else start.step
            self.handler.handle(replace(start, rank=0, step=step))

    def show_line(self, line: dict[str, Any]) -> None:
        own = ("time", "attempt", "step", "epoch", "samples", "rank")
        values = {name: value for name, value in line.items() if name not in own and isinstance(value, int | float)}
        data = {"kind": "metrics", "metrics": values, "epoch": line.get("epoch"), "samples": line.get("samples")}
        attempt = line.get("attempt") or 0
        if attempt != self.attempt and self.status.start is not None and self.status.start.attempt == attempt:
            self.show_start()
        content = {"data": data, "rank": line.get("rank") or 0, "step": line.get("step"), "attempt": attempt}
        try:
            self.handler.handle(convert(content, Record))
        except (ValidationError, RecordError) as error:
            log.warning("%s", printable(str(error)))


def _when(line: dict[str, Any]) -> tuple[float, ...]:
    return tuple(value if isinstance(value := line.get(name), int | float) else 0.0 for name in ("attempt", "time"))
