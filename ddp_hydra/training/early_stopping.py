"""An end before the end, where validation gets no better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EarlyStopping:
    """Counts validations without progress. All ranks know the same metrics, so they agree without asking.

    Args:
        metric: the objective's name.
        maximize: whether more is better.
        patience: validations without progress that end the run; None: none do.
        min_delta: what counts as progress, at least.
    """

    def __init__(self, metric: str, maximize: bool, patience: int | None, min_delta: float = 0.0) -> None:
        self.metric, self.sign = metric, 1.0 if maximize else -1.0
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.waited = 0

    @classmethod
    def of(cls, cfg: Any) -> EarlyStopping:
        """As the config wants it."""
        patience, min_delta = cfg.trainer.early_stopping_patience, cfg.trainer.early_stopping_min_delta
        return cls(cfg.objective.metric, cfg.objective.direction == "maximize", patience, min_delta)

    def note(self, metrics: Mapping[str, float]) -> bool:
        """Take note of an epoch's end, and say whether the run is to end."""
        value = metrics.get(self.metric)
        if self.patience is None or value is None:
            return False
        if value == value and (self.best is None or self.sign * (value - self.best) > self.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.wanted

    @property
    def wanted(self) -> bool:
        """Whether the run is to end."""
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> dict[str, float | int | None]:
        """What a checkpoint keeps."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, float | int | None]) -> None:
        """Put it back."""
        self.best, self.waited = state["best"], int(state["waited"] or 0)
