"""Looks into data sets that hold others: what the inner sets offer counts.

torch's `Subset`, which `random_split` makes, and `ConcatDataset` have neither the classes nor the normalisation of the
data sets inside. A wrapper of the user makes samples of its own, but what the data sets inside are told and what they
count must not stop at it.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from types import FunctionType
from typing import Any, SupportsInt

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset, default_convert

from ddp_hydra.data.draws import Indices
from ddp_hydra.data.mix import Mixture
from ddp_hydra.data.threads import is_thread_safe
from ddp_hydra.errors import ConfigError

_COUNTED = ("bad", "bad_counts", "skipped")
_TOLD = ("set_epoch", "share", "close", "stats", "check_model", *_COUNTED)
"""What has to do with no sample in particular, so that it passes a wrapper of the user, from any part."""
_MADE_BY = ("prepare", "collate")
"""What makes a batch of samples."""
_SAME = ("classes", "num_classes", "class_to_idx", "labelled", "max_bad_fraction", "columns", "features", "scaling",
         "feature_widths")  # fmt: skip
"""What must be alike in all parts."""
_LIBRARIES = ("datasets", "webdataset", "ddp_hydra")
"""Packages whose data sets are known."""
_ARGUMENTS = {
    **dict.fromkeys(("stats", "close", "described"), 0),
    **dict.fromkeys(("collate", "prepare", "sample_id", "error_of", "set_epoch", "expect", "share", "check_model"), 1),
    "check_classes": 2,
}
"""Methods that the training loop calls, and with how many arguments."""
_ARGUMENTS_OF_STREAMS = {**_ARGUMENTS, "of_rank": 2, "state_dict": 0, "load_state_dict": 1}
COUNTS = ("samples", "bytes", "requests", "retries", "cache_hits", "cache_misses", "bad_samples")
"""Numbers of `stats()` that the training loop reads."""
_KINDS: dict[str, Any] = {
    **dict.fromkeys(_COUNTED, Mapping),
    "max_bad_fraction": (int, float, type(None)),
    "labelled": bool,
    "classes": (int, Iterable, type(None)),
    "num_classes": (SupportsInt, type(None)),
    "mixture": (Mixture, type(None)),
}
"""Values that the training loop reads."""


def look_into(data: Any, around: tuple[Any, ...] = ()) -> Any:
    methods = [getattr(type(data), name, None) for name in ("__getitem__", "__getitems__")]
    if isinstance(data, Subset) and methods == [Subset.__getitem__, Subset.__getitems__]:
        return SubsetView(data, [look_into(data.dataset, (*around, data))])
    if isinstance(data, ConcatDataset) and methods == [ConcatDataset.__getitem__, None]:
        return ConcatView(data, [look_into(part, (*around, data)) for part in data.datasets])
    if isinstance(data, DataLoader) and type(data).__module__.startswith(("torch.", "torchdata.")):
        return LoaderView(data, [look_into(data.dataset, (*around, data))])
    parts, others = inner_sets(data, around), _other_meanings(data)
    if is_stream(data):
        _refuse_hidden(data, parts, _MADE_BY)
        return UserStreamView(data, (), others) if others else data
    return UserView(data, parts, others) if parts or others else data


def is_stream(data: Any) -> bool:
    # Return whether a data set is iterable and not map-style: an `IterableDataset`, or without `__getitem__`.
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def inner_sets(data: Any, around: tuple[Any, ...] = ()) -> list[Any]:
    if _is_known(data):
        return []
    values = list(getattr(data, "__dict__", {}).values())
    for value in tuple(values):
        values += value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    outer = {id(one) for one in (*around, data)}
    found = [value for value in values if isinstance(value, Dataset) or _is_told_epochs(value)]
    parts = [look_into(value, (*around, data)) for value in found if id(value) not in outer]
    return [p for p in parts if hasattr(p, "mixture") or any(_offers(p, name) for name in (*_TOLD, *_MADE_BY))]


def _is_told_epochs(value: Any) -> bool:
    if callable(getattr(type(value), "set_epoch", None)):
        return True
    try:  # a wrapper may pass names on to the set inside; a database's handle and a mock take any name
        is_method = not isinstance(value, type) and callable(getattr(value, "set_epoch", None))
        return is_method and not hasattr(value, "no_such_attribute")
    except Exception:  # a dict of the user's, whose keys are its attributes, raises KeyError
        return False


def unwrapped(data: Any) -> Any:
    return data.wrapper if isinstance(data, View) else data


def name_of(data: Any) -> str:
    return type(unwrapped(data)).__name__


def own_getitems(data: Any) -> bool:
    if isinstance(data, UserView):
        return own_getitems(data.wrapper)
    if isinstance(data, View):
        return all(map(own_getitems, data.parts))
    read = getattr(data, "__getitems__", None)
    return read is not None and getattr(read, "__func__", None) is not StackDataset.__getitems__


class View(Dataset):
    """A wrapper that is looked into: what it was given itself goes before what is inside.

    Args:
        wrapper: of torch, or the user's.
        parts: the data sets inside.
        others: its attributes that are not asked: they mean something else there than to the training loop; of torch's
            wrappers, `__getitems__` calls the data set's as it was built.
    """

    def __init__(self, wrapper: Any, parts: Sequence[Any], others: Sequence[str] = ("__getitems__",)) -> None:
        self.wrapper, self.parts, self.others = wrapper, list(parts), tuple(others)
        self.thread_safe = "collate" not in vars(wrapper) and all(map(is_thread_safe, parts))

    def __len__(self) -> int:
        return len(self.wrapper)

    def __getitem__(self, index: int) -> Any:
        part, within = self._find(index)
        return self.parts[part][within]

    def __getattr__(self, name: str) -> Any:
        if name in ("wrapper", "parts", "others", "preparing"):  # while it is unpickled
            raise AttributeError(name)
        if name not in self.others and hasattr(self.wrapper, name):
            return getattr(self.wrapper, name)
        return self._inside(name)

    def _find(self, index: int) -> tuple[int, int]:
        raise NotImplementedError

    def _inside(self, name: str) -> Any:
        offering = [part for part in self.parts if hasattr(part, name)]
        if offering and name in _TOLD:
            return self._together(name)
        if offering and name == "expect":
            return self._expect
        if offering and len(offering) == len(self.parts):
            if name == "__getitems__":
                return self._read
            if name in ("sample_id", "error_of"):
                return partial(self._ask, name)
            if name in _MADE_BY:
                return getattr(self.parts[0], name)
            if name in ("targets", "shard_lengths", "mixture"):
                return getattr(self, f"_{name}")()
            first, *others = [getattr(part, name) for part in self.parts]
            if name in _SAME and all(_equal(first, other) for other in others):
                return first
        raise AttributeError(f"{type(self.wrapper).__name__} and what is inside have no common {name}")

    def _together(self, name: str) -> Any:
        offering = [part for part in self.parts if _offers(part, name)]
        if name in _COUNTED:
            return {key: value for part in offering for key, value in getattr(part, name).items()}

        def call(*args: Any) -> Any:
            found = [getattr(part, name)(*args) for part in offering]
            if name != "stats":
                return None
            totals: Counter[str] = Counter()
            for counts in found:
                totals.update(counts)
            return dict(totals)

        return call

    def _ask(self, name: str, index: int) -> Any:
        part, within = self._find(index)
        return getattr(self.parts[part], name)(within)

    def _expect(self, indices: Iterable[int]) -> None:
        own: list[list[int]] = [[] for _ in self.parts]
        for index in indices:
            part, within = self._find(index)
            own[part].append(within)
        for part, wanted in zip(self.parts, own, strict=True):
            if hasattr(part, "expect"):
                part.expect(wanted)

    def _read(self, indices: Sequence[int]) -> Any:
        found = [self._find(index) for index in indices]
        places: defaultdict[int, list[int]] = defaultdict(list)
        for place, (part, _) in enumerate(found):
            places[part].append(place)
        samples: list[Any] = [None] * len(found)
        for part, own in places.items():
            wanted = [found[place][1] for place in own]
            if isinstance(indices, Indices):
                wanted = indices.of(wanted, [indices.positions[place] for place in own])
            read = self.parts[part].__getitems__(wanted)
            if len(places) == 1:
                return read  # it may be made in place
            for place, sample in zip(own, read, strict=True):
                samples[place] = sample
        return samples


class SubsetView(View):
    """A `Subset` of torch that is looked into: it offers all that its one part has."""

    def _find(self, index: int) -> tuple[int, int]:
        return 0, int(self.wrapper.indices[index])

    def _inside(self, name: str) -> Any:
        try:
            return super()._inside(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(self.parts[0], name)

    def _targets(self) -> np.ndarray | None:
        if self.parts[0].targets is None:
            return None
        return np.asarray(self.parts[0].targets)[np.asarray(self.wrapper.indices, np.int64)]

    def _mixture(self) -> Any:
        return self.parts[0].mixture.within(self.wrapper.indices)

    def _shard_lengths(self) -> list[int]:
        ends = np.cumsum(self.parts[0].shard_lengths)
        shards = np.searchsorted(ends, np.asarray(self.wrapper.indices, np.int64) % max(1, ends[-1]), side="right")
        cuts = np.flatnonzero(np.diff(shards)) + 1
        return np.diff([0, *cuts, len(shards)]).tolist() if len(shards) else []


class ConcatView(View):
    """A `ConcatDataset` of torch that is looked into."""

    def __init__(self, wrapper: Any, parts: Sequence[Any]) -> None:
        super().__init__(wrapper, parts)
        _refuse_hidden_weights(wrapper, parts)
        _refuse_other_features(wrapper, parts)
        for name in _MADE_BY:
            having = [part for part in self.parts if hasattr(part, name)]
            is_common = len(having) in (0, len(parts)) and _are_alike([_recipe(part, name) for part in having])
            if not is_common and not hasattr(wrapper, name):
                names = ", ".join(dict.fromkeys(name_of(part) for part in self.parts))
                raise ConfigError(
                    f"the parts of this ConcatDataset ({names}) make batches by a {name}() of their own: give the same "
                    f"settings, or set {name} on the ConcatDataset"
                )

    def _find(self, index: int) -> tuple[int, int]:
        ends = self.wrapper.cumulative_sizes
        index = range(len(self))[index]
        part = bisect_right(ends, index)
        return part, index - (ends[part - 1] if part else 0)

    def _targets(self) -> np.ndarray | None:
        each = [part.targets for part in self.parts]
        return None if any(targets is None for targets in each) else np.concatenate(list(map(np.asarray, each)))

    def _shard_lengths(self) -> list[int]:
        return [length for part in self.parts for length in part.shard_lengths]


class LoaderView(View, IterableDataset):
    """A `DataLoader` of the user that gives samples one by one: it has the classes and batches of its data set."""

    def __init__(self, wrapper: Any, parts: Sequence[Any]) -> None:
        super().__init__(wrapper, parts)
        self.thread_safe = False  # it may draw an order

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wrapper)

    def _inside(self, name: str) -> Any:
        is_changed = self.wrapper.collate_fn is not default_convert
        counts = () if self.wrapper.num_workers else ("stats", *_COUNTED)  # what copies in its workers count is lost
        if name in (*_SAME, *(() if is_changed else _MADE_BY), *counts, "close"):
            return getattr(self.parts[0], name)
        raise AttributeError(f"DataLoader has no {name}")


class UserView(View):
    """A data set of the user that holds others, or uses names of ours for something else: the samples are its own."""

    def __init__(self, wrapper: Any, parts: Sequence[Any], others: Sequence[str]) -> None:
        super().__init__(wrapper, parts, others)
        self.thread_safe = is_thread_safe(wrapper)
        preparing = [part for part in self.parts if hasattr(part, "prepare")]
        self.preparing: Any = preparing[0] if len(preparing) == 1 and _is_ours(preparing[0].prepare) else None
        _refuse_hidden_weights(wrapper, self.parts)
        _refuse_hidden(wrapper, self.parts, ("collate",) if self.preparing is not None else _MADE_BY)

    def __getitem__(self, index: int) -> Any:
        return self.wrapper[index]

    def _inside(self, name: str) -> Any:
        if name == "prepare" and self.preparing is not None:
            return self._prepare
        if name in _TOLD and any(_offers(part, name) for part in self.parts):
            return self._together(name)
        if name == "max_bad_fraction" and (having := [part for part in self.parts if hasattr(part, name)]):
            return min(part.max_bad_fraction for part in having)
        raise AttributeError(f"{type(self.wrapper).__name__} has no {name}")

    def _prepare(self, batch: Any) -> Any:
        try:
            return self.preparing.prepare(batch)
        except Exception as error:
            reason = f"can't take its batches ({type(error).__name__}: {error})"
            raise ConfigError(_hidden(self.wrapper, self.preparing, "prepare", reason)) from error


class UserStreamView(UserView, IterableDataset):
    """An iterable data set of the user that uses names of ours for something else."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wrapper)


