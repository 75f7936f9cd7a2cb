"""The worst copy the best, values stay within what the user gave, and everything is repeatable."""

from __future__ import annotations

import math
import random

import pytest

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.pbt import (
    Choice,
    Interval,
    Member,
    PopulationSettings,
    first_generation,
    next_generation,
    parse,
)

SPACE = {"lr": Interval(1e-4, 1.0, is_log=True), "size": Choice(("16", "32", "64"))}
KEEP = PopulationSettings(resample_probability=0.0, factors=(0.8, 1.2))


def members(n: int) -> list[Member]:
    return [Member({"lr": str(0.1 + number / 100), "size": "32"}) for number in range(n)]


def parents(
    n: int, scores: list[float | None], maximize: bool = True, settings: PopulationSettings = KEEP
) -> list[int | None]:
    return [one.parent for one in next_generation(1, members(n), scores, maximize, SPACE, settings)]


@pytest.mark.parametrize(
    ("scores", "maximize", "expected"),
    [
        ([0.1, 0.9, 0.5, 0.6, 0.7], True, [1, 1, 2, 3, 4]),
        ([0.1, 0.9, 0.5, 0.6, 0.7], False, [0, 0, 2, 3, 4]),
        ([0.1, 0.9, 0.5, None, 0.7], True, [0, 1, 2, 1, 4]),
        ([None, 0.9, None, None, 0.7], True, [1, 1, 1, 1, 4]),
        ([0.5, 0.5, 0.5, 0.5, 0.5], True, [0, 1, 2, 3, 0]),
    ],
)
def test_the_worst_and_those_that_failed_copy_the_best(scores, maximize, expected):
    assert parents(5, scores, maximize) == expected


@pytest.mark.parametrize(
    ("n", "quantile", "replaced"), [(4, 0.2, 1), (10, 0.2, 2), (3, 0.5, 1), (10, 0.0, 0), (2, 0.5, 1)]
)
def test_a_share_is_replaced_by_as_many_of_the_best(n, quantile, replaced):
    found = parents(n, [float(number) for number in range(n)], settings=PopulationSettings(quantile=quantile))
    assert sum(parent != place for place, parent in enumerate(found)) == replaced
    assert found[replaced:] == list(range(replaced, n))
    assert all(parent >= n - replaced for parent in found[:replaced])


def test_a_copy_has_changed_values_of_its_parent_and_the_others_have_their_own():
    old = members(5)
    new = next_generation(1, old, [0.1, 0.9, 0.5, 0.6, 0.7], True, SPACE, KEEP)
    assert [one.values for one in new[1:]] == [one.values for one in old[1:]]
    assert float(new[0].values["lr"]) in (pytest.approx(0.11 * 0.8), pytest.approx(0.11 * 1.2))
    assert new[0].values["size"] in ("16", "64")
    assert [one.parent for one in new] == [1, 1, 2, 3, 4]
    anew = next_generation(1, old, [0.1, 0.9, 0.5, 0.6, 0.7], True, SPACE, PopulationSettings(resample_probability=1.0))
    assert float(anew[0].values["lr"]) not in (pytest.approx(0.11 * 0.8), pytest.approx(0.11 * 1.2))


def test_the_same_seed_gives_the_same_generations_and_another_one_others():
    def run(seed: int) -> list[Member]:
        settings, found = PopulationSettings(population=6, seed=seed), []
        now = first_generation(SPACE, settings)
        for number in range(1, 5):
            found += now
            now = next_generation(number, now, [float(one.values["lr"]) for one in now], True, SPACE, settings)
        return found

    assert run(1) == run(1)
    assert run(1) != run(2)
    first = first_generation(SPACE, PopulationSettings(population=6))
    assert len({one.values["lr"] for one in first}) == 6
    assert all(one.parent is None for one in first)


def test_nobody_left_is_said():
    with pytest.raises(ValueError, match="no member is left"):
        parents(3, [None, None, None])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"population": 1}, "a whole number of at least 2"),
        ({"validations": True}, "a whole number of at least 1"),
        ({"quantile": 0.6}, "a share from 0 to 0.5"),
        ({"factors": [0.0]}, "numbers above 0"),
        ({"seed": "x"}, "a whole number"),
    ],
)
def test_options_are_checked(wrong, words):
    with pytest.raises(ConfigError, match=rf"hydra\.sweeper\.{next(iter(wrong))}=.*: give {words}"):
        PopulationSettings(**wrong)


