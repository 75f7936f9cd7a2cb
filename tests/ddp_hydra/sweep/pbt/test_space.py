"""Values are drawn and changed within what the user gave."""

from __future__ import annotations

import math
import random

import pytest

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.pbt import Choice, Interval, parse


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
