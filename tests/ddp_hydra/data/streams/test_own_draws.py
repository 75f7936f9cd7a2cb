"""What a loader or a pipeline draws from generators of its own depends on seed and epoch, in a new process, too."""

from __future__ import annotations

import gc
import random
from functools import partial
from typing import Any

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler

from ddp_hydra.data.streams import split
from ddp_hydra.data.wrappers import look_into
from ddp_hydra.errors import ConfigError

N = 24
URLS = [f"shard-{number}" for number in range(6)]


class Noise(IterableDataset):
    def __iter__(self) -> Any:
        return (torch.rand(()).item() + random.random() for _ in range(4))


class Holder(IterableDataset):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def loader(**arguments: Any) -> DataLoader:
    return DataLoader(**{"dataset": range(N), "batch_size": None, **arguments})


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def workers(**arguments: Any) -> DataLoader:
    return loader(num_workers=2, persistent_workers=True, **arguments)


def numbers(*stages: Any) -> wds.DataPipeline:
    return wds.DataPipeline(partial(iter, range(N)), wds.split_by_node, *stages)


def shards(**arguments: Any) -> Any:
    found = wds.WebDataset(URLS, empty_check=False, nodesplitter=None, **arguments)
    del found.pipeline[-2:]  # they read the shards
    found.pipeline = [stage for stage in found.pipeline if not isinstance(stage, wds.cache.StreamingOpen)]
    return found


def mixed() -> Any:
    data = wds.RandomMix([numbers(wds.shuffle(8)), numbers(wds.rsample(0.5))])
    return wds.DataPipeline(data, wds.shuffle(4))


def passes(make: Any, epochs: tuple[int, ...], seed: int = 3) -> list[list[Any]]:
    """Return the epochs that one process reads, where something else has drawn before."""
    random.seed(len(epochs))
    part = split(look_into(make()), 0, 1, seed=seed)
    found = []
    for epoch in epochs:
        part.open(epoch)
        found.append(list(part.samples))
    return found


WAYS = {
    "persistent workers": partial(workers, shuffle=True),
    "draws of persistent workers": lambda: workers(dataset=Noise()),
    "generator": lambda: loader(shuffle=True, generator=generator()),
    "generator of workers": lambda: workers(dataset=Noise(), generator=generator()),
    "generator of a sampler": lambda: loader(sampler=RandomSampler(range(N), generator=generator())),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([1.0] * N, N, generator=generator())),
    "in a set of the user": lambda: Holder(loader(shuffle=True, generator=generator())),
    "shuffle": lambda: numbers(wds.shuffle(8)),
    "shuffle, its arguments by place": lambda: numbers(wds.shuffle(8, 8, None)),
    "shuffle in a set of the user": lambda: Holder(numbers(wds.shuffle(8))),
    "shuffle in a loader": lambda: loader(dataset=numbers(wds.shuffle(8)), num_workers=1),
    "shuffle behind a loader": lambda: wds.WebLoader(numbers(wds.shuffle(8)), batch_size=None).shuffle(8),
    "rng": lambda: numbers(wds.shuffle(8, rng=random.Random(2))),
    "detshuffle": lambda: numbers(wds.detshuffle(8)),
    "rsample": lambda: numbers(wds.rsample(0.5)),
    "mixed": mixed,
    "resampled": lambda: wds.DataPipeline(wds.ResampledShards(URLS)).with_epoch(N),
    "resampled, deterministic": lambda: wds.DataPipeline(wds.ResampledShards(URLS, deterministic=True, nshards=N)),
    "detshuffle of shards": lambda: shards(shardshuffle=6, detshuffle=True, seed=1),
}


@pytest.mark.medium
@pytest.mark.parametrize("way", WAYS)
def test_a_new_process_reads_an_epoch_as_one_that_read_others_before(way):
    make = WAYS[way]
    first, second = passes(make, (0, 1))
    assert first != second
    assert passes(make, (1, 1, 0)) == [second, second, first]
    assert passes(make, (0,), seed=4) != [first] or "detshuffle" in way or "resampled, " in way  # they have a seed
    gc.collect()


@pytest.mark.parametrize("shuffled", [{"seed": 5}, {"rng": None, "seed": 5}])
def test_a_seed_of_a_shuffle_stays(shuffled):
    first, second = passes(lambda: numbers(wds.shuffle(8, **shuffled)), (0, 1))
    assert first == second != list(range(N))
    assert passes(lambda: shards(shardshuffle=6, seed=1), (0,)) == passes(lambda: shards(shardshuffle=6, seed=1), (1,))


def test_shards_that_would_be_shuffled_by_the_time_are_shuffled_by_the_seed_of_the_run():
    def make() -> Any:
        return wds.DataPipeline(wds.SimpleShardList(URLS, seed=True))

    first = passes(make, (0,))
    assert first == passes(make, (1,)) != passes(make, (0,), seed=4)


def test_the_seed_of_a_users_generator_counts():
    orders = [passes(lambda seed=seed: loader(shuffle=True, generator=generator(seed)), (0,)) for seed in (1, 2)]
    assert orders[0] != orders[1]


class LoaderWithState(DataLoader):
    """Begins a pass when it is asked for its state, as torchdata's does; the next `iter` goes on with it."""

    begun: Any = None

    def __iter__(self) -> Any:
        begun, self.begun = self.begun, None
        return begun or iter(list(super().__iter__()))

    def state_dict(self) -> dict[str, Any]:
        self.begun = self.begun or iter(self)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_loader_is_asked_for_its_state_once_the_epoch_has_begun():
    def order(epoch: int) -> list[Any]:
        torch.rand(1)
        part = split(LoaderWithState(range(N), batch_size=None, shuffle=True), 0, 1, seed=1)
        assert part.by_state
        part.open(epoch)
        return list(part.samples)

    assert order(1) == order(1) != order(0)


class LoaderOfAUser(DataLoader):
    pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Holder(workers(shuffle=True)), r"persistent_workers=True of a DataLoader .* persistent_workers=False"),
        (lambda: Holder(workers()), ""),
        (lambda: LoaderOfAUser(range(N), batch_size=None, num_workers=1, persistent_workers=True), ""),
        (
            lambda: LoaderOfAUser(range(N), batch_size=None, num_workers=1, persistent_workers=True, shuffle=True),
            "of a LoaderOfAUser .*persistent_workers=False",
        ),
        (lambda: loader(num_workers=2, in_order=False), "leave in_order out"),
        (lambda: loader(num_workers=1, in_order=False), ""),
        (lambda: Holder(loader(sampler=SequentialSampler(range(N)))), ""),
    ],
)
def test_loaders_whose_order_no_seed_decides_are_refused(make, said):
    if not said:
        assert passes(make, (0,)) == [list(range(N))]
        return
    with pytest.raises(ConfigError, match=said):
        split(look_into(make()), 0, 1, seed=3)
