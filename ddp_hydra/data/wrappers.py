"""Looks into data sets that hold others: what the inner sets offer counts.

torch's `Subset`, which `random_split` makes, and `ConcatDataset` have neither the classes nor the normalisation of the
data sets inside. A wrapper of the user makes samples of its own, but what the data sets inside are told and what they
count must not stop at it.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsInt

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from ddp_hydra.data.draws import Indices
from ddp_hydra.data.thread_safe import is_thread_safe
from ddp_hydra.errors import ConfigError


def opened(data: Any, around: tuple[Any, ...] = ()) -> Any:
    """Return a data set that offers what lies in a wrapper, nested ones, too; any other data set as it is.

    Args:
        data: the data set.
        around: the wrappers in which it lies.

    Raises:
        ConfigError: the parts of a `ConcatDataset` prepare their batches in different ways, or a wrapper of the user
            hides how the batches of the data set inside are made.
    """
    methods = [getattr(type(data), name, None) for name in ("__getitem__", "__getitems__")]
    if isinstance(data, Subset) and methods == [Subset.__getitem__, Subset.__getitems__]:
        return OpenedSubset(data, opened(data.dataset, (*around, data)))
    if isinstance(data, ConcatDataset) and methods == [ConcatDataset.__getitem__, None]:
        return OpenedConcat(data, [opened(part, (*around, data)) for part in data.datasets])
    if parts := held(data, around):
        if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
            return OpenedOwn(data, parts)
        _refuse_hidden(data, parts, _MADE_BY)
    elif other := _other_meanings(data):
        return OpenedOther(data, other)
    return data


def held(data: Any, around: tuple[Any, ...] = ()) -> list[Any]:
    """Return what another data set holds in its attributes and has methods that the training loop calls.

    Args:
        data: the data set.
        around: the wrappers in which it lies.
    """
    if type(data).__module__.partition(".")[0] in _LIBRARIES:
        return []
    values = list(getattr(data, "__dict__", {}).values())
    for value in tuple(values):
        values += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    outer = {id(one) for one in (*around, data)}
    found = [value for value in values if isinstance(value, Dataset) or _offers(value, "set_epoch")]
    parts = [opened(value, (*around, data)) for value in found if id(value) not in outer]
    return [part for part in parts if any(_offers(part, name) for name in (*_TOLD, *_MADE_BY))]


def inside(data: Any) -> Any:
    """Return the data set as it was built, for its name."""
    return data.wrapper if isinstance(data, Opened) else data


def own_getitems(data: Any) -> bool:
    """Return whether a data set reads a whole batch in its own way."""
    if isinstance(data, Opened):
        return all(
            own_getitems(part)
            for part in (data.parts if isinstance(data, (OpenedSubset, OpenedConcat)) else [data.wrapper])
        )
    read = getattr(data, "__getitems__", None)
    return read is not None and getattr(read, "__func__", None) is not StackDataset.__getitems__


class Opened(Dataset):
    """A wrapper of torch that is looked into.

    What the wrapper was given by the user goes before what is inside.

    Args:
        wrapper: of torch.
        parts: the data sets inside.
    """

    def __init__(self, wrapper: Any, parts: Sequence[Any]) -> None:
        self.wrapper, self.parts = wrapper, list(parts)
        self.thread_safe = "collate" not in vars(wrapper) and all(is_thread_safe(part) for part in parts)

    def __len__(self) -> int:
        return len(self.wrapper)

    def __getitem__(self, index: int) -> Any:
        part, within = self._find(index)
        return self.parts[part][within]

    def _find(self, index: int) -> tuple[int, int]:
        """Return the number of the part that has a sample, and its index there."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name in ("wrapper", "parts"):  # while it is unpickled
            raise AttributeError(name)
        if hasattr(self.wrapper, name) and name != "__getitems__":
            return getattr(self.wrapper, name)
        if name in _COMBINED and all(hasattr(part, name) for part in self.parts):
            return _COMBINED[name](self)
        if name in _SUMMED and any(hasattr(part, name) for part in self.parts):
            return _SUMMED[name](self)
        if name in _SAME:
            return self._same(name)
        raise AttributeError(f"{type(self.wrapper).__name__} and what is inside have no {name}")

    def _same(self, name: str) -> Any:
        """Return an attribute that all parts have alike.

        Raises:
            AttributeError: they have not.
        """
        first, *others = [getattr(part, name) for part in self.parts]
        if any(not _equal(first, other) for other in others):
            raise AttributeError(f"the parts of {type(self.wrapper).__name__} differ in {name}")
        return first

    # What several threads or the training loop ask for

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        """Return a whole batch, as the parts read theirs."""
        places: defaultdict[int, list[int]] = defaultdict(list)
        found = [self._find(index) for index in indices]
        for place, (part, _) in enumerate(found):
            places[part].append(place)
        if len(places) == 1:
            (part,) = places
            return self.parts[part].__getitems__(_of(indices, [within for _, within in found]))
        samples: list[Any] = [None] * len(found)
        for part, own in places.items():
            wanted = _of(indices, [found[place][1] for place in own], own)
            for place, sample in zip(own, self.parts[part].__getitems__(wanted), strict=True):
                samples[place] = sample
        return samples

    def _of_sample(self, name: str) -> Callable[[int], Any]:
        """Return a method of one sample that asks the part that has it."""

        def ask(index: int) -> Any:
            part, within = self._find(index)
            return getattr(self.parts[part], name)(within)

        return ask

    def _tell(self, name: str) -> Callable[..., None]:
        """Return a method that calls that of each part that has it."""

        def tell(*args: Any) -> None:
            for part in self.parts:
                if _offers(part, name):
                    getattr(part, name)(*args)

        return tell

    def _expect(self) -> Callable[[Iterable[int]], None]:
        """Return the method that says which samples will be read."""

        def expect(indices: Iterable[int]) -> None:
            own: list[list[int]] = [[] for _ in self.parts]
            for index in indices:
                part, within = self._find(index)
                own[part].append(within)
            for part, wanted in zip(self.parts, own, strict=True):
                if hasattr(part, "expect"):
                    part.expect(wanted)

        return expect

    def _total(self) -> dict[str, float]:
        """Return the sum of what reading has cost in each part."""
        totals: defaultdict[str, float] = defaultdict(float)
        for part in self.parts:
            for name, value in (part.stats() if _offers(part, "stats") else {}).items():
                totals[name] += value
        return dict(totals)

    def _merged(self, name: str) -> dict[str, Any]:
        """Return what the parts hold by name, together."""
        return {key: value for part in self.parts if _offers(part, name) for key, value in getattr(part, name).items()}

    def _targets_of_samples(self) -> np.ndarray:
        """Return the class number of each sample."""
        raise NotImplementedError

    def _lengths_of_shards(self) -> list[int]:
        """Return the lengths of the runs of samples that lie in one shard."""
        raise NotImplementedError


