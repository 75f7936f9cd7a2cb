"""The data sets of the examples that come with scikit-learn."""

from __future__ import annotations

import pytest
import torch

from data.diabetes import Diabetes
from data.digits import DigitMasks, Digits, DigitTokens

pytestmark = pytest.mark.medium  # scikit-learn takes a second to import


def test_each_fifth_digit_is_for_validation():
    train, val = Digits(), Digits("val")
    assert (len(train), len(val)) == (1437, 360)
    image, label = val[1]
    assert (image.shape, image.dtype, label.shape, label.dtype) == ((1, 8, 8), torch.float32, (), torch.int64)
    assert (train.images.min(), train.images.max()) == (0, 1)
    assert set(train.labels.tolist()) == set(range(Digits.num_classes))
    assert not any(torch.equal(val.images[0], image) for image in train.images)


def test_masks_show_which_digit_a_pixel_is_part_of():
    digits, masks = Digits("val"), DigitMasks("val", size=16, threshold=0.3)
    image, mask = masks[5]
    assert (image.shape, mask.shape, mask.dtype) == ((1, 16, 16), (16, 16), torch.int64)
    assert set(mask.unique().tolist()) == {0, 1 + int(digits[5][1])}
    assert torch.equal(mask > 0, image[0] > 0.3)
    assert int(masks.masks.max()) == DigitMasks.num_classes - 1


def test_tokens_are_in_dicts_with_their_labels():
    digits, sample = Digits("val"), DigitTokens("val")[5]
    assert {name: tuple(part.shape) for name, part in sample.items()} == {
        "input_ids": (64,), "attention_mask": (64,), "labels": (),
    }  # fmt: skip
    assert torch.equal(sample["input_ids"].view(1, 8, 8) / 16, digits[5][0])
    assert int(sample["input_ids"].max()) < DigitTokens.num_tokens
    assert torch.equal(sample["attention_mask"] > 0, sample["input_ids"] > 0)
    assert sample["labels"] == digits[5][1]


def test_patients_are_standardised_by_those_of_the_training():
    train, val = Diabetes(), Diabetes("val")
    assert (len(train), len(val)) == (353, 89)
    measurements, progression = train[0]
    assert (measurements.shape, measurements.dtype, progression.shape) == ((10,), torch.float32, ())
    for part in (train.measurements, train.progression):
        assert part.mean(0).abs().max() < 1e-5
        assert (part.std(0) - 1).abs().max() < 1e-5
    assert val.progression.mean().abs() > 1e-5


@pytest.mark.parametrize("kind", [Digits, Diabetes])
def test_there_is_no_other_split(kind):
    with pytest.raises(ValueError, match="split is 'test', and must be train or val"):
        kind("test")


@pytest.mark.parametrize("kind", [Digits, Diabetes])
def test_without_scikit_learn_a_sentence_names_what_to_install(kind, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"type pip install 'ddp-hydra\[demo\]'"):
        kind()
