"""Describes the progress and the speed of a job in words."""

from __future__ import annotations

from collections.abc import Callable

from ddp_hydra.console.text import duration, plain
from ddp_hydra.record import Metrics, Record, Start

EPOCH = "train_epoch/"
"""The names of means over an epoch begin with it."""


class ProgressState:
    """Collects from records what the display shows.

    Args:
        clock: a monotonic clock, in seconds.

    Attributes:
        metrics: the last value of each metric.
        epoch_means: "train/loss" and so on as means over the last epoch that has ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.step: int | None = None
        self.epoch: float | None = None
        self.total_steps: int | None = None
        self.epochs: float | None = None
        self.metrics: dict[str, float] = {}
        self.epoch_means: dict[str, float] = {}
        self._first: tuple[float, int] = (clock(), 0)

    def start(self, record: Record, start: Start) -> None:
        """Begin an attempt, from the step of its start record."""
        self.step = self.epoch = None
        self.metrics.clear()
        self.epoch_means.clear()
        self.total_steps = start.total_steps
        self.epochs = start.epochs
        self._first = (self._clock(), record.step or 0)

    def update(self, record: Record, logged: Metrics) -> None:
        """Take a metrics record."""
        self.epoch = self.epoch_of(logged)
        values = logged.metrics
        self.epoch_means |= {n.replace(EPOCH, "train/", 1): value for n, value in values.items() if n.startswith(EPOCH)}
        self.metrics |= {name: value for name, value in values.items() if not name.startswith(EPOCH)}
        self.step = record.step if record.step is not None else self.step or 0

    def epoch_of(self, logged: Metrics) -> float | None:
        """Return the epoch that metrics belong to, counted from 1; without one, the epoch of the metrics before."""
        return self.epoch if logged.epoch is None else logged.epoch

    def forget_validation(self) -> None:
        """Drop the validation's numbers, so that later lines do not repeat them."""
        self.metrics = {n: value for n, value in self.metrics.items() if not n.startswith("val/")}

    def mark(self) -> float | None:
        """Return the epoch, or the step if there are no epochs, that a permanent line stands for."""
        return self.step if self.epoch is None else self.epoch

    def where(self) -> str:
        """Return for example 'epoch 3/5  step 120/500'."""
        step = f"step {_of(self.step or 0, self.total_steps)}"
        return step if self.epoch is None else f"{self.epoch_text()}  {step}"

    def epoch_text(self) -> str:
        """Return for example 'epoch 3/5', or the step if there are no epochs."""
        if self.epoch is None:
            return self.where()
        return f"epoch {_of(self.epoch, self.epochs)}"

    def numbers(self, validation: bool = False, epoch: bool = False) -> str:
        """Return the losses and accuracies, and the samples/s.

        Args:
            validation: also those of the validation.
            epoch: those of the training are means over the epoch.
        """
        metrics = {**self.metrics, **self.epoch_means} if epoch else self.metrics
        shown = [
            f"{plain(name)} {value:.4g}"
            for name, value in sorted(metrics.items(), key=_rank_of_name)
            if name.startswith("train/") or (validation and name.startswith("val/"))
        ]
        speed = self.metrics.get("samples_per_s")
        if speed is not None:
            shown.append(f"{speed:.0f} samples/s" if speed >= 10 else f"{speed:.3g} samples/s")
        return "  ".join(shown)

    def eta_s(self) -> float | None:
        """Return the estimated seconds until the end; None while they are not known."""
        began, first = self._first
        step = self.step or 0
        if not self.total_steps or step <= first or self.total_steps <= step:
            return None
        return (self._clock() - began) / (step - first) * (self.total_steps - step)

    def eta(self) -> str:
        """Return for example "ETA 1:32 min", or "" while it is not known."""
        seconds = self.eta_s()
        return "" if seconds is None else f"ETA {duration(seconds)}"


def _rank_of_name(item: tuple[str, float]) -> tuple[bool, bool, str]:
    """Return a sort key: training first, the loss before other metrics."""
    name = item[0]
    return not name.startswith("train/"), not name.endswith("/loss"), name


def _of(value: float, total: float | None) -> str:
    return f"{value:g}" if total is None else f"{value:g}/{total:g}"
