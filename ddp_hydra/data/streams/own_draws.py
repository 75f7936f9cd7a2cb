"""Seeds the generators that torch's loaders and webdataset's stages have of their own, by the run's seed and the epoch.

They would go on from epoch to epoch, or begin by the time, so a new process would read an epoch in another order.
"""

from __future__ import annotations

import random
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from ddp_hydra.data import draws
from ddp_hydra.data.wrappers import unwrapped
from ddp_hydra.errors import ConfigError

_FIRST_SEEDS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""What the user seeded a generator by."""
MOST_PARTS = 1000
"""A longer list has no stages but samples, or their names."""
_SHUFFLE_ARGUMENTS = ("bufsize", "initial", "rng", "seed", "handler")


def parts_of(data: Any) -> list[Any]:
    # Return the data set, and the sets, loaders, samplers and stages inside.
    found: dict[int, Any] = {}
    pending = [unwrapped(data)]
    while pending:
        part = pending.pop()
        if id(part) in found:
            continue
        found[id(part)] = part
        values = list(getattr(part, "__dict__", {}).values())
        for value in tuple(values):
            values += value if isinstance(value, (list, tuple)) and len(value) <= MOST_PARTS else ()
        pending += [v for v in values if isinstance(v, (Dataset, DataLoader, Sampler)) or _is_stage(v)]
    parts = list(found.values())
    for part in parts:
        if isinstance(part, DataLoader):
            _refuse_other_orders(part, is_nested=part is not parts[0])
    return parts


def seed_parts(parts: list[Any], epoch: int, seed: int) -> None:
    for part in parts:
        if isinstance(part, (DataLoader, Sampler)):
            _seed(getattr(part, "generator", None), epoch, seed)
        elif _is_stage(part):
            _seed_stage(part, epoch, seed)


def new_pass(data: Any) -> Any:
    # Return what to iterate over. A DataLoader with persistent workers draws less in a second pass than in a first one,
    # and the generators of its workers go on; a copy has no workers yet.
    loader = unwrapped(data)
    return copy(loader) if type(loader) is DataLoader else data


def _is_stage(value: Any) -> bool:
    return type(value).__module__.startswith("webdataset.")


def _refuse_other_orders(loader: Any, is_nested: bool) -> None:
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise ConfigError(
            "DataLoader(in_order=False) gives samples as its workers are ready, so the ranks would read other orders "
            "and a resume other samples: leave in_order out"
        )
    is_copied = type(loader) is DataLoader and not is_nested
    # A loader of an IterableDataset takes the samples as they come.
    if isinstance(loader.dataset, IterableDataset) or isinstance(getattr(loader, "sampler", None), SequentialSampler):
        return
    if loader.num_workers and loader.persistent_workers and not is_copied and not hasattr(loader, "load_state_dict"):
        raise ConfigError(
            f"persistent_workers=True of a {type(loader).__name__} draws another order in the process that began with "
            "an epoch than in one that resumes there: give persistent_workers=False"
        )


def _seed(generator: Any, epoch: int, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        first = _FIRST_SEEDS.setdefault(generator, generator.initial_seed())
        generator.manual_seed(draws.mixed(first, seed, epoch))
    elif isinstance(generator, random.Random):
        first = _FIRST_SEEDS.setdefault(generator, hash(generator.getstate()[1]))
        generator.seed(draws.mixed(first, seed, epoch))


def _seed_stage(stage: Any, epoch: int, seed: int) -> None:
    function = getattr(getattr(stage, "f", None), "__name__", "")
    if function == "_shuffle":
        given = dict(zip(_SHUFFLE_ARGUMENTS, stage.args, strict=False)) | stage.kw
        if given.get("seed") is None and given.get("rng") is None:  # it would seed itself by the time
            given["rng"] = random.Random(0)  # noqa: S311
            stage.args, stage.kw = (), given
        _seed(given.get("rng"), epoch, seed)
    if hasattr(stage, "set_epoch"):
        draws.tell_epoch(stage, epoch, seed)
    elif isinstance(getattr(stage, "epoch", None), int):  # detshuffle and ResampledShards count their passes
        stage.epoch = epoch - 1
    elif isinstance(getattr(stage, "seed", None), float):  # SimpleShardList(seed=True) has taken the time
        stage.seed = draws.mixed(0, seed)
    if getattr(stage, "deterministic", True) is False:  # ResampledShards would seed itself by the time
        stage.deterministic, stage.seed = True, draws.mixed(stage.seed, seed)
