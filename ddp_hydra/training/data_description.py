"""Describes a data set: by what a trained model depends on, and by a fingerprint that all ranks must have."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

from ddp_hydra.console.text import counted, encodable
from ddp_hydra.data import draws, wrappers
from ddp_hydra.data.batch import alike, summary
from ddp_hydra.errors import ConfigError, DataError
from ddp_hydra.rank.world import World


@dataclass(frozen=True)
class DataDescription:
    """What is known of a data set. A checkpoint describes its training data, so that its model needs no data.

    Args:
        classes: names of the classes; () if the data set has none.
        num_classes: their number; 0 if the data set does not know it.
        features: names of the columns that make the model's input, in its order; () if it is not made of columns.
        n_samples: None if it is not known.
        scaling: how the numbers of the input are scaled, in words; "" if the data set does not say it.
        widths: numbers that each feature has in a row; () if the data set does not say it.
    """

    classes: tuple[str, ...] = ()
    num_classes: int = 0
    features: tuple[str, ...] = ()
    n_samples: int | None = None
    scaling: str = ""
    widths: tuple[int, ...] = ()

    @classmethod
    def of(cls, data: Any) -> DataDescription:
        if isinstance(data, DataDescription):
            return data
        names, features, scaling, widths = (
            getattr(data, name, None) for name in ("classes", "features", "scaling", "feature_widths")
        )
        number = getattr(data, "num_classes", None) or (names if isinstance(names, int) else 0)
        if isinstance(names, set | frozenset):  # in no order, so only their number is known
            number, names = number or len(names), ()
        names = _names(names)
        lengths = set(_lengths(data))
        if len(names) in lengths and len(set(names)) < len(names):  # a label for each sample
            names = ()
        columns = tuple(features) if isinstance(features, (list, tuple)) else ()
        if len(columns) in lengths:  # a user's own list of samples, not names of columns
            columns = ()
        return cls(
            names,
            int(number or len(names)),
            columns if all(isinstance(name, str) for name in columns) else (),
            length(data),
            scaling if isinstance(scaling, str) else "",
            widths if isinstance(widths, tuple) else (),
        )

    def check_validation(self, validation: DataDescription) -> None:
        if (name := self._renumbered(validation)) is not None:
            raise ConfigError(
                f"the class {name} has number {self.classes.index(name)} in data.train and "
                f"{validation.classes.index(name)} in data.val: both need the same classes, in the same order: give "
                "data.val.classes_from=..., or --classes-from when shards are made"
            )
        self._check_input(validation, "data.val", "data.train")

    def check_resume(self, now: DataDescription) -> str:
        for own, given in ((self.classes, now.classes), (self.num_classes, now.num_classes)):
            if own and given and own != given:
                before, there = (shown(one) if isinstance(one, tuple) else str(one) for one in (own, given))
                raise ConfigError(
                    f"the classes of data.train are {there}, and the checkpoint was trained on {before}: give the data "
                    "these, in this order, or begin a new run with its weights: model.weights=<run>, without resume="
                )
        self._check_input(now, "data.train", "the checkpoint's training data")
        if None in (self.n_samples, now.n_samples) or self.n_samples == now.n_samples:
            return ""
        return (
            f"data.train has {now.n_samples:,} samples, and had {self.n_samples:,} at the checkpoint: in the epoch "
            "under way some samples may come twice or not at all"
        )

    def check_model(self, data: DataDescription, key: str) -> None:
        more = self.num_classes and data.num_classes > self.num_classes
        if more or self._renumbered(data) is not None:
            own = shown(data.classes) if data.classes else str(data.num_classes)
            trained = shown(self.classes) if self.classes else str(self.num_classes)
            raise ConfigError(
                f"the classes of {key} are {own}, and the model was trained on {trained}: the numbers of the classes "
                "mean others. Give the data the model's classes in the same order, or, for predict, no labels"
            )
        self._check_input(data, key, "the model's training data")

    def other_names(self, data: DataDescription) -> bool:
        return bool(self.classes) and not set(data.classes) <= set(self.classes)

    def _renumbered(self, other: DataDescription) -> str | None:
        own, others = ({name: number for number, name in enumerate(one.classes)} for one in (self, other))
        return next((name for name in own if others.get(name, own[name]) != own[name]), None)

    def _check_input(self, other: DataDescription, key: str, of: str) -> None:
        if self.features and other.features and self.features != other.features:
            missing = [name for name in self.features if name not in other.features]
            what = f"{shown(missing)} missing" if missing else "others, or in another order"
            raise ConfigError(
                f"the features of {key} are {shown(other.features)} ({what}), and the features of {of} are "
                f"{shown(self.features)}: give data.features=[{','.join(self.features)}]"
            )
        for name, own, others in zip(self.features, self.widths, other.widths, strict=False):
            if own != others:
                raise ConfigError(
                    f"the feature {name} has {counted(others, 'number')} in a row of {key}, and {own} in {of}: write "
                    "vectors of one length"
                )

        if self.scaling and other.scaling and self.scaling != other.scaling:
            raise ConfigError(
                f"the images of {key} are {other.scaling}, and the images of {of} are {self.scaling}: let both "
                "transforms return the same type (leave ToTensor or ToDtype out, or put it into both)"
            )

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> DataDescription:
        given: Any = {
            name: tuple(value) if isinstance(value, list) else value for name, value in (values or {}).items()
        }
        # Checkpoints of older versions have them as Python gives names that are not UTF-8.
        given["classes"] = tuple(map(encodable, given.get("classes") or ()))
        return cls(**given)


def length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _lengths(data: Any) -> Iterator[int | None]:
    """Yield the lengths of a data set and of those inside: `random_split` shows the attributes of the whole one."""
    yield length(data)
    for part in data.parts if isinstance(data, wrappers.View) else ():
        yield from _lengths(part)


def _names(classes: Any) -> tuple[str, ...]:
    """Return the names in the order of their numbers; () if there are none, or other numbers than from 0 on."""
    return tuple(encodable(str(name)) for name in _in_order(classes))


def _in_order(classes: Any) -> Iterable[Any]:
    if isinstance(classes, Mapping):
        if isinstance(classes, Counter):  # how often each class comes
            return ()
        pairs = list(classes.items())
        are_numbers = [all(isinstance(one, Integral) for one in part) for part in (classes, classes.values())]
        if are_numbers[1]:  # name -> number, as `class_to_idx` of torchvision
            numbered = pairs
        elif are_numbers[0]:
            numbered = [(name, number) for number, name in pairs]
        else:
            return classes
        if sorted(number for _, number in numbered) != list(range(len(pairs))):
            return ()
        return [name for name, _ in sorted(numbered, key=lambda pair: pair[1])]
    return classes if isinstance(classes, Iterable) and hasattr(classes, "__len__") else ()


def shown(names: Sequence[str], most: int = 12) -> str:
    names = [name if name.isprintable() else repr(name) for name in names]  # such as the newline of a text's characters
    return ", ".join(names[:most]) + (f" … ({len(names)})" if len(names) > most else "")


IDS = 64
"""Samples whose ids are compared."""
READ_S = 0.1
"""Seconds that reading samples may take; a slower data set without ids is compared by its length alone."""


def check_same_data(data: Any, key: str, seed: int, world: World) -> None:
    # A collective.
    lengths: list[int] = world.gather_objects(len(data))
    name = wrappers.name_of(data)
    how = "build it from the arguments and the global random generators alone, which all ranks have alike"
    if len(set(lengths)) > 1:
        raise DataError(f"{key}: {name} has {', '.join(f'{n:,}' for n in lengths)} samples on the ranks: {how}")
    if not lengths[0]:
        return
    found = world.gather_objects(fingerprint(data, seed))
    for rank, other in enumerate(found):
        if not all(alike(a, b) for a, b in zip(found[0], other, strict=False)):
            raise DataError(
                f"{key}: {name} has other samples on rank {rank} than on rank 0, as if each had split it anew: {how}"
            )


def fingerprint(data: Any, seed: int) -> list[Any]:
    n = len(data)
    if hasattr(data, "sample_id"):
        places = sorted({n * number // IDS for number in range(min(IDS, n))})
        with suppress(Exception):  # such as of an id that is known once its sample was read
            names = "\n".join(str(data.sample_id(place)) for place in places)
            return [hashlib.sha256(encodable(names).encode()).hexdigest()]
    samples: list[Any] = []
    begin = time.monotonic()
    for index in (0, n // 2):
        with suppress(Exception), draws.StateGuard():  # an error comes again where the sample is trained on
            twice = []
            for _ in range(2):
                indices = draws.placed([index], seed)
                indices.seed_sample(0)
                twice.append(summary(data[index]))
            samples.append(twice[0] if alike(*twice) else None)
        if time.monotonic() - begin > READ_S:
            break
    return samples
