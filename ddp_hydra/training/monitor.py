"""Measures a training run: its metrics, its speed, what data and exchange cost, which rank is slow, and a profile."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ddp_hydra.data.loader import Loader
from ddp_hydra.tasks import Task
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.data_stats import DataStats
from ddp_hydra.training.epoch_means import EpochMeans
from ddp_hydra.training.exchange import ExchangeTime
from ddp_hydra.training.metrics import Meter, SumsOfRanks, named, shapes_of
from ddp_hydra.training.profiler import Profiler
from ddp_hydra.training.stragglers import Stragglers
from ddp_hydra.training.update import Update


class Monitor:
    """Measures between two logged points, and over the whole run.

    Args:
        consensus: gathers what each rank measured.
        task: makes metrics of what was counted.
        loader: of the training data.
        updates: the updates of a step.
        profiler: traces a few steps.
        samples: that all ranks had seen before this run began.
        epoch_means: takes over what each interval has counted.

    Attributes:
        meter: adds up what the task counts.
        throughput: measures the speed.
        data_stats: adds up what reading the data costs.
        stragglers: compares the ranks' own work.
        exchange: measures how long steps wait for gradients.
    """

    def __init__(
        self,
        consensus: StepConsensus,
        task: Task,
        loader: Loader,
        updates: Collection[Update],
        profiler: Profiler,
        samples: int,
        epoch_means: EpochMeans,
    ) -> None:
        self.epoch_means = epoch_means
        self.consensus, self.task, self.profiler = consensus, task, profiler
        self.meter, self.sums_of_ranks = Meter(loader.device), SumsOfRanks()
        self.throughput, self.data_stats = Throughput(samples), DataStats(loader)
        self.exchange, self.stragglers = ExchangeTime(), Stragglers(loader, loader.device)
        self.watch(updates)

    def watch(self, updates: Collection[Update]) -> None:
        """Measure these updates of a step from now on, in place of those before."""
        self.exchange.watch([update.parallel for update in updates])
        for update in updates:
            self.stragglers.watch(update.parallel.step)

    def after_step(self) -> None:
        """Count the step, and begin or end the profile when it is time."""
        self.exchange.steps += 1
        self.profiler.after_step()

    def interval(self, samples: int, step_metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics since the last interval, over all ranks, and begin a new one. A collective.

        Args:
            samples: samples that all ranks have seen so far.
            step_metrics: metrics of the last optimizer step, to stand among them.
        """
        sums = self.meter.take()  # waits for the device, whose work belongs to this interval
        seconds, samples_per_s = self.throughput.interval(samples)
        all_sums, all_counts, all_seconds, all_waits = self.consensus.gather(
            self.sums_of_ranks.packed(sums),
            self.data_stats.local_counts(seconds),
            self.stragglers.local_seconds(),
            self.exchange.local_seconds(),
        )
        if not self.sums_of_ranks.are_known(all_sums):
            self.sums_of_ranks.learn(self.consensus.gather_objects(shapes_of(sums)))
            (all_sums,) = self.consensus.gather(self.sums_of_ranks.packed(sums))
        self.exchange.interval(all_waits)
        total = self.sums_of_ranks.total(all_sums)
        self.epoch_means.add(total)
        counted = self.task.metrics(total) if total else {}  # nothing yet, where each step so far was left out
        metrics = {**named("train", counted), **step_metrics, "samples_per_s": samples_per_s}
        return metrics | self.data_stats.interval(all_counts) | self.stragglers.interval(all_seconds)

    def totals(self, samples: int) -> dict[str, Any]:
        """Return the time, the speed, the cost of data and exchange, and the slowest rank of the whole run."""
        return {
            **self.throughput.totals(samples),
            "data": self.data_stats.totals(),
            "exchange_s": self.exchange.total_s(),
            "slowest": self.stragglers.totals(),
        }


class Throughput:
    """Measures training speed, without the time of validation.

    Args:
        samples: samples that all ranks had seen before this run began.
    """

    def __init__(self, samples: int) -> None:
        self.run_began = self.interval_began = time.perf_counter()
        self.samples_at_start = self.samples_at_interval = samples

    def interval(self, samples: int) -> tuple[float, float]:
        """End an interval; return its seconds and its samples per second.

        Args:
            samples: samples that all ranks have seen so far.
        """
        now = time.perf_counter()
        seconds = max(now - self.interval_began, 1e-9)
        speed = (samples - self.samples_at_interval) / seconds
        self.interval_began, self.samples_at_interval = now, samples
        return seconds, speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the interval and the totals."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.run_began += seconds
        self.interval_began += seconds

    def totals(self, samples: int) -> dict[str, float]:
        """Return the time and the mean speed since the run began.

        Args:
            samples: samples that all ranks have seen so far.
        """
        seconds = max(time.perf_counter() - self.run_began, 1e-9)
        return {"train_s": seconds, "samples_per_s": (samples - self.samples_at_start) / seconds}
