"""Decides after which report a job of a sweep is stopped, by rules, or which paused ones go on, by rungs. Does no I/O.

A decision depends only on the numbers of the jobs and the values they report: not on the time, the number of workers,
restarts or faults.
"""

from __future__ import annotations

import bisect
import copy
import logging
import math
import statistics
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ddp_hydra.config.limits import AtLeast1, AtLeast2, Number
from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.rows import score


@dataclass
class Trial:
    """A job as a policy knows it.

    Args:
        values: of the objective, as it has reported them.
        end: "" while more may come, done, failed or stopped.
        is_complete: the last value is the result of the whole run, so nothing is left to stop.
        is_known: all is decided about it, in an earlier run of the sweep; a rule only gets to see it again.
        decided: how many of its reports are decided upon.
        rung: the highest rung that it has entered.
    """

    number: int
    values: Sequence[float] = ()
    end: str = ""
    is_complete: bool = False
    is_known: bool = False
    decided: int = 0
    rung: int = 0


@dataclass(frozen=True)
class Verdict:
    """A decision about a job: it is stopped at a report, or goes on to a later one."""

    number: int
    report: int
    reason: str
    goes_on: bool = False


class StopPolicy:
    """Decides about the jobs of a sweep whose values can be compared: those with the same data."""

    pauses = False
    """Whether jobs pause at their goals; otherwise they run until they are interrupted."""

    def __init__(self) -> None:
        self.trials: dict[int, Trial] = {}

    def add(self, number: int, values: Sequence[float] = (), end: str = "") -> None:
        """Add a job, with what it has reported in an earlier run of the sweep, and its end there. Called by number."""
        self.trials[number] = Trial(number, values, end, is_complete=end == "done", is_known=bool(end))

    def update(self, number: int, values: Sequence[float], end: str = "", is_complete: bool = False) -> None:
        trial = self.trials[number]
        trial.values, trial.end, trial.is_complete = values, end, is_complete

    def goal(self, number: int) -> int | None:
        """Return the report at which a job pauses next; None if it does not pause."""
        return None

    def must_run(self, number: int) -> bool:
        return not self.trials[number].end

    def is_settled(self, number: int) -> bool:
        return True

    def decide(self) -> list[Verdict]:
        raise NotImplementedError

    def finish(self) -> list[Verdict]:
        """Decide about the jobs that are paused, when nothing is left to run."""
        return []


class Rule(Protocol):
    """Judges a job by its reports. In a rule, `after` is the first report that it judges."""

    def judge(self, own: Sequence[float], earlier: Sequence[Trial]) -> str:
        """Return why a job is stopped at its last report, in a few words; "" if it is not.

        It is called for each report of each job that has not been stopped: reports in order, and those with the same
        number in the order of the jobs.

        Args:
            own: its values of the objective, NaN included.
            earlier: the jobs with lower numbers, in order, as they were at this report.
        """


class ReportPolicy(StopPolicy):
    """Applies a rule to the reports of all jobs, in an order that does not depend on when they arrive.

    The decision about a report of a job uses the job's own reports so far, and the reports of jobs with lower numbers
    up to the same one, as far as these were not stopped before. So it waits until all those jobs have come as far, or
    have ended; the job trains on meanwhile. If it is then stopped, what it has done since counts for nothing.
    """

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule

    def update(self, number: int, values: Sequence[float], end: str = "", is_complete: bool = False) -> None:
        if self.trials[number].end != "stopped":
            super().update(number, values, end, is_complete)

    def is_settled(self, number: int) -> bool:
        return math.isinf(_comparable_up_to(self.trials[number]))

    def decide(self) -> list[Verdict]:
        verdicts: list[Verdict] = []
        limit = math.inf
        earlier: list[Trial] = []
        for trial in self.trials.values():
            while trial.decided < min(len(trial.values), limit):
                trial.decided = report = trial.decided + 1
                if trial.is_complete and report == len(trial.values):
                    break
                reason = self.rule.judge(trial.values[:report], [_at_report(other, report) for other in earlier])
                if reason and not trial.is_known:
                    trial.values, trial.end = trial.values[:report], "stopped"
                    verdicts.append(Verdict(trial.number, report, reason))
            limit = min(limit, _comparable_up_to(trial))
            earlier.append(trial)
        return verdicts