def _is_known(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] in _LIBRARIES


def _offers(part: Any, name: str) -> bool:
    found = getattr(part, name, None)
    return isinstance(found, Mapping) if name in _COUNTED else callable(found)


def _other_meanings(data: Any) -> list[str]:
    # Return the attributes of a data set that can't be what the training loop would take them for.
    if _is_known(data):
        return []
    methods = _ARGUMENTS_OF_STREAMS if is_stream(data) else _ARGUMENTS
    wrong = [name for name, kind in _KINDS.items() if hasattr(data, name) and not isinstance(getattr(data, name), kind)]
    wrong += [name for name in methods if hasattr(data, name) and not _takes(getattr(data, name), methods[name])]
    return wrong + (["stats"] if hasattr(data, "stats") and "stats" not in wrong and not _counts(data.stats) else [])


def _counts(stats: Callable[[], Any]) -> bool:
    try:
        found = stats()
    except Exception:  # it is not ready to be called
        return False
    is_numbers = isinstance(found, Mapping) and all(isinstance(value, Real) for value in found.values())
    return is_numbers and (not found or not found.keys().isdisjoint(COUNTS))


def _takes(method: Any, n_arguments: int) -> bool:
    try:
        inspect.signature(method).bind(*range(n_arguments))
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        return True
    return True