class OpenedSubset(Opened):
    """A `Subset` of torch that is looked into.

    Args:
        wrapper: the subset.
        data: the data set inside.
    """

    def __init__(self, wrapper: Any, data: Any) -> None:
        super().__init__(wrapper, [data])

    def _find(self, index: int) -> tuple[int, int]:
        """Return 0, and the index in the data set inside."""
        return 0, int(self.wrapper.indices[index])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or name in ("wrapper", "parts"):
                raise
            return getattr(self.parts[0], name)

    def _targets_of_samples(self) -> np.ndarray:
        """Return the class number of each sample."""
        return np.asarray(self.parts[0].targets)[np.asarray(self.wrapper.indices, np.int64)]

    def _lengths_of_shards(self) -> list[int]:
        """Return the lengths of the runs of samples that lie in one shard."""
        ends = np.cumsum(self.parts[0].shard_lengths)
        shards = np.searchsorted(ends, np.asarray(self.wrapper.indices, np.int64) % max(1, ends[-1]), side="right")
        cuts = np.flatnonzero(np.diff(shards)) + 1
        return np.diff([0, *cuts, len(shards)]).tolist() if len(shards) else []


class OpenedOwn(Opened):
    """A data set of the user that holds others: the samples are its own, and all that it offers.

    Args:
        wrapper: the user's.
        parts: the data sets inside.

    Raises:
        ConfigError: the wrapper hides how the batches of a data set inside are made.
    """

    def __init__(self, wrapper: Any, parts: Sequence[Any]) -> None:
        super().__init__(wrapper, parts)
        self.thread_safe = is_thread_safe(wrapper)
        preparing = [part for part in self.parts if hasattr(part, "prepare")]
        self.preparing: Any = preparing[0] if len(preparing) == 1 and _is_ours(preparing[0].prepare) else None
        _refuse_hidden(wrapper, self.parts, ("collate",) if self.preparing is not None else _MADE_BY)

    def __getitem__(self, index: int) -> Any:
        return self.wrapper[index]

    def __getattr__(self, name: str) -> Any:
        if name in ("wrapper", "parts", "preparing"):  # while it is unpickled
            raise AttributeError(name)
        if hasattr(self.wrapper, name):
            return getattr(self.wrapper, name)
        if name == "prepare" and self.preparing is not None:
            return self._prepare
        if name in _TOLD and any(_offers(part, name) for part in self.parts):
            return _SUMMED[name](self)
        if name == "max_bad_fraction" and (having := [part for part in self.parts if hasattr(part, name)]):
            return min(part.max_bad_fraction for part in having)
        raise AttributeError(f"{type(self.wrapper).__name__} has no {name}")

    def _prepare(self, batch: Any) -> Any:
        """Prepare a batch as the data set inside does.

        Raises:
            ConfigError: it can't, as the wrapper makes other samples.
        """
        try:
            return self.preparing.prepare(batch)
        except Exception as error:
            reason = f"can't take its batches ({type(error).__name__}: {error})"
            raise ConfigError(_hidden(self.wrapper, self.preparing, "prepare", reason)) from error


