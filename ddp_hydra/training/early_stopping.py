"""Ends a run when its validations get no better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_hydra.console.text import counted


class EarlyStopping:
    """Counts validations without progress. All ranks have the same metrics, so they agree without a vote.

    Args:
        metric: the objective's name.
        maximize: whether more is better.
        patience: the run ends after so many validations without progress; None: it never does.
        min_delta: the smallest improvement that counts as progress.
    """

    def __init__(self, metric: str, maximize: bool, patience: int | None, min_delta: float = 0.0) -> None:
        self.metric, self.sign = metric, 1.0 if maximize else -1.0
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.validations_without_progress = 0

    @classmethod
    def from_config(cls, cfg: Any) -> EarlyStopping:
        """Build it from `trainer` and `objective` in the config."""
        patience, min_delta = cfg.trainer.early_stopping_patience, cfg.trainer.early_stopping_min_delta
        return cls(cfg.objective.metric, cfg.objective.direction == "maximize", patience, min_delta)

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Count the end of an epoch; return whether the run should end."""
        value = metrics.get(self.metric)
        if self.patience is None or value is None:
            return False
        if value == value and (self.best is None or self.sign * (value - self.best) > self.min_delta):
            self.best, self.validations_without_progress = value, 0
        else:
            self.validations_without_progress += 1
        return self.should_stop

    @property
    def reason(self) -> str:
        """Return why the run should end, for a person to read."""
        what = "validation" if self.metric.startswith("val/") else "epoch"
        return f"no progress in {self.metric} for {counted(self.validations_without_progress, what)}"

    @property
    def should_stop(self) -> bool:
        """True if the run should end."""
        return self.patience is not None and self.validations_without_progress >= self.patience

    def state_dict(self) -> dict[str, float | int | None]:
        """Return the counts for a checkpoint."""
        return {"best": self.best, "validations_without_progress": self.validations_without_progress}

    def load_state_dict(self, state: Mapping[str, float | int | None]) -> None:
        """Restore the counts of a checkpoint."""
        self.best = state["best"]
        self.validations_without_progress = int(state["validations_without_progress"] or 0)
