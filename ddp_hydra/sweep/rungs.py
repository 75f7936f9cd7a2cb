"""Decides which paused jobs of a sweep go on: asha and hyperband. Does no I/O."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddp_hydra.config.schema import AtLeast1, AtLeast2
from ddp_hydra.sweep.rows import score
from ddp_hydra.sweep.stop_rules import StopPolicy, Trial, Verdict, describe_standing


@dataclass
class Rung:
    """The jobs of one rung.

    Args:
        goal: the report at which its jobs pause.
        entrants: numbers of the jobs, in the order in which they entered.
        ranked: (-score, number) of the entrants whose results are in, the best first; always the first entrants.
        promoted: the jobs that have entered the next rung.
    """

    goal: int
    entrants: list[int] = field(default_factory=list)
    ranked: list[tuple[float, int]] = field(default_factory=list)
    promoted: set[int] = field(default_factory=set)


class Rungs(StopPolicy):
    """Lets the best go on: asynchronous successive halving (Li et al. 2020, arXiv:1810.05934), made repeatable.

    Each job runs to the report of its rung and pauses. The jobs of a rung are ranked in the order in which they entered
    it, however they finish: a result waits until those before it are there. After each result, those among the best
    1/reduction that have not gone on yet enter the next rung. So the order of entrants of each rung depends on values
    only, by induction from the first rung, which jobs enter by number.

    Args:
        maximize: whether higher values are better.
        first: the report at which jobs pause first.
        reduction: one in `reduction` results of a rung goes on; the next rung lies `reduction` times as high.
        brackets: 1 for asha; more for hyperband: a bracket's first rung is `reduction` times as high as in the
            bracket before.
    """

    pauses = True

    def __init__(self, maximize: bool, first: AtLeast1 = 1, reduction: AtLeast2 = 3, brackets: AtLeast1 = 1) -> None:
        super().__init__()
        self.maximize, self.first, self.reduction = maximize, first, reduction
        self.pattern = bracket_pattern(brackets, reduction)
        self.rungs: list[list[Rung]] = [[] for _ in range(brackets)]

    def add(self, number: int, values: Sequence[float] = (), end: str = "") -> None:
        super().add(number, values, end)
        self._rung(number, 0).entrants.append(number)

    def goal(self, number: int) -> int:
        return self._rung(number, self.trials[number].rung).goal

    def must_run(self, number: int) -> bool:
        return super().must_run(number) and len(self.trials[number].values) < self.goal(number)

    def decide(self) -> list[Verdict]:
        """Rank the results that are in; return the jobs that have entered another rung, in this order."""
        return [
            verdict
            for rungs in self.rungs
            for level, rung in enumerate(rungs)  # grows meanwhile: the jobs that are promoted are ranked further on
            for verdict in self._rank(level, rung)
        ]

    def finish(self) -> list[Verdict]:
        """Let the best job of the highest rung go on, until one has come to its end; then stop the paused ones.

        So a search of few jobs has a trained model, too.
        """
        candidates = [
            (-rung.goal, negative, number, level, rung)
            for rungs in self.rungs
            for level, rung in enumerate(rungs)
            for negative, number in rung.ranked
            if self._goes_on(negative, number, rung)
        ]
        trials = self.trials.values()
        if candidates and not any(one.end == "done" and len(one.values) <= self.goal(one.number) for one in trials):
            _, _, number, level, rung = min(candidates, key=lambda candidate: candidate[:3])
            return [self._promote(number, level, rung, "no job has come to its end"), *self.decide()]
        paused = [trial for trial in trials if not trial.end]
        for trial in paused:
            trial.end = "stopped"
        return [Verdict(one.number, len(one.values), self._describe(one.number, one.rung)) for one in paused]

    def _rung(self, number: int, level: int) -> Rung:
        bracket = self.pattern[number % len(self.pattern)]
        rungs = self.rungs[bracket]
        while len(rungs) <= level:
            rungs.append(Rung(self.first * self.reduction ** (bracket + len(rungs))))
        return rungs[level]

    def _rank(self, level: int, rung: Rung) -> Iterator[Verdict]:
        while len(rung.ranked) < len(rung.entrants):
            number = rung.entrants[len(rung.ranked)]
            found = self._score(self.trials[number], rung.goal)
            if found is None:
                return
            bisect.insort(rung.ranked, (-found, number))
            for negative, good in rung.ranked[: len(rung.ranked) // self.reduction]:
                if self._goes_on(negative, good, rung):
                    yield self._promote(good, level, rung)

    def _promote(self, number: int, level: int, rung: Rung, reason: str = "") -> Verdict:
        standing, above = self._describe(number, level, reason), self._rung(number, level + 1)
        rung.promoted.add(number)
        self.trials[number].rung = level + 1
        above.entrants.append(number)
        return Verdict(number, above.goal, standing, goes_on=True)

    def _score(self, trial: Trial, goal: int) -> float | None:
        if len(trial.values) >= goal:
            return score(trial.values[goal - 1], self.maximize)
        if trial.end == "done" and trial.values:
            return score(trial.values[-1], self.maximize)
        return -math.inf if trial.end else None

    def _goes_on(self, negative_score: float, number: int, rung: Rung) -> bool:
        """Return whether a job that was not chosen yet can run on, or did so in an earlier run of the sweep."""
        trial = self.trials[number]
        if number in rung.promoted or negative_score == math.inf:
            return False
        if trial.end == "stopped":
            return len(trial.values) >= rung.goal * self.reduction
        return trial.end != "done" or len(trial.values) > rung.goal

    def _describe(self, number: int, level: int, reason: str = "") -> str:
        ranks = [other for _, other in self._rung(number, level).ranked]
        place = ranks.index(number) + 1 if number in ranks else len(ranks) + 1
        quota = len(ranks) // self.reduction
        return (
            f"rung {level}: {reason}"
            if reason and place > quota
            else describe_standing(level, place, len(ranks), quota)
        )


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
