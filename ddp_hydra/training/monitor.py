"""Measures a training run: its metrics, its speed, what data and exchange cost, which rank is slow, and a profile.

A data set may report its cost with `stats()`: a dict of numbers that only grow. These are used: samples (read), bytes,
requests, retries, cache_hits and cache_misses (of samples or of shards), bad_samples.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_hydra.data.batch import n_tokens
from ddp_hydra.data.loader import Loader, MicroBatch
from ddp_hydra.data.wrappers import COUNTS
from ddp_hydra.errors import DataError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.tasks import Task
from ddp_hydra.training import memory
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.cost import Operations
from ddp_hydra.training.metrics import EpochMeans, Meter, added, computed, named
from ddp_hydra.training.parallel import PartStep
from ddp_hydra.training.profiler import Profiler, utilisation
from ddp_hydra.training.update import Update


class ExchangeTime:
    """Estimates the time that all steps of a run have waited for gradients: between two logged points, by a step that
    torch has timed.
    """

    def __init__(self, ranks: int) -> None:
        self.total_s = 0.0 if ranks == 1 else None  # the mean over the ranks; None while it is not known
        self.steps = 0

    def watch(self, parts: Sequence[PartStep]) -> None:
        self.parts, self.held_s = parts, 0.0

    def local_seconds(self) -> float:
        # After the backward pass, and in hooks; NaN where it is not known.
        before_s, self.held_s = self.held_s, sum(part.held_s() for part in self.parts)
        steps, self.steps = self.steps, 0
        return sum(part.exchange_s() for part in self.parts) * steps + self.held_s - before_s

    def interval(self, all_seconds: Sequence[float]) -> None:
        if not math.isnan(mean_s := statistics.fmean(all_seconds)):
            self.total_s = (self.total_s or 0.0) + mean_s


class Stragglers:
    """Measures how long this rank works alone in each step."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader, self.device = loader, device
        self.forwards: list[tuple[Any, Any]] = []  # where they began and ended since the last logged point
        self.forward_began: Any = None
        self.waited_s = loader.waited_s
        self.sums: list[float] = []

    def watch(self, step: nn.Module) -> None:
        step.register_forward_pre_hook(self._begin)
        step.register_forward_hook(self._end)

    def _begin(self, step: nn.Module, inputs: Any) -> None:
        self.forward_began = self._now() if step.training else None

    def _end(self, step: nn.Module, inputs: Any, output: Any) -> None:
        if self.forward_began is not None:
            self.forwards.append((self.forward_began, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def local_seconds(self) -> float:
        on_gpu = self.device.type == "cuda"  # which has finished them
        forward_s = sum(begin.elapsed_time(end) / 1000 if on_gpu else end - begin for begin, end in self.forwards)
        before_s, self.waited_s = self.waited_s, self.loader.waited_s
        self.forwards.clear()
        return forward_s + self.waited_s - before_s

    def interval(self, ranks: Sequence[float]) -> dict[str, float]:
        if len(ranks) == 1:
            return {}
        self.sums = [total + one for total, one in zip(self.sums or [0.0] * len(ranks), ranks, strict=True)]
        return {"slowest_rank": max(ranks) / max(statistics.median(ranks), 1e-9)}

    def totals(self) -> dict[str, int | float]:
        if not self.sums:
            return {}
        slowest = max(range(len(self.sums)), key=self.sums.__getitem__)
        return {"rank": slowest, "times": self.sums[slowest] / max(statistics.median(self.sums), 1e-9)}


class Monitor:
    """Measures between two logged points, and over the whole run.

    Args:
        samples: that all ranks had seen before this run began.
        operations: of training; None where the device's peak is not known.
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
        operations: Operations | None = None,
    ) -> None:
        self.epoch_means, self.operations = epoch_means, operations
        self.tokens, self.total_tokens = 0, 0  # of this rank since the last logged point, and of all ranks
        self.consensus, self.task, self.profiler = consensus, task, profiler
        self.device, self.meter = loader.device, Meter(loader.device)
        self.throughput, self.data_stats = Throughput(samples), DataStats(loader, consensus.world)
        self.exchange, self.stragglers = ExchangeTime(consensus.world.size), Stragglers(loader, loader.device)
        self.watch(updates)

    def watch(self, updates: Collection[Update]) -> None:
        self.exchange.watch([update.part for update in updates])
        for update in updates:
            self.stragglers.watch(update.part.step)

    def count(self, batch: MicroBatch) -> MicroBatch:
        # Once, whatever the updates of its step.
        self.profiler.count(batch.size)
        self.tokens += n_tokens(batch.batch)
        return batch

    def after_step(self) -> None:
        self.exchange.steps += 1
        self.profiler.after_step()

    def interval(self, samples: int, step_metrics: Mapping[str, float]) -> dict[str, float]:
        # A collective.
        sums = self.meter.take()  # waits for the device, whose work belongs to this interval
        seconds, samples_per_s = self.throughput.interval(samples)
        of_ranks = self.consensus.world.gather_objects(
            (
                {name: part.numpy() for name, part in sums.items()},
                self.data_stats.local_counts(seconds),
                self.stragglers.local_seconds(),
                self.exchange.local_seconds(),
                self.tokens,
                memory.peak_bytes(self.device),
            )
        )
        all_sums, all_counts, all_seconds, all_waits, all_tokens, peaks = zip(*of_ranks, strict=True)
        self.tokens, tokens = 0, sum(all_tokens)
        self.total_tokens += tokens
        self.exchange.interval(all_waits)
        total = added({name: torch.from_numpy(part) for name, part in one.items()} for one in all_sums)
        self.epoch_means.add(total)
        counted = computed(self.task, total)  # nothing yet, where each step so far was left out
        metrics = {**named("train", counted), **step_metrics, "samples_per_s": samples_per_s}
        metrics |= self._speed(samples_per_s, tokens / seconds)
        if self.device.type == "cuda":
            metrics["peak_memory"] = max(peaks)
        return metrics | self.data_stats.interval(all_counts) | self.stragglers.interval(all_seconds)

    def _speed(self, samples_per_s: float, tokens_per_s: float) -> dict[str, float]:
        found = {"tokens_per_s": tokens_per_s} if tokens_per_s else {}
        if self.operations is not None and samples_per_s:
            a_rank = self.operations.per_s(samples_per_s, tokens_per_s) / self.consensus.world.size
            share = utilisation(a_rank, self.device, self.profiler.precision)
            found |= {"mfu": share} if share else {}
        return found

    def totals(self, samples: int) -> dict[str, Any]:
        found = self.throughput.totals(samples)
        logged, speed = max(1, samples - self.throughput.samples_at_start), found["samples_per_s"] or 0.0
        return {
            "tokens_per_s": None,
            "mfu": None,
            **found,
            **self._speed(speed, speed * self.total_tokens / logged),
            "data": self.data_stats.totals(),
            "exchange_s": self.exchange.total_s,
            "slowest": self.stragglers.totals(),
        }


class Throughput:
    """Measures training speed, without the time of validation."""

    def __init__(self, samples: int) -> None:
        self.run_began = self.interval_began = time.perf_counter()
        self.samples_at_start = self.samples_at_interval = samples

    def interval(self, samples: int) -> tuple[float, float]:
        now = time.perf_counter()
        seconds = max(now - self.interval_began, 1e-9)
        speed = (samples - self.samples_at_interval) / seconds
        self.interval_began, self.samples_at_interval = now, samples
        return seconds, speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.run_began += seconds
        self.interval_began += seconds

    def totals(self, samples: int) -> dict[str, float | None]:
        seconds = max(time.perf_counter() - self.run_began, 1e-9)
        return {"train_s": seconds, "samples_per_s": (samples - self.samples_at_start) / seconds or None}


class DataStats:
    """Adds up how long the loaders of all ranks waited, and what their data sets read."""

    def __init__(self, loader: Loader, world: World = ALONE) -> None:
        self.loader, self.world = loader, world
        self.previous = [0.0] * (2 + len(COUNTS))
        self.train_s = 0.0

    def local_counts(self, interval_s: float) -> list[float]:
        self.train_s += interval_s
        stats = self.loader.dataset.stats() if hasattr(self.loader.dataset, "stats") else {}
        return [self.loader.waited_s, self.train_s, *(float(stats.get(name, 0)) for name in COUNTS)]

    def interval(self, all_counts: Sequence[Sequence[float]]) -> dict[str, float]:
        # A collective if there are bad samples.
        now = [sum(column) for column in zip(*all_counts, strict=True)]
        waited, spent, *counts = (a - b for a, b in zip(now, self.previous, strict=True))
        new, so_far = (dict(zip(COUNTS, numbers, strict=True)) for numbers in (counts, now[2:]))
        self.previous = now
        metrics = {"data_wait": waited / max(spent, 1e-9)}
        if not hasattr(self.loader.dataset, "stats"):
            return metrics
        if so_far["bad_samples"]:
            self._refuse_too_many()
        metrics["data/bytes_per_s"] = new["bytes"] / max(spent, 1e-9) * self.world.size
        metrics["data/cache_hits"] = new["cache_hits"] / max(1, new["cache_hits"] + new["cache_misses"])
        return metrics | {f"data/{name}": so_far[name] for name in ("retries", "bad_samples")}

    def totals(self) -> dict[str, float]:
        waited, spent, *counts = self.previous
        totals = {"wait_s": waited / self.world.size, "wait": waited / max(spent, 1e-9)}
        return totals | (dict(zip(COUNTS, counts, strict=True)) if hasattr(self.loader.dataset, "stats") else {})

    def _refuse_too_many(self) -> None:
        dataset = self.loader.dataset
        share = getattr(dataset, "max_bad_fraction", None)
        if share is None or not hasattr(dataset, "__len__"):  # a stream judges by itself
            return
        bad = bad_of_all_ranks(self.world, dataset)
        if count_bad(bad) > share * len(dataset):
            some = "; ".join(f"{name} ({bad[name][0]})" for name in sorted(bad)[:3])
            raise DataError(
                f"all ranks together found {count_bad(bad)} bad samples of {len(dataset)}, and data.max_bad_fraction="
                f"{share:g} allows {int(share * len(dataset))}: {some}. Remove them, or give data.max_bad_fraction=…"
            )


def skipped_by(dataset: Any) -> str:
    skipped: Mapping[str, int] = getattr(dataset, "skipped", None) or {}
    if not skipped:
        return ""
    most = sorted(skipped.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{count:,} {kind or 'without extension'}" for kind, count in most[:5])
    return f"{sum(skipped.values()):,} files that are not images: {kinds}{', ...' if len(most) > 5 else ''}"


def bad_of_all_ranks(world: World, *datasets: Any) -> dict[str, tuple[str, int]]:
    # A collective.
    local = {
        name: (reason, getattr(data, "bad_counts", {}).get(name, 1))
        for data in datasets
        for name, reason in getattr(data, "bad", {}).items()
    }
    return {name: bad for rank in world.gather_objects(local) for name, bad in rank.items()}


def count_bad(bad: Mapping[str, tuple[str, int]]) -> int:
    return sum(count for _, count in bad.values())
