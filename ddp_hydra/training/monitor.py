"""Measures a training run: its metrics, its speed, what data and exchange cost, which rank is slow, and a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ddp_hydra.data.loader import MicroBatch
from ddp_hydra.tasks import Task
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.metrics import Count, Meter, SumsOfRanks, named, shapes_of
from ddp_hydra.training.monitoring.data_stats import DataStats
from ddp_hydra.training.monitoring.exchange import ExchangeTime
from ddp_hydra.training.monitoring.profiler import Profiler
from ddp_hydra.training.monitoring.stragglers import Stragglers
from ddp_hydra.training.monitoring.throughput import Throughput


class Monitor:
    """Measures between two logged points, and over the whole run.

    Args:
        consensus: gathers what each rank measured.
        task: makes metrics of what was counted.
        meter: adds up what the task counts.
        throughput: measures the speed.
        data_stats: adds up what reading the data costs.
        stragglers: compares the ranks' own work.
        exchange: measures how long steps wait for gradients.
        profiler: traces a few steps.
    """

    def __init__(
        self,
        consensus: StepConsensus,
        task: Task,
        meter: Meter,
        throughput: Throughput,
        data_stats: DataStats,
        stragglers: Stragglers,
        exchange: ExchangeTime,
        profiler: Profiler,
    ) -> None:
        self.consensus, self.task, self.meter, self.throughput = consensus, task, meter, throughput
        self.sums_of_ranks = SumsOfRanks()
        self.data_stats, self.stragglers, self.exchange, self.profiler = data_stats, stragglers, exchange, profiler

    def before_forward(self, batch: MicroBatch, forward: Callable[[Any], Any]) -> None:
        """Show the profiler a micro-batch.

        Args:
            batch: the micro-batch.
            forward: computes the loss of its `batch`.
        """
        self.profiler.count_batch(batch.size, lambda: forward(batch.batch))

    def count(self, counts: Iterable[Count]) -> None:
        """Count the micro-batches of a step whose update was applied."""
        self.meter.add(*counts)

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
        counted = self.task.metrics(self.sums_of_ranks.total(all_sums))
        metrics = {**named("train", counted), **step_metrics, "samples_per_s": samples_per_s}
        return metrics | self.data_stats.interval(all_counts) | self.stragglers.interval(all_seconds)

    def restart_interval(self, samples: int) -> None:
        """Forget what was counted since the last interval: its steps are taken again.

        Args:
            samples: samples that all ranks have seen at the step to which the run went back.
        """
        self.meter.clear()
        self.throughput.interval(samples)

    def paused(self) -> AbstractContextManager[None]:
        """Leave the time of a `with` block out of the speed."""
        return self.throughput.paused()

    def totals(self, samples: int) -> dict[str, Any]:
        """Return the time, the speed, the cost of data and exchange, and the slowest rank of the whole run."""
        return {
            **self.throughput.totals(samples),
            "data": self.data_stats.totals(),
            "exchange_s": self.exchange.total_s(),
            "slowest": self.stragglers.totals(),
        }
