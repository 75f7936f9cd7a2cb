"""Names of classes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from omegaconf import OmegaConf

from ddp_hydra.data.names import class_names


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (2, ["0", "1"]),
        (np.int64(2), ["0", "1"]),
        (["cat", "dog"], ["cat", "dog"]),
        ({"dog": 1, "cat": 0}, ["cat", "dog"]),
        ({"dog": "1", "cat": "0"}, ["cat", "dog"]),
        ({"dog": 1.0, "cat": np.int64(0)}, ["cat", "dog"]),
        ({"1": "dog", "0": "cat"}, ["cat", "dog"]),
        ({1: "dog", 0: "cat"}, ["cat", "dog"]),
        ({"0": "7", "1": "5"}, ["7", "5"]),
        ({"0": 1, "1": 2, "2": 0}, ["2", "0", "1"]),
        ({"1": ["n0145", "dog"], "0": ["n0144", "cat"]}, ["0", "1"]),
        ({"cat": {"id": 0}}, ["cat"]),
        ({"dog": "a hound", "cat": None}, ["dog", "cat"]),
    ],
)
def test_classes_have_their_names_in_the_order_of_their_numbers(given, names):
    assert class_names(given, "the index", "type another") == names
    if isinstance(given, dict) and not any(isinstance(value, np.integer) for value in given.values()):
        assert class_names(OmegaConf.create(given), "the index", "type another") == names


@pytest.mark.parametrize(
    ("given", "numbers", "last"),
    [
        ({"cat": 1, "dog": 2}, "1, 2", 1),
        ({"cat": 0, "dog": 0}, "0, 0", 1),
        ({"cat": 0, "dog": "a hound"}, "0, a hound", 1),
        ({"0": 1, "1": 2}, "1, 2", 1),
        ({1: "cat", 2: "dog"}, "1, 2", 1),
        ({"0": "cat", "2": "dog"}, "0, 2", 1),
        ({str(number): 7 for number in range(11)}, "7, 7, 7, 7, 7, 7, 7, 7, 7, 7, …", 10),
    ],
)
def test_numbers_that_leave_one_out_are_refused(given, numbers, last):
    told = f"the index gives {last + 1} classes the numbers {numbers}, and they go from 0 to {last}: type another"
    with pytest.raises(ValueError, match=re.escape(told)):
        class_names(given, "the index", "type another")
