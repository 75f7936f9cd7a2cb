"""Sets that are mixed by weight: any split, resume and worker sees one sequence, in which each set has its share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, random_split

from ddp_hydra.data.loader import Loader
from ddp_hydra.data.mix import Mix, Mixture
from ddp_hydra.data.samplers import Distributed
from ddp_hydra.data.wrappers import look_into
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE
from ddp_hydra.training import build_data

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Gives its name, index, the epoch, and a number that it draws."""

    classes = ("a", "b")

    def __init__(self, name: int, n: int) -> None:
        self.name, self.n, self.epoch = name, n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.name, index, self.epoch, float(torch.rand(()))])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sample_id(self, index: int) -> str:
        return f"{self.name}-{index}"

    def described(self) -> str:
        return "noise"


def split_of(name: int, n: int) -> Any:
    """Return a part that is drawn when it is built."""
    return random_split(Noisy(name, n), [0.5, 0.5])[0]


def mixture(lengths: list[int], weights: list[float], **options: Any) -> Mixture:
    ends = np.cumsum([0, *lengths])
    places = {str(number): np.arange(*ends[number : number + 2]) for number in range(len(lengths))}
    return Mixture(places, dict(zip(places, weights, strict=True)), **options)


@st.composite
def mixtures(draw) -> Mixture:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    weights = [draw(st.floats(0.2, 5)) for _ in lengths]
    n = draw(st.sampled_from([None, 1, 17, 64]))
    return mixture(lengths, weights, exhausted=draw(st.sampled_from(["repeat", "stop"])), epoch_samples=n)


@given(mixtures(), st.integers(0, 3), st.booleans())
def test_each_set_has_its_share_of_any_samples_that_follow_each_other(mixed, epoch, shuffle):
    order = mixed.order(5, epoch, shuffle)
    assert len(order) == mixed.n_samples == sum(mixed.counts.values())
    total = sum(mixed.weights.values())
    for name, places in mixed.places.items():
        own = np.isin(order, places)
        assert own.sum() == mixed.counts[name]
        share = mixed.counts[name] / len(order)
        assert abs(share - mixed.weights[name] / total) * len(order) <= 1.01
        sums = np.concatenate([[0], np.cumsum(own)]) - share * np.arange(len(order) + 1)
        assert sums.max() - sums.min() <= 1 + len(mixed.places)


@given(mixtures(), st.booleans())
def test_a_set_is_read_to_its_end_before_it_is_read_again(mixed, shuffle):
    orders = [mixed.order(5, epoch, shuffle) for epoch in range(4)]
    for places in mixed.places.values():
        read = np.concatenate([order[np.isin(order, places)] for order in orders])
        for begin in range(0, len(read), len(places)):
            turn = read[begin : begin + len(places)]
            assert len(set(turn.tolist())) == len(turn)
            assert shuffle or turn.tolist() == places[: len(turn)].tolist()


def test_the_length_of_an_epoch():
    assert mixture([100, 10], [3, 1]).counts == {"0": 101, "1": 33}  # at least 100 of the first
    assert mixture([100, 10], [3, 1], exhausted="stop").counts == {"0": 30, "1": 10}
    assert mixture([100, 10], [3, 1], epoch_samples=7).counts == {"0": 5, "1": 2}
    first = mixture([100, 10], [3, 1]).order(0, 0, True)
    assert first.tolist() != mixture([100, 10], [3, 1]).order(0, 1, True).tolist()
    assert first.tolist() != mixture([100, 10], [3, 1]).order(1, 0, True).tolist()


@pytest.mark.medium
@given(
    mixtures(),
    st.integers(0, 2),
    st.sampled_from([(1, 12), (2, 6), (3, 4), (6, 2), (12, 1)]),
    st.sampled_from([(1, 12), (2, 6), (4, 1), (1, 1)]),
    st.integers(0, 3),
)
def test_any_ranks_and_batches_go_on_at_any_sample(mixed, epoch, first, then, done):
    def read(ranks: int, size: int, position: int = 0) -> list[int]:
        each = [Distributed(7, size, rank, ranks, seed=3, mixture=mixed, drop_last=False) for rank in range(ranks)]
        steps = zip(*(one.batches(epoch, position) for one in each), strict=True)
        return [index for step in steps for batch in step for index in batch]

    whole = mixed.order(3, epoch, True).tolist()
    assert read(*first)[: len(whole)] == whole
    position = min(done * 12, len(whole))
    assert read(*then, position)[: len(whole) - position] == whole[position:]


@pytest.mark.parametrize("unit", [1e-300, 1e-7, 1e-3, 1e9])
@pytest.mark.parametrize("weights", [[7, 13], [1, 10_000_000], [0.3, 0.7, 2]])
def test_the_ratio_of_the_weights_counts(weights, unit):
    lengths, few = [40, 20, 30][: len(weights)], {"epoch_samples": 1000}
    small = mixture(lengths, [weight * unit for weight in weights], **few)
    assert small.counts == mixture(lengths, weights, **few).counts
    assert small.counts["0"] == round(1000 * weights[0] / sum(weights))


def test_ordinary_weights_are_rounded_as_ever():
    assert mixture([1000, 1000], [1 / 3, 2 / 3]).counts == {"0": 1000, "1": 2000}
    assert mixture([10, 10], [1e-6, 1.9e-6], exhausted="stop").counts == {"0": 5, "1": 10}