def _is_ours(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("ddp_hydra.")


def _refuse_hidden(wrapper: Any, parts: Sequence[Any], names: Sequence[str]) -> None:
    for name in names:
        for part in parts:
            is_torchs = name == "collate" and _is_ours(getattr(part, name, None))  # does what torch's does
            if _offers(part, name) and not hasattr(wrapper, name) and not is_torchs:
                raise ConfigError(_hidden(wrapper, part, name, "is hidden by it"))


def _refuse_hidden_weights(wrapper: Any, parts: Sequence[Any]) -> None:
    if any(hasattr(part, "mixture") for part in parts) and not hasattr(wrapper, "mixture"):
        own = type(wrapper).__name__
        raise ConfigError(
            f"{own} holds a Mix, whose weights are hidden by it: wrap the sets of the Mix instead, or give {own} the "
            "attribute mixture of the Mix, if its indices mean the same samples"
        )


def _refuse_other_features(wrapper: Any, parts: Sequence[Any]) -> None:
    found = dict.fromkeys(names for part in parts if (names := _features(part)))
    if len(found) > 1:
        first, other = (f"[{','.join(names)}]" for names in [*found][:2])
        raise ConfigError(
            f"the parts of this {type(wrapper).__name__} have the features {first} and {other}, which would stand in "
            f"one another's places: give features={first} to each part (in a mixture data.sets.<name>.features={first})"
        )


def _features(part: Any) -> tuple[str, ...]:
    names = getattr(part, "features", ())
    are_columns = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return tuple(names) if are_columns and len(names) != len(part) else ()  # else it may be a list of samples


def _hidden(wrapper: Any, part: Any, name: str, what: str) -> str:
    own, argument = type(wrapper).__name__, {"prepare": "batch", "collate": "samples"}[name]
    attribute = next((key for key, value in vars(wrapper).items() if value is unwrapped(part)), "dataset")
    is_ready = "`return batch`, if its samples are ready for the model"
    return (
        f"{own} holds {name_of(part)}, whose {name}() {what}: define it in {own}, as `def {name}(self, "
        f"{argument}): return self.{attribute}.{name}({argument})`, or with "
        f"{is_ready if name == 'prepare' else '`return default_collate(samples)`, of torch.utils.data'}"
    )


def _recipe(part: Any, name: str) -> tuple[Any, ...]:
    method = getattr(part, name)
    numbers = tuple((key, value) for key in ("mean", "std") if isinstance(value := getattr(part, key, None), tuple))
    return _settings(getattr(method, "__func__", method)), *numbers


def _settings(method: Any) -> Any:
    # Return what two functions have in common that do the same: a config makes partials and collators anew.
    if isinstance(method, partial):
        return partial, _settings(method.func), method.args, method.keywords
    is_plain = type(method).__mro__ == (type(method), object)  # else settings may lie outside of its attributes
    is_of_user = is_plain and isinstance(type(method).__call__, FunctionType) and "__slots__" not in vars(type(method))
    return (type(method), vars(method)) if is_of_user else method


def _are_alike(recipes: Sequence[Any]) -> bool:
    try:
        return all(recipe == recipes[0] for recipe in recipes)
    except Exception:  # arrays and tensors in them
        return False


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (list(a) == list(b) if isinstance(a, (list, tuple, np.ndarray)) else bool(a == b))