def _comparable_up_to(trial: Trial) -> float:
    return math.inf if trial.end and trial.decided == len(trial.values) else trial.decided


def _at_report(trial: Trial, report: int) -> Trial:
    """Return a job as it was when it made a report: one that had not ended, or ended well, has no end."""
    is_over = (trial.end == "stopped" and len(trial.values) <= report) or len(trial.values) < report
    return Trial(trial.number, trial.values[:report], trial.end if is_over and trial.end != "done" else "")


class Median:
    """Stops a job whose best value so far is worse than the median of the earlier jobs' averages up to the same report.

    This is the median stopping rule of Golovin et al. 2017, "Google Vizier", section 3.2.2. `trials` earlier jobs must
    have come as far.
    """

    def __init__(self, maximize: bool, after: AtLeast1 = 1, trials: AtLeast1 = 3) -> None:
        self.maximize, self.after, self.trials = maximize, after, trials

    def judge(self, own: Sequence[float], earlier: Sequence[Trial]) -> str:
        count = len(own)
        averages = [
            statistics.fmean(score(value, self.maximize) for value in other.values)
            for other in earlier
            if len(other.values) == count
        ]
        if count < self.after or len(averages) < self.trials:
            return ""
        best, median = max(score(value, self.maximize) for value in own), statistics.median(averages)
        if best >= median:
            return ""
        sign = 1 if self.maximize else -1
        return f"its best value {sign * best:.4g} is worse than the median {sign * median:.4g} of {len(averages)} jobs"


class Patient:
    """Stops a job after `patience` reports without an improvement of more than `min_delta`."""

    def __init__(self, maximize: bool, patience: AtLeast1 = 3, min_delta: Number = 0.0) -> None:
        self.maximize, self.patience, self.min_delta = maximize, patience, min_delta

    def judge(self, own: Sequence[float], earlier: Sequence[Trial]) -> str:
        best, since = -math.inf, 0
        for value in own:
            found = score(value, self.maximize)
            since = 0 if found > best + self.min_delta else since + 1
            best = max(best, found) if since == 0 else best
        return f"no progress for {since} reports" if since >= self.patience else ""


class Threshold:
    """Stops a job whose objective is NaN, or whose best value is not better than a bound after some reports."""

    def __init__(self, maximize: bool, bound: Number, after: AtLeast1 = 1) -> None:
        self.maximize, self.bound, self.after = maximize, bound, after

    def judge(self, own: Sequence[float], earlier: Sequence[Trial]) -> str:
        if math.isnan(own[-1]):
            return "its objective is NaN"
        best = max(score(value, self.maximize) for value in own)
        if len(own) < self.after or best > score(self.bound, self.maximize):
            return ""
        return f"its best value {best if self.maximize else -best:.4g} is not better than {self.bound:g}"