class OpenedOther(Opened):
    """A data set of the user with attributes that mean something else there than to the training loop.

    Args:
        wrapper: the user's.
        others: names of these attributes.
    """

    def __init__(self, wrapper: Any, others: Sequence[str]) -> None:
        super().__init__(wrapper, [])
        self.others, self.thread_safe = tuple(others), is_thread_safe(wrapper)

    def __getitem__(self, index: int) -> Any:
        return self.wrapper[index]

    def __getattr__(self, name: str) -> Any:
        if name in ("wrapper", "parts", "others") or name in self.others:
            raise AttributeError(name)
        return getattr(self.wrapper, name)


class OpenedConcat(Opened):
    """A `ConcatDataset` of torch that is looked into.

    Args:
        wrapper: the concatenation.
        parts: the data sets inside.
    """

    def __init__(self, wrapper: Any, parts: Sequence[Any]) -> None:
        super().__init__(wrapper, parts)
        for name in ("prepare", "collate"):
            if not hasattr(wrapper, name) and not self._is_common(name):
                names = ", ".join(dict.fromkeys(type(inside(part)).__name__ for part in self.parts))
                raise ConfigError(
                    f"the parts of this ConcatDataset ({names}) make their batches by a {name}() of their own, and a "
                    f"batch has samples of several: give all parts the same settings, or set {name} on the "
                    "ConcatDataset"
                )

    def _is_common(self, name: str) -> bool:
        """Return whether all parts prepare or collate a batch alike, as far as can be told."""
        having = [hasattr(part, name) for part in self.parts]
        return not any(having) or (all(having) and len({_recipe(part, name) for part in self.parts}) == 1)

    def _find(self, index: int) -> tuple[int, int]:
        """Return the number of the part that has a sample, and its index there."""
        ends = self.wrapper.cumulative_sizes
        index = range(len(self))[index]
        part = bisect_right(ends, index)
        return part, index - (ends[part - 1] if part else 0)

    def _targets_of_samples(self) -> np.ndarray:
        """Return the class number of each sample."""
        return np.concatenate([np.asarray(part.targets) for part in self.parts])

    def _lengths_of_shards(self) -> list[int]:
        """Return the lengths of the shards of all parts."""
        return [length for part in self.parts for length in part.shard_lengths]


_COMBINED: dict[str, Callable[[Any], Any]] = {
    "__getitems__": lambda data: data._samples,
    "sample_id": lambda data: data._of_sample("sample_id"),
    "error_of": lambda data: data._of_sample("error_of"),
    "targets": lambda data: data._targets_of_samples(),
    "shard_lengths": lambda data: data._lengths_of_shards(),
    "collate": lambda data: data.parts[0].collate,
    "prepare": lambda data: data.parts[0].prepare,
}
"""What all parts have to offer."""
_SUMMED: dict[str, Callable[[Any], Any]] = {
    "set_epoch": lambda data: data._tell("set_epoch"),
    "share": lambda data: data._tell("share"),
    "close": lambda data: data._tell("close"),
    "expect": lambda data: data._expect(),
    "stats": lambda data: data._total,
    "bad": lambda data: data._merged("bad"),
    "bad_counts": lambda data: data._merged("bad_counts"),
    "skipped": lambda data: data._merged("skipped"),
}
"""What counts even if only some parts offer it."""
_TOLD = ("set_epoch", "share", "close", "stats", "bad", "bad_counts", "skipped")
"""What has to do with no sample in particular, so that it passes a wrapper of the user."""
_MADE_BY = ("prepare", "collate")
"""What makes a batch of samples."""
_LIBRARIES = ("datasets", "webdataset", "ddp_hydra")
"""Packages whose data sets are known."""
_SAME = (
    "classes",
    "num_classes",
    "class_to_idx",
    "labelled",
    "max_bad_fraction",
    "columns",
    "features",
    "scaling",
    "feature_widths",
)
"""What must be alike in all parts."""


