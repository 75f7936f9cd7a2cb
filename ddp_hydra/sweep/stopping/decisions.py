"""Decides after which report a job is stopped.

The decision about a report of a job uses the job's own reports so far, and those of jobs with lower numbers up to the
same report, as far as these were not stopped before. So it waits until all those jobs have come as far, or have ended;
the job trains on meanwhile. If it is then stopped, what it has done since counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Seen:
    """Describes a job with a lower number, as a decision about report n sees it.

    Args:
        values: its first reports, n at most.
        end: "" if it has not ended before or at report n, or ended well; "stopped" or "failed".
    """

    values: Sequence[float]
    end: str = ""


class Rule(Protocol):
    """Judges a job by its reports."""

    def judge(self, own: Sequence[float], earlier: Sequence[Seen]) -> str:
        """Return why a job is stopped at its last report, in a few words; "" if it is not.

        It is called for each report of each job that has not been stopped: reports in order, and those with the same
        number in the order of the jobs.

        Args:
            own: its values of the objective, NaN included.
            earlier: the jobs with lower numbers, in order.
        """


@dataclass(frozen=True)
class Stop:
    """Names a job that is stopped.

    Args:
        number: of the job.
        report: number of its last report that counts, from 1.
        reason: why, in a few words.
    """

    number: int
    report: int
    reason: str


@dataclass
class Trial:
    """Holds what is known of a job.

    Args:
        number: of the job.
        values: of the objective, as it has reported them.
        end: "" while more may come, done, failed or stopped.
        is_complete: the last value is that of the whole run, so nothing is left to stop.
        decided: how many of its reports are decided upon.
        is_known: all is decided about it, in an earlier run of the sweep; the rule only gets to see it again.
    """

    number: int
    values: Sequence[float] = ()
    end: str = ""
    is_complete: bool = False
    decided: int = 0
    is_known: bool = False

    @property
    def reached(self) -> float:
        """Return the report up to which others may be compared with it."""
        return math.inf if self.end and self.decided == len(self.values) else self.decided

    def seen_at(self, report: int) -> Seen:
        """Return it as a decision about a report sees it."""
        is_over = (self.end == "stopped" and len(self.values) <= report) or len(self.values) < report
        return Seen(self.values[:report], self.end if is_over and self.end != "done" else "")


class Decisions:
    """Applies a rule to the reports of all jobs, in an order that does not depend on when they arrive.

    Args:
        rule: judges a job.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.trials: dict[int, Trial] = {}

    def add(self, number: int, values: Sequence[float] = (), end: str = "") -> None:
        """Add a job. Jobs are added by number.

        Args:
            number: of the job.
            values: that it has reported in an earlier run of the sweep.
            end: how it has ended there: then all is decided about it.
        """
        self.trials[number] = Trial(number, values, end, is_complete=end == "done", is_known=bool(end))

    def update(self, number: int, values: Sequence[float], end: str = "", is_complete: bool = False) -> None:
        """Take over what a job has reported, and how it has ended, if it has; see `Trial`."""
        trial = self.trials[number]
        if trial.end != "stopped":
            trial.values, trial.end, trial.is_complete = values, end, is_complete

    def is_settled(self, number: int) -> bool:
        """Return whether nothing is left to decide about a job that has ended."""
        return math.isinf(self.trials[number].reached)

    def decide(self) -> Iterator[Stop]:
        """Decide what can be decided, and yield the jobs that are stopped."""
        reached = math.inf
        earlier: list[Trial] = []
        for trial in self.trials.values():
            while trial.decided < min(len(trial.values), reached):
                report = trial.decided + 1
                trial.decided = report
                if trial.is_complete and report == len(trial.values):
                    break
                reason = self.rule.judge(trial.values[:report], [other.seen_at(report) for other in earlier])
                if reason and not trial.is_known:
                    trial.values, trial.end = trial.values[:report], "stopped"
                    yield Stop(trial.number, report, reason)
            reached = min(reached, trial.reached)
            earlier.append(trial)