def test_it_keeps_what_the_sets_offer_and_draws_by_position():
    parts = {"one": Noisy(1, 6), "two": Subset(Noisy(2, 9), [8, 1])}
    data = look_into(Mix(parts, {"one": 3}))
    data.set_epoch(4)
    assert (data.classes, data.sample_id(0), data.sample_id(6)) == (("a", "b"), "1-0", "2-8")
    sampler = Distributed(8, 8, seed=1, mixture=data.mixture)
    assert (len(sampler), sampler.n_samples) == (1, 8)
    (batch,) = Loader(data, CPU, seed=1).load(sampler.batches(4))
    assert Counter(batch[:, 0].tolist()) == {1: 6, 2: 2}
    assert set(batch[:, 2].tolist()) == {4}
    assert len(set(batch[:, 3].tolist())) == 8
    assert data.described() == "an epoch of 8: one 75.0%, 6 of 6 (noise); two 25.0%, 2 of 2"


def test_a_subset_of_a_mixture_is_one():
    data = look_into(Subset(Mix({"one": Noisy(1, 6), "two": Noisy(2, 4)}, {"one": 1, "two": 1}), [9, 0, 5, 8, 1]))
    order = data.mixture.order(0, 0, False)
    assert sorted(order.tolist()) == [0, 0, 1, 2, 3, 4]
    assert Counter(data[index][0].item() for index in order) == {1: 3, 2: 3}
    one_set = look_into(Subset(data.wrapper.dataset, [1, 2]))
    assert one_set.mixture.counts == {"one": 2}


class Holds(Dataset):
    def __init__(self, mix: Mix) -> None:
        self.mix = mix

    def __len__(self) -> int:
        return len(self.mix)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.mix[index] * 2


def test_weights_that_a_wrapper_hides_are_refused():
    mix = Mix({"one": Noisy(1, 6)})
    for wrapper in (Holds(mix), ConcatDataset([mix, mix])):
        with pytest.raises(ConfigError, match=r"holds a Mix, whose weights are hidden by it: wrap the sets of the Mix"):
            look_into(wrapper)
    wrapper = Holds(mix)
    wrapper.mixture = mix.mixture
    assert look_into(wrapper).mixture is mix.mixture


def nodes(**sets: Any) -> Any:
    target = f"{__name__}.Noisy"
    return OmegaConf.create({name: {"train": {"_target_": target, "name": 1, **one}} for name, one in sets.items()})


def test_configs_of_sets():
    sets = nodes(one={"n": 3}, two={"n": 4})
    sets.val_only = {"val": {"_target_": f"{__name__}.Noisy"}}
    data = Mix(sets, {"one": 2})
    assert (len(data), data.mixture.weights) == (7, {"one": 2, "two": 1})
    node = OmegaConf.create({"_target_": f"{__name__}.split_of", "name": 1, "n": 20})
    torch.manual_seed(0)
    alone = split_of(1, 20).indices
    torch.manual_seed(0)
    mixed = Mix(OmegaConf.create({"one": node, "two": node}))
    assert [part.indices for part in mixed.datasets] == [alone, alone]  # as where each is built alone


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from ()


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: Mix({}), r"the mixture has no set with train: give \+data@data\.sets\.<name>=<one of the group>$"),
        (lambda: Mix(nodes(one={"n": 3}), part="val"), r"no set with val: give \+data@data\..* or data\.val=null"),
        (lambda: Mix({"one": Stream()}), r"data\.sets\.one is iterable \(Stream\).*datasets\.interleave_datasets"),
        (lambda: Mix({"one": Noisy(1, 3)}, {"won": 1}), r"data\.weights\.won names no set, only one"),
        (lambda: Mix({"one": Noisy(1, 3)}, {"one": 0}), r"data\.weights\.one=0: give a number above 0"),
        (lambda: Mix({"one": Noisy(1, 3)}, {"one": "3"}), r"data\.weights\.one='3': give a number above 0"),
        (lambda: Mix({"one": Noisy(1, 3)}, {"one": float("nan")}), r"data\.weights\.one=nan: give a number above 0"),
        (lambda: Mix({"one": Noisy(1, 3)}, [3]), r"data\.weights=\[3\]: give a weight by the name of its set"),
        (
            lambda: Mix({"a": Noisy(1, 3), "b": Noisy(2, 3)}, {"a": 1e-300, "b": 1e300}),
            r"than 2,147,483,648 samples, .*data\.weights\.a=1e-300, .*: give a smaller data\.epoch_samples",
        ),
        (lambda: Mix({"one": Noisy(1, 0)}), r"the set one of the mixture has no samples: leave it out"),
        (lambda: Mix({"one": Noisy(1, 3)}, exhausted="end"), r"data\.exhausted=end: give one of repeat, stop"),
        (lambda: Mix({"one": Noisy(1, 3)}, epoch_samples=0), r"data\.epoch_samples=0: give at least 1, or null"),
        (lambda: Mix({"one": Mix({"two": Noisy(1, 3)})}), r"data\.sets\.one is a mixture: name its sets here"),
        (lambda: Mix(nodes(one={"nn": 3})), r"data\.sets\.one \(\S+Noisy\): .*unexpected keyword argument 'nn'"),
    ],
)
def test_mistakes(build, told):
    with pytest.raises(ConfigError, match=told):
        build()


def test_a_sampler_that_does_not_mix_is_refused():
    cfg = OmegaConf.create(
        {
            "data": {"batch_size": 2},
            "trainer": {"gradient_accumulation_steps": 1},
            "sampler": {"_target_": "ddp_hydra.data.samplers.Sharded"},
        }
    )
    data = look_into(Mix({"one": Noisy(1, 3)}))
    with pytest.raises(ConfigError, match=r"Sharded does not mix sets by weight: give sampler=distributed"):
        build_data.sampler(cfg, data, ALONE)
    cfg.sampler["_target_"] = "ddp_hydra.data.samplers.Distributed"
    assert build_data.sampler(cfg, data, ALONE).mixture is data.mixture