_ARGUMENTS = {
    "collate": 1,
    "prepare": 1,
    "sample_id": 1,
    "error_of": 1,
    "set_epoch": 1,
    "expect": 1,
    "share": 1,
    "stats": 0,
    "close": 0,
    "described": 0,
    "check_classes": 2,
}
"""Methods that the training loop calls, and with how many arguments."""
_KINDS: dict[str, Any] = {
    "bad": Mapping,
    "bad_counts": Mapping,
    "skipped": Mapping,
    "max_bad_fraction": (int, float, type(None)),
    "labelled": bool,
    "classes": (int, Iterable, type(None)),
    "num_classes": (SupportsInt, type(None)),
}
"""Values that the training loop reads."""


def _offers(part: Any, name: str) -> bool:
    """Return whether a data set has a method, or samples by name, and not something of its own under this name."""
    found = getattr(part, name, None)
    return isinstance(found, Mapping) if name in ("bad", "bad_counts", "skipped") else callable(found)


def _other_meanings(data: Any) -> list[str]:
    """Return the attributes of a map-style data set that can't be what the training loop would take them for."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, IterableDataset):
        return []
    names = [*_ARGUMENTS, *_KINDS]
    return [name for name in names if hasattr(data, name) and not _is_meant(getattr(data, name), name)]


def _is_meant(found: Any, name: str) -> bool:
    """Return whether an attribute of that name can be what the training loop takes it for."""
    if name in _KINDS:
        return isinstance(found, _KINDS[name])
    if not callable(found):
        return False
    try:
        inspect.signature(found).bind(*range(_ARGUMENTS[name]))
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        return True
    return True


def _is_ours(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("ddp_hydra.")


def _refuse_hidden(wrapper: Any, parts: Sequence[Any], names: Sequence[str]) -> None:
    """Refuse a wrapper of the user without a method by which a data set inside makes batches.

    Args:
        wrapper: the user's.
        parts: the data sets inside.
        names: of the methods.

    Raises:
        ConfigError: it has no such method.
    """
    for name in names:
        for part in parts:
            is_torchs = name == "collate" and _is_ours(getattr(part, name, None))  # does what torch's does
            if _offers(part, name) and not hasattr(wrapper, name) and not is_torchs:
                raise ConfigError(_hidden(wrapper, part, name, "is hidden by it"))


def _hidden(wrapper: Any, part: Any, name: str, what: str) -> str:
    own, argument = type(wrapper).__name__, {"prepare": "batch", "collate": "samples"}[name]
    attribute = next((key for key, value in vars(wrapper).items() if value is inside(part)), "dataset")
    is_ready = "`return batch`, if its samples are ready for the model"
    return (
        f"{own} holds {type(inside(part)).__name__}, whose {name}() {what}: define it in {own}, as `def {name}(self, "
        f"{argument}): return self.{attribute}.{name}({argument})`, or with "
        f"{is_ready if name == 'prepare' else '`return default_collate(samples)`, of torch.utils.data'}"
    )


def _recipe(part: Any, name: str) -> tuple[Any, ...]:
    """Return what tells the way in which a part makes its batches from another way."""
    method = getattr(part, name)
    numbers = tuple((key, value) for key in ("mean", "std") if isinstance(value := getattr(part, key, None), tuple))
    return getattr(method, "__func__", method), *numbers


def _of(indices: Sequence[int], wanted: list[int], places: list[int] | None = None) -> Any:
    """Return indices in a part; those of a run keep the positions of their samples."""
    if not isinstance(indices, Indices):
        return wanted
    return indices.of(wanted, None if places is None else [indices.positions[place] for place in places])


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (list(a) == list(b) if isinstance(a, (list, tuple, np.ndarray)) else bool(a == b))
