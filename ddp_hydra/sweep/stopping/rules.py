"""The rules that judge a job by its reports. See `decisions.Rule`; "after" is the first report that they judge."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ddp_hydra.sweep.rows import score
from ddp_hydra.sweep.stopping.decisions import Seen


class Median:
    """Stops a job whose best value so far is worse than the median of the earlier jobs' averages up to the same report.

    This is the median stopping rule of Golovin et al. 2017, "Google Vizier", section 3.2.2.

    Args:
        maximize: whether higher values are better.
        after: the first report that is judged.
        trials: how many earlier jobs must have come as far.
    """

    def __init__(self, maximize: bool, after: int = 1, trials: int = 3) -> None:
        self.maximize, self.after, self.trials = maximize, after, trials

    def judge(self, own: Sequence[float], earlier: Sequence[Seen]) -> str:
        """Return why a job is stopped, or ""."""
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
    """Stops a job that makes no progress.

    Args:
        maximize: whether higher values are better.
        patience: so many reports may pass without progress.
        min_delta: the smallest improvement that counts as progress.
    """

    def __init__(self, maximize: bool, patience: int = 3, min_delta: float = 0.0) -> None:
        self.maximize, self.patience, self.min_delta = maximize, patience, min_delta

    def judge(self, own: Sequence[float], earlier: Sequence[Seen]) -> str:
        """Return why a job is stopped, or ""."""
        best, since = -math.inf, 0
        for value in own:
            found = score(value, self.maximize)
            since = 0 if found > best + self.min_delta else since + 1
            best = max(best, found) if since == 0 else best
        return f"no progress for {since} reports" if since >= self.patience else ""


class Threshold:
    """Stops a job whose objective is NaN, or is not better than a bound after some reports.

    Args:
        maximize: whether higher values are better.
        bound: the best value so far must be better.
        after: from this report on.
    """

    def __init__(self, maximize: bool, bound: float, after: int = 1) -> None:
        self.maximize, self.bound, self.after = maximize, bound, after

    def judge(self, own: Sequence[float], earlier: Sequence[Seen]) -> str:
        """Return why a job is stopped, or ""."""
        if math.isnan(own[-1]):
            return "its objective is NaN"
        best = max(score(value, self.maximize) for value in own)
        if len(own) < self.after or best > score(self.bound, self.maximize):
            return ""
        return f"its best value {best if self.maximize else -best:.4g} is not better than {self.bound:g}"


class Halving:
    """Stops a job that is not among the best when it comes to a rung: asha for jobs that can't pause and go on.

    Args:
        maximize: whether higher values are better.
        first: the report of the first rung.
        reduction: one of so many goes on; rungs lie so many times as far apart.
    """

    def __init__(self, maximize: bool, first: int = 1, reduction: int = 3) -> None:
        self.maximize, self.first, self.reduction = maximize, first, reduction

    def judge(self, own: Sequence[float], earlier: Sequence[Seen]) -> str:
        """Return why a job is stopped, or ""."""
        goal, rung = self.first, 0
        while goal < len(own):
            goal, rung = goal * self.reduction, rung + 1
        if goal != len(own):
            return ""
        mine = score(own[-1], self.maximize)
        others = [score(other.values[-1], self.maximize) for other in earlier if len(other.values) == goal]
        place, quota = 1 + sum(other >= mine for other in others), max(1, (len(others) + 1) // self.reduction)
        if place <= quota:
            return ""
        return f"rung {rung}: place {place} of {len(others) + 1}, and the best {quota} go on"
