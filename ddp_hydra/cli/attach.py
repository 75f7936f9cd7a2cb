"""`python -m ddp_hydra attach run=s3://bucket/runs/<date>/<time>`: show a run that goes on without its command.

It needs nothing but the store. Exit codes are those of the run: 0 done, 1 failed, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from ddp_hydra.cli.key_value import parse
from ddp_hydra.console.text import plain
from ddp_hydra.errors import ConfigError, Interrupted, RecordError, RunFailed
from ddp_hydra.job.remote import status as statuses
from ddp_hydra.results import Record
from ddp_hydra.storage import results_root
from ddp_hydra.writers.handler import ResultsHandler

USAGE = """python -m ddp_hydra attach run=<URL or run directory> [stop=true] [lost_timeout_s=20]"""
POLL_S = 1.0
METRICS = "metrics.jsonl"
AGAIN = 4
TAIL_BYTES = 256 * 1024
"""So much of the metrics before is read for where the run stands."""

log = logging.getLogger(__name__)


@dataclass
class Options:
    """Of the command line.

    Args:
        run: URL of the results, or a run directory that points to them.
        stop: have the run save a checkpoint and end.
        lost_timeout_s: a driver that has said nothing for so long is gone.
    """

    run: str = MISSING
    stop: bool = False
    lost_timeout_s: float = statuses.LOST_S


def main(words: Sequence[str]) -> None:
    """Entry of `python -m ddp_hydra attach`.

    Raises:
        Interrupted: the run was; or Ctrl-C, which leaves the run alone.
        RunFailed: the run has failed, or its driver is gone.
        ConfigError: there is no run, or its store cannot be read.
    """
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    options, others = parse(Options, words, USAGE)
    if others:
        raise ConfigError(f"{others[0]!r}: the keys are run, stop, lost_timeout_s; usage:\n{USAGE}")
    there = results_root.folder(results_root.find(options.run))
    attached = Attached(there, options.lost_timeout_s)
    try:
        attached.begin()
        if options.stop:
            attached.stop()
        attached.follow()
    except ConnectionError as error:
        raise ConfigError(f"{error}; the run does not need this command: try again later") from None
    except KeyboardInterrupt as error:
        if isinstance(error, Interrupted):
            raise
        raise Interrupted(f"the run goes on; to end it: python -m ddp_hydra attach run={there.url} stop=true") from None


class Attached:
    """A run, seen through its store.

    Args:
        there: its folder.
        lost_timeout_s: a driver that has said nothing for so long is gone.
    """

    def __init__(self, there: results_root.Store, lost_timeout_s: float) -> None:
        from ddp_hydra.writers.progress import ProgressWriter

        self.there, self.lost_timeout_s = there, lost_timeout_s
        self.handler = ResultsHandler([ProgressWriter(restarts=True)])
        self.status: dict[str, Any] = {}
        self.heard = time.monotonic()
        self.position, self.attempt = -1, -1

    def begin(self) -> None:
        """See whether there is a run.

        Raises:
            ConfigError: there is none.
        """
        self.status = statuses.read(self.there)
        if not self.status:
            raise ConfigError(
                f"there is no run in {self.there.url}: it has no {statuses.NAME} (a run of results.handler=client is "
                "shown where it was typed)"
            )
        if self.status.get("state") == "starting":
            log.info("the run is starting, or waits for workers")

    def stop(self) -> None:
        """Ask the run to end."""
        if self.status.get("state") not in statuses.ENDED:
            self.there.put(statuses.STOP, b"stop\n")
            log.info("the run is asked to save a checkpoint and to end")

    def follow(self) -> None:
        """Show the run until it has ended.

        Raises:
            Interrupted: it was.
            RunFailed: it has failed, or its driver is gone.
        """
        with self.handler:
            while True:
                ended = self.there.size(statuses.SUMMARY) is not None
                self.look()
                self.show()
                if ended:
                    break
                if time.monotonic() - self.heard > self.silence_timeout_s():
                    self.explain_loss()
                    where = plain(f"process {self.status.get('pid')} on {self.status.get('host')}")
                    raise RunFailed(
                        f"for {self.silence_timeout_s():g} s nothing was heard of the run's driver, {where}: it was "
                        f"killed, or its host is gone. Go on from the last checkpoint with resume={self.there.url}"
                    )
                time.sleep(POLL_S)
        state, said = self.status.get("state"), plain(str(self.status.get("said", "")))
        if state == "interrupted":
            raise Interrupted(said)
        if state != "done":
            raise RunFailed(said)
        print(said)  # noqa: T201

    def explain_loss(self) -> None:
        """Raise what the driver has said last, where it knew that it would end.

        Raises:
            RunFailed: it did.
        """
        if self.status.get("state") == statuses.LOST:
            said = plain(str(self.status.get("said", "")))
            raise RunFailed(f"{said}\nno other driver has followed; resume={self.there.url} goes on")

    def silence_timeout_s(self) -> float:
        """How long the driver may be silent: the scheduler needs some time to notice, and to have another started."""
        return self.lost_timeout_s * (AGAIN if self.status.get("lives") else 1)

    def look(self) -> None:
        """Read the status; one that is news is a sign of life."""
        found = statuses.read(self.there)
        if found and found.get("time") != self.status.get("time"):
            self.heard = time.monotonic()
            self.status = found

    def show(self) -> None:
        """Show what is new of the metrics; at first, no more than where the run stands."""
        size = self.there.size(METRICS) or 0
        at_first = self.position < 0
        if at_first:
            self.position = max(0, size - TAIL_BYTES)
        self.position = 0 if size < self.position else self.position  # the run began again in the same place
        if size <= self.position or not isinstance(self.status.get("start"), dict):
            self.position = -1 if at_first else self.position
            return
        content = self.there.read(METRICS, self.position, size)
        whole = content.rpartition(b"\n")[0]
        self.position += len(whole) + 1 if whole else 0
        lines = [line for line in map(_line, whole.split(b"\n")) if line]
        if at_first and lines:
            last = {name: value for line in lines for name, value in line.items() if value is not None}
            self.start(step=last.get("step"))
            lines = [last]
        for line in lines:
            self.metrics(line)

    def start(self, step: Any = None) -> None:
        """Show the head of the run's newest attempt."""
        try:
            start = Record.decode(json.dumps(self.status["start"]))
            self.attempt = start.attempt
            self.handler.handle(Record("start", start.data, 0, step or start.step, start.time_s, start.attempt))
        except RecordError as error:
            log.warning("%s", plain(str(error)))

    def metrics(self, line: dict[str, Any]) -> None:
        """Show one line of the metrics."""
        own = ("time", "attempt", "step", "epoch", "samples", "rank")
        values = {name: value for name, value in line.items() if name not in own and isinstance(value, int | float)}
        data = {"metrics": values, **{name: line[name] for name in ("epoch", "samples") if line.get(name) is not None}}
        attempt = line.get("attempt") or 0
        if attempt != self.attempt and self.status["start"].get("attempt") == attempt:
            self.start()
        try:
            self.handler.handle(Record("metrics", data, line.get("rank") or 0, line.get("step"), 0.0, attempt))
        except RecordError as error:
            log.warning("%s", plain(str(error)))


def _line(text: bytes) -> dict[str, Any]:
    """A line of metrics.jsonl; {} for the half of one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