class Halving:
    """Stops a job that is not among the best when it comes to a rung: asha for jobs that can't pause; see `rungs`."""

    def __init__(self, maximize: bool, first: AtLeast1 = 1, reduction: AtLeast2 = 3) -> None:
        self.maximize, self.first, self.reduction = maximize, first, reduction

    def judge(self, own: Sequence[float], earlier: Sequence[Trial]) -> str:
        goal, rung = self.first, 0
        while goal < len(own):
            goal, rung = goal * self.reduction, rung + 1
        if goal != len(own):
            return ""
        mine = score(own[-1], self.maximize)
        others = [score(other.values[-1], self.maximize) for other in earlier if len(other.values) == goal]
        place, quota = 1 + sum(other >= mine for other in others), max(1, (len(others) + 1) // self.reduction)
        return "" if place <= quota else describe_standing(rung, place, len(others) + 1, quota)


def describe_standing(rung: int, place: int, ranked: int, quota: int) -> str:
    return f"rung {rung}: place {place} of {ranked}, and {f'the best {quota} go' if quota else 'none goes'} on"


class OptunaRule:
    """Asks a pruner of Optuna about each report: `hydra.launcher.stop={_target_: optuna.pruners.MedianPruner}`.

    A pruner looks at a study, and a study changes with every job that ends. So each report has a study of its own, in
    memory, in which the jobs before have come exactly as far as this report, or to their end; and a copy of the pruner,
    which may keep what it has seen. So a decision does not depend on which of the jobs is still at work.

    Raises:
        ConfigError: it is not a pruner of Optuna, or Optuna is missing.
    """

    def __init__(self, maximize: bool, pruner: Any) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError("pruners need Optuna: pip install 'ddp-hydra[optuna]'") from None
        if not isinstance(pruner, optuna.pruners.BasePruner):
            raise ConfigError(f"hydra.launcher.stop._target_ makes a {type(pruner).__name__}, not a pruner of Optuna")
        # Optuna 2 chooses a bracket of Hyperband by Python's hash, which differs between processes; 3 does it so:
        module = sys.modules[optuna.pruners.HyperbandPruner.__module__]
        vars(module).setdefault("hash", lambda name: zlib.crc32(name.encode()))
        self.optuna, self.pruner = optuna, pruner
        self.direction = "maximize" if maximize else "minimize"
        self.studies: list[Any] = []
        # What the pruner notes at a job, as successive halving does with its rungs: after each report.
        self.notes: dict[int, list[dict[str, Any]]] = {}

    def judge(self, own: Sequence[float], earlier: Sequence[Trial]) -> str:
        report, place = len(own), len(earlier)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna 2 calls experimental what is usual in 3 and 4
            study = self._study(report)
            for number in range(len(study.get_trials(deepcopy=False)), place):  # they have no such report
                self._add(study, number, earlier[number].values, earlier[number].end)
            self._add(study, place, own)
            is_pruned = bool(study.pruner.prune(study, study.get_trials()[place]))
            self.notes.setdefault(place, []).append(study.get_trials()[place].system_attrs)
            if is_pruned:
                study.tell(place, state=self.optuna.trial.TrialState.PRUNED)
            else:
                study.tell(place, _last_number(own))
        return f"{type(self.pruner).__name__} has pruned it" if is_pruned else ""

    def _study(self, report: int) -> Any:
        level = self.optuna.logging.get_verbosity()
        self.optuna.logging.set_verbosity(logging.WARNING)  # it would tell of each study
        while len(self.studies) < report:
            pruner = copy.deepcopy(self.pruner)
            study = self.optuna.create_study(study_name="sweep", direction=self.direction, pruner=pruner)
            self.studies.append(study)
        self.optuna.logging.set_verbosity(level)
        return self.studies[report - 1]

    def _add(self, study: Any, place: int, values: Sequence[float], end: str | None = None) -> None:
        states = self.optuna.trial.TrialState
        ended = {None: states.RUNNING, "": states.COMPLETE, "stopped": states.PRUNED, "failed": states.FAIL}[end]
        notes = self.notes.get(place, [])[: len(values)]
        if not values and ended == states.COMPLETE:
            ended = states.FAIL  # it has ended without a value
        study.add_trial(
            self.optuna.trial.create_trial(
                state=ended,
                value=_last_number(values) if ended in (states.COMPLETE, states.PRUNED) and values else None,
                intermediate_values=dict(enumerate(values, 1)),
                system_attrs=notes[-1] if notes else {},
            )
        )


def _last_number(values: Sequence[float]) -> float:
    """A trial of Optuna can't end with NaN."""
    return next((value for value in reversed(values) if not math.isnan(value)), 0.0)


@dataclass
class Rung:
    """The jobs of one rung, by their numbers.

    Args:
        goal: the report at which they pause.
        entrants: in the order in which they entered.
        ranked: (-score, number) of the entrants whose results are in, the best first; always the first entrants.
        promoted: those that have entered the next rung.
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
        if reason and place > quota:
            return f"rung {level}: {reason}"
        return describe_standing(level, place, len(ranks), quota)


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