def test_all_but_the_last_generation_pause():
    assert [PopulationSettings(generations=3, validations=2).pause_after(number) for number in range(3)] == [2, 4, None]


@pytest.mark.parametrize(
    ("word", "dimension"),
    [
        ("a=interval(1e-4,1e-1)", Interval(1e-4, 1e-1)),
        ("a=tag(log, interval(1e-4,1e-1))", Interval(1e-4, 1e-1, is_log=True)),
        ("a=int(interval(1,9))", Interval(1, 9, is_int=True)),
        ("a=choice(32,64,x)", Choice(("32", "64", "x"))),
        ("a=1,2,2", Choice(("1", "2"))),
        ("a=range(1,4)", Choice(("1", "2", "3"))),
    ],
)
def test_hydras_syntax_for_sweeps(word, dimension):
    assert parse([word, "b=3", "~c"]) == (["b=3", "~c"], {"a": dimension})


def test_the_later_of_two_words_counts():
    assert parse(["a=1,2", "b=1", "a=5", "+c=1", "b=interval(0,1)"]) == (["a=5", "+c=1"], {"b": Interval(0, 1)})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a=interval(2,1)", "from a number to a larger one"),
        ("a=tag(log,interval(0,1))", "with log from more than 0"),
        ("a=range(1,2)", "give two values or more"),
        ("a=glob(*)", r"choice\(a,b\)"),
    ],
)
def test_what_cannot_be_searched_is_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        parse([word])


@pytest.mark.parametrize(
    "dimension", [Interval(1e-4, 1.0, is_log=True), Interval(0.5, 2.0), Interval(1, 9, False, True)]
)
def test_numbers_stay_inside(dimension):
    rng = random.Random(1)
    drawn = [float(dimension.draw(rng)) for _ in range(300)]
    assert dimension.low <= min(drawn) < max(drawn) <= dimension.high
    value = dimension.draw(rng)
    for _ in range(100):
        changed = dimension.change(value, rng, (0.8, 1.2))
        assert dimension.low <= float(changed) <= dimension.high
        assert not dimension.is_int or changed == str(int(changed))
        value = changed
    assert Interval(0, 10).change("5", rng, (0.8,)) == "4"
    assert Interval(0, 10).change("9", rng, (1.2,)) == "10"
    assert Interval(0, 0.12345678).change("0.12", rng, (1.2,)) == "0.12345678"


def test_by_the_logarithm_all_sizes_are_drawn_alike():
    rng, dimension = random.Random(1), Interval(1e-4, 1.0, is_log=True)
    small = sum(float(dimension.draw(rng)) < 1e-2 for _ in range(1000))
    assert math.isclose(small, 500, abs_tol=80)


def test_a_choice_goes_to_its_neighbour():
    rng, dimension = random.Random(1), Choice(("a", "b", "c"))
    assert {dimension.change("b", rng, ()) for _ in range(20)} == {"a", "c"}
    assert {dimension.change("a", rng, ()) for _ in range(20)} == {"a", "b"}
    assert {dimension.draw(rng) for _ in range(50)} == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("value", "low", "high", "found"),
    [
        (1, 1, 16, {1, 2}), (2, 1, 16, {1, 3}), (3, 1, 16, {2, 4}), (16, 1, 16, {13, 16}), (0, -2, 2, {-1, 1}),
        (-1, -9, 9, {-2, 0}),
    ],
)  # fmt: skip
def test_whole_numbers_change_by_one_at_least_within_the_ends(value, low, high, found):
    interval = Interval(low, high, is_int=True)
    assert {int(interval.change(str(value), random.Random(seed), [0.8, 1.2])) for seed in range(50)} == found


def test_zero_is_left():
    changed = {Interval(0, 0.5).change("0", random.Random(seed), [0.8, 1.2]) for seed in range(50)}
    assert changed == {"0", "0.005"}
