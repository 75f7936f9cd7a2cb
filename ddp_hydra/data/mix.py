"""Mixes data sets by weight: which samples of each come in an epoch, and in which order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, floor
from numbers import Real
from typing import Any

import numpy as np
from omegaconf import DictConfig
from torch.utils.data import ConcatDataset

from ddp_hydra.config.hydra_compat import instantiate
from ddp_hydra.data.draws import StateGuard
from ddp_hydra.errors import ConfigError

EXHAUSTED = ("repeat", "stop")
MOST_SAMPLES = 2**31
"""Samples of an epoch, at most: their order is an array in each rank."""


@dataclass(frozen=True)
class Mixture:
    """Orders the samples of several sets.

    The sets take turns as evenly as their weights allow: of samples that follow each other, a set has its share, within
    one sample for each set and one more. Each set is read to its end, in an order of its own, before any of its samples
    comes again; the next epoch goes on where this one ended.

    Args:
        places: name of a set -> indices of its samples.
        weights: name -> weight, above 0.
        exhausted: repeat: an epoch ends when each set was read, and the others are read again; stop: it ends with the
            first set that has no more samples.
        epoch_samples: length of an epoch; None: as `exhausted` says.

    Attributes:
        counts: name -> samples of a set in each epoch.

    Raises:
        ConfigError: a value is out of its range, or a set is empty.
    """

    places: Mapping[str, np.ndarray]
    weights: Mapping[str, float]
    exhausted: str = "repeat"
    epoch_samples: int | None = None
    counts: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        if self.exhausted not in EXHAUSTED:
            raise ConfigError(f"data.exhausted={self.exhausted}: give one of {', '.join(EXHAUSTED)}")
        if self.epoch_samples is not None and self.epoch_samples < 1:
            raise ConfigError(f"data.epoch_samples={self.epoch_samples}: give at least 1, or null")
        for name, weight in self.weights.items():
            if not isinstance(weight, Real) or not 0 < weight < np.inf:
                raise ConfigError(f"data.weights.{name}={weight!r}: give a number above 0, or leave the set out")
            if not len(self.places[name]):
                raise ConfigError(f"the set {name} of the mixture has no samples: leave it out")
        object.__setattr__(self, "counts", self._counts())

    def _counts(self) -> dict[str, int]:
        given = {name: Fraction(float(self.weights[name])) for name in self.places}
        smallest = min(given.values())
        unit = smallest if smallest < 1e-6 else 1  # the denominators below would round it away
        exact = {name: (weight / unit).limit_denominator(10**6) for name, weight in given.items()}
        total = sum(exact.values())
        shares = {name: weight / total for name, weight in exact.items()}
        lengths = [len(self.places[name]) / share for name, share in shares.items()]
        whole = ceil(max(lengths)) if self.exhausted == "repeat" else floor(min(lengths))
        n = self.epoch_samples or max(1, whole)
        if n > MOST_SAMPLES:
            weights = ", ".join(f"data.weights.{name}={weight}" for name, weight in self.weights.items())
            raise ConfigError(
                f"an epoch of this mixture has more than {MOST_SAMPLES:,} samples, the most allowed ({weights}): give "
                "a smaller data.epoch_samples=<n>, data.exhausted=stop, or weights that differ less"
            )
        counts = {name: floor(n * share) for name, share in shares.items()}
        by_rest = sorted(shares, key=lambda name: counts[name] - n * shares[name])
        return {name: counts[name] + (name in by_rest[: n - sum(counts.values())]) for name in shares}

    @property
    def n_samples(self) -> int:
        """Return the length of an epoch."""
        return sum(self.counts.values())

    def order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the indices of an epoch, (n_samples,).

        Args:
            seed: of the orders of the sets.
            epoch: its number.
            shuffle: read a set in a new order each time; else in its own.
        """
        indices, progress = [], []
        for number, (name, places) in enumerate(self.places.items()):
            count = self.counts[name]
            first, last = epoch * count, (epoch + 1) * count  # of all that the epochs read of the set
            for begin in range(first - first % len(places), last, len(places)):
                random = np.random.RandomState([seed & 0xFFFFFFFF, number, begin // len(places)])
                own = random.permutation(places) if shuffle else places
                indices.append(own[max(0, first - begin) : last - begin])
            progress.append((np.arange(count) + 0.5) / max(1, count))
        turns = np.argsort(np.concatenate(progress), kind="stable")
        return np.concatenate(indices)[turns]

    def within(self, indices: Sequence[int]) -> Mixture:
        """Return the mixture of a part of the samples, which has other indices."""
        chosen = np.asarray(indices, np.int64)
        places = {name: np.flatnonzero(np.isin(chosen, own)) for name, own in self.places.items()}
        places = {name: own for name, own in places.items() if len(own)}
        return replace(self, places=places, weights={name: self.weights[name] for name in places})


class Mix(ConcatDataset):
    """Mixes data sets by weight. A validation set is all samples of all sets, once, with the loss of each set.

    It is a `ConcatDataset` whose order says how often each set comes: sampler=distributed or sequential.

    Args:
        sets: name -> data set, its config, or the config of a group `data` with the `part`.
        weights: name -> weight; None: all alike.
        exhausted: as of `Mixture`.
        epoch_samples: as of `Mixture`.
        part: of the configs: train or val.

    Attributes:
        mixture: orders the samples.

    Raises:
        ConfigError: a set is iterable, lacks the part, or has another tokenizer; or a weight names no set.
    """

    def __init__(
        self,
        sets: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        exhausted: str = "repeat",
        epoch_samples: int | None = None,
        part: str = "train",
    ) -> None:
        built = {
            str(name): made for name, given in sets.items() if (made := _built(str(name), given, part)) is not None
        }
        if not built:
            none = " or data.val=null" if part == "val" else ""
            raise ConfigError(
                f"the mixture has no set with {part}: give +data@data.sets.<name>=<one of the group>{none}"
            )
        for name, one in built.items():
            if not hasattr(one, "__getitem__") or not hasattr(one, "__len__"):
                raise ConfigError(
                    f"data.sets.{name} is iterable ({type(one).__name__}), and a mixture takes sets with a length: mix "
                    "streams by datasets.interleave_datasets(probabilities=…)"
                )
            if isinstance(one, Mix):
                raise ConfigError(f"data.sets.{name} is a mixture: name its sets here")
        of_text = [one for one in built.values() if type(one).__module__.startswith("ddp_hydra.finetune.")]
        tokenizers = {getattr(one, "tokenizer", None) for one in of_text}
        if len(tokenizers) > 1:
            raise ConfigError(f"the sets {', '.join(built)} have tokens of several tokenizers: give one to all of them")
        super().__init__(list(built.values()))
        if weights is not None and not isinstance(weights, Mapping):
            raise ConfigError(f"data.weights={weights}: give a weight by the name of its set, data.weights.<name>=2")
        self.weights = dict.fromkeys(built, 1.0) | {str(name): value for name, value in (weights or {}).items()}
        if unknown := [name for name in self.weights if name not in map(str, sets)]:
            raise ConfigError(f"data.weights.{unknown[0]} names no set, only {', '.join(map(str, sets))}")
        ends = [0, *self.cumulative_sizes]
        places = {name: np.arange(*ends[number : number + 2]) for number, name in enumerate(built)}
        weights = {name: self.weights[name] for name in built}
        self.mixture = Mixture(places, weights, exhausted, epoch_samples)

    def described(self) -> str:
        """Return how much of each set comes in an epoch, for the header of a run."""
        n, sets, parts = self.mixture.n_samples, list[Any](self.datasets), []
        for (name, count), one in zip(self.mixture.counts.items(), sets, strict=True):
            about = f" ({one.described()})" if callable(getattr(one, "described", None)) else ""
            parts.append(f"{name} {count / n:.1%}, {count:,} of {len(one):,}{about}")
        return f"an epoch of {n:,}: {'; '.join(parts)}"


def _built(name: str, given: Any, part: str) -> Any:
    if not isinstance(given, DictConfig):
        return given
    node = given if "_target_" in given else given.get(part)
    if node is None:
        return None
    try:
        with StateGuard():  # each set is built as if it were alone
            return instantiate(node)
    except (ConfigError, OSError, ValueError, TypeError, LookupError, ImportError, AttributeError) as error:
        told = re.sub(r"\bdata\.(?=\w+=)", f"data.sets.{name}.", str(error))
        raise ConfigError(f"data.sets.{name} ({node.get('_target_')}): {told}") from error
