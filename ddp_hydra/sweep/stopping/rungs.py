"""Decides which jobs go on: asynchronous successive halving (Li et al. 2020, arXiv:1810.05934), made repeatable.

Each job runs to the report of its rung and pauses. The jobs of a rung are ranked in the order in which they entered it,
however they finish: a result waits until those before it are there. After each result, those among the best
1/reduction that have not gone on yet enter the next rung. So the order of entrants of each rung depends on values
only, by induction from the first rung, which jobs enter by number.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddp_hydra.sweep.rows import score


@dataclass
class Trial:
    """Holds what is known of a job.

    Args:
        number: of the job.
        bracket: the bracket that it belongs to.
        rung: the highest rung that it has entered.
        values: of the objective, as it has reported them.
        end: "" if it may go on, done, failed or stopped.
    """

    number: int
    bracket: int
    rung: int = 0
    values: Sequence[float] = ()
    end: str = ""


@dataclass
class Rung:
    """Holds the jobs of one rung.

    Args:
        goal: the report at which its jobs pause.
        entrants: numbers of the jobs, in the order in which they entered.
        ranked: (-score, number) of the entrants whose results are in, the best first; always the first entrants.
        promoted: those that have entered the next rung.
    """

    goal: int
    entrants: list[int] = field(default_factory=list)
    ranked: list[tuple[float, int]] = field(default_factory=list)
    promoted: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Standing:
    """Describes how good a job is in its rung.

    Args:
        number: of the job.
        rung: the rung, from 0.
        place: its place there, from 1.
        ranked: how many results are in.
        quota: how many of them are good enough.
    """

    number: int
    rung: int
    place: int
    ranked: int
    quota: int


class Rungs:
    """Ranks jobs at their rungs, and lets the best go on.

    Args:
        maximize: whether higher values are better.
        first: the report at which jobs pause first.
        reduction: of the results in a rung, one of so many goes on; rungs lie so many times as far apart.
        brackets: 1 for asha; more for hyperband: a bracket's first rung is `reduction` times as high as that of the
            bracket before.
    """

    def __init__(self, maximize: bool, first: int = 1, reduction: int = 3, brackets: int = 1) -> None:
        self.maximize, self.first, self.reduction = maximize, first, reduction
        self.pattern = bracket_pattern(brackets, reduction)
        self.rungs: list[list[Rung]] = [[] for _ in range(brackets)]
        self.trials: dict[int, Trial] = {}

    def add(self, number: int, values: Sequence[float] = (), end: str = "") -> None:
        """Let a job enter the first rung of its bracket. Jobs are added by number.

        Args:
            number: of the job.
            values: that it has reported in an earlier run of the sweep.
            end: how it has ended there, see `Trial`.
        """
        bracket = self.pattern[number % len(self.pattern)]
        self.trials[number] = Trial(number, bracket, values=values, end=end)
        self._rung(bracket, 0).entrants.append(number)

    def update(self, number: int, values: Sequence[float], end: str = "") -> None:
        """Take over what a job has reported, and how it has ended, if it has."""
        trial = self.trials[number]
        trial.values, trial.end = values, end

    def goal(self, number: int) -> int:
        """Return the report at which a job pauses next."""
        return self.goal_of(number, self.trials[number].rung)

    def goal_of(self, number: int, rung: int) -> int:
        """Return the report at which a job pauses in a rung."""
        return self._rung(self.trials[number].bracket, rung).goal

    def must_run(self, number: int) -> bool:
        """Return whether a job has to run to reach its goal."""
        trial = self.trials[number]
        return not trial.end and len(trial.values) < self.goal(number)

    def advance(self) -> list[Standing]:
        """Rank the results that are in; return the jobs that have entered another rung, in this order."""
        promoted: list[Standing] = []
        for rungs in self.rungs:
            for place, rung in enumerate(rungs):  # grows meanwhile; what is promoted is ranked further on
                promoted += self._rank(place, rung)
        return promoted

    def finish(self) -> Standing | None:
        """Let the best job of the highest rung go on if none has come to its end yet, and return it.

        It is called when nothing is left to run: so a search of few jobs has a trained model, too.
        """
        if any(trial.end == "done" and len(trial.values) <= self.goal(trial.number) for trial in self.trials.values()):
            return None
        candidates = [
            (-rung.goal, negative, number, place, rung)
            for rungs in self.rungs
            for place, rung in enumerate(rungs)
            for negative, number in rung.ranked
            if self._goes_on(negative, number, rung)
        ]
        if not candidates:
            return None
        _, _, number, place, rung = min(candidates, key=lambda candidate: candidate[:3])
        return self._promote(number, place, rung)

    def stop_rest(self) -> list[Standing]:
        """End the jobs that are paused: no more results come."""
        paused = [trial for trial in self.trials.values() if not trial.end]
        for trial in paused:
            trial.end = "stopped"
        return [self._standing(trial.number, trial.rung) for trial in paused]

    def _rung(self, bracket: int, number: int) -> Rung:
        rungs = self.rungs[bracket]
        while len(rungs) <= number:
            rungs.append(Rung(self.first * self.reduction ** (bracket + len(rungs))))
        return rungs[number]

    def _rank(self, place: int, rung: Rung) -> Iterator[Standing]:
        while len(rung.ranked) < len(rung.entrants):
            number = rung.entrants[len(rung.ranked)]
            found = self._score(self.trials[number], rung.goal)
            if found is None:
                return
            bisect.insort(rung.ranked, (-found, number))
            for negative, good in rung.ranked[: len(rung.ranked) // self.reduction]:
                if self._goes_on(negative, good, rung):
                    yield self._promote(good, place, rung)

    def _promote(self, number: int, place: int, rung: Rung) -> Standing:
        trial, standing = self.trials[number], self._standing(number, place)
        rung.promoted.add(number)
        trial.rung = place + 1
        self._rung(trial.bracket, place + 1).entrants.append(number)
        return standing

    def _score(self, trial: Trial, goal: int) -> float | None:
        """Return the score of a job's result in a rung; None while it is to come."""
        if len(trial.values) >= goal:
            return score(trial.values[goal - 1], self.maximize)
        if trial.end == "done" and trial.values:
            return score(trial.values[-1], self.maximize)
        return -math.inf if trial.end else None

    def _goes_on(self, negative_score: float, number: int, rung: Rung) -> bool:
        """Return whether a job can run on, or has run on in an earlier run of the sweep, and has not been chosen yet.

        Args:
            negative_score: of its result in a rung.
            number: of the job.
            rung: the rung.
        """
        trial = self.trials[number]
        if number in rung.promoted or negative_score == math.inf:
            return False
        if trial.end == "stopped":
            return len(trial.values) >= rung.goal * self.reduction
        return trial.end != "done" or len(trial.values) > rung.goal

    def _standing(self, number: int, place: int) -> Standing:
        rung = self.rungs[self.trials[number].bracket][place]
        ranks = [other for _, other in rung.ranked]
        own = ranks.index(number) + 1 if number in ranks else len(ranks) + 1
        return Standing(number, place, own, len(ranks), len(ranks) // self.reduction)


def bracket_pattern(brackets: int, reduction: int) -> list[int]:
    """Return the brackets of successive jobs, to be repeated: as many jobs in each as Hyperband has, well mixed.

    See Li et al. 2018, "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", algorithm 1.
    """
    sizes = [math.ceil(brackets / (bracket + 1) * reduction**bracket) for bracket in reversed(range(brackets))]
    due = [0] * brackets
    pattern = []
    for _ in range(sum(sizes)):
        due = [owed + size for owed, size in zip(due, sizes, strict=True)]
        chosen = due.index(max(due))
        due[chosen] -= sum(sizes)
        pattern.append(chosen)
    return pattern
