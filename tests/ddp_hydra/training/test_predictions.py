"""What a task predicts becomes columns."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import spec
from ddp_hydra.training import inference
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.inference import part_length


def test_tensors_become_columns_and_wide_ones_several():
    found = inference.columns(
        {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16), "y": [1, 2]}, 2, "table"
    )
    assert list(found) == ["x_0", "x_1", "y"]
    assert found["x_1"].dtype == np.float32
    assert found["x_1"].tolist() == [2, 4]
    assert inference.columns(torch.ones(2, 1), 2, "table")["prediction"].shape == (2,)
    assert inference.columns(torch.ones(2, 5, 4), 2, "arrays")["prediction"].shape == (2, 5, 4)


@pytest.mark.parametrize(
    ("values", "column"),
    [
        (list(np.float32([0.5, 2])), np.float32([0.5, 2])),
        (list(torch.tensor([0.5, 2.0])), np.float32([0.5, 2])),
        (list(torch.tensor([0.5, 2.0], dtype=torch.bfloat16)), np.float32([0.5, 2])),
        (list(torch.tensor([1, 2])), np.array([1, 2])),
        ([np.int64(1), 2.5], np.array([1.0, 2.5])),
        ([np.array(1), True], np.array([1, 1])),
        ([1, None], np.array([1.0, np.nan])),
    ],
    ids=str,
)
def test_a_list_of_numbers_is_a_column_of_numbers(values, column):
    found = inference.columns({"a": values}, 2, "table")["a"]
    assert found.dtype == column.dtype
    np.testing.assert_array_equal(found, column)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (["a", None], ["a", None]),
        ([None, None], [None, None]),
        (list(np.array(["a", "b"])), ["a", "b"]),
        (list(np.array(["2026-11-30", "2026-12-01"], "M8[D]")), ["2026-11-30", "2026-12-01"]),
        ([[1], None], ["[1]", None]),
    ],
    ids=str,
)
def test_a_list_of_texts_stays_one(values, texts):
    found = inference.columns({"a": values}, 2, "table")["a"]
    assert found == texts
    assert {type(text) for text in found} <= {str, type(None)}  # others don't travel


def test_what_differs_in_length_becomes_json():
    boxes = [[torch.tensor([1, 2])], []]
    assert inference.columns({"boxes": boxes}, 2, "table") == {"boxes": ["[[1,2]]", "[]"]}


@pytest.mark.parametrize(
    ("prediction", "kind", "said"),
    [
        (torch.ones(3), "table", "3 rows of 'prediction' for 2 samples"),
        (torch.tensor(3.0), "table", "a number in place of rows of 'prediction' for 2 samples"),
        (torch.ones(2, 4, 4), "table", "give out=<folder>/"),
        (torch.ones(2), "pictures", "but the task predicts prediction"),
        (torch.ones(2, 7, 4, 4), "pictures", "1, 3 or 4 channels"),
        (torch.full((2, 4, 4), -1), "pictures", "no PNG holds"),
        ({"x": object()}, "table", "return tensors or lists"),
    ],
)
def test_what_does_not_fit_is_said(prediction, kind, said):
    with pytest.raises(ConfigError, match=said):
        inference.columns(prediction, 2, kind)


@pytest.mark.parametrize(
    ("picture", "wanted"),
    [
        (torch.tensor([[0.0, 0.5, 1.0]]), [[0, 128, 255]]),
        (torch.tensor([[True, False]]), [[255, 0]]),
        (torch.tensor([[[3]], [[4]], [[5]]]), [[[3, 4, 5]]]),
        (torch.tensor([[300, 2]]), [[300, 2]]),
    ],
)
def test_pictures_become_pngs(picture, wanted):
    (png,) = inference.columns(picture[None], 1, "pictures")["prediction"]
    assert np.asarray(Image.open(io.BytesIO(png))).tolist() == wanted


@pytest.mark.parametrize(
    ("n_samples", "batch_size", "length"), [(37, 8, 8), (10**6, 32, 4096), (6400, 32, 128), (9, 99, 99)]
)
def test_parts_are_whole_batches(n_samples, batch_size, length):
    assert part_length(n_samples, batch_size) == length


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        ((torch.ones(2, 4), torch.tensor([1, 0])), {"target": [1, 0], "target_name": ["dog", "cat"]}),
        ((torch.ones(2, 4), torch.tensor([-100, 1])), {"target": [-100, 1], "target_name": ["", "dog"]}),
        ((torch.ones(2, 4), torch.tensor([0.5, 2.0])), {"target": [0.5, 2.0]}),
        ((torch.ones(2, 4), torch.tensor([[0.5], [2.0]])), {"target": [0.5, 2.0]}),
        ((torch.ones(2, 4), torch.tensor([[0.5, 1.0], [2.0, 3.0]])), {"target": [[0.5, 1.0], [2.0, 3.0]]}),
        ({"x": torch.ones(2, 4), "labels": torch.tensor([1, 0])}, {"target": [1, 0], "target_name": ["dog", "cat"]}),
        ((torch.ones(2, 4), torch.ones(2, 4, dtype=torch.long)), {}),  # tokens
        ((torch.ones(2, 4), torch.ones(2, 8, 8)), {}),
        ((torch.ones(2, 4), "no tensor"), {}),
        (torch.ones(2, 4), {}),
    ],
)
def test_what_is_true_stands_beside_what_is_predicted(batch, wanted):
    found = inference.targets(batch, 2, ("cat", "dog"))
    assert {name: getattr(part, "tolist", lambda part=part: part)() for name, part in found.items()} == wanted


def test_names_of_files_that_are_not_utf_8_can_be_written(tmp_path):
    class Photos:
        classes = ("na\udcefve", "dog")

        def sample_id(self, index: int) -> str:
            return f"{self.classes[index]}/1.png"

        def error_of(self, index: int) -> str:
            return f"{self.sample_id(index)} is no image" if index == 0 else ""

    names = DataDescription.of(Photos()).classes
    found = inference.identified(Photos(), [0, 1], inference.targets([None, torch.tensor([0, 1])], 2, names))
    assert found["id"] == [r"na\udcefve/1.png", "dog/1.png"]
    assert found["error"] == [r"na\udcefve/1.png is no image", ""]
    assert found["target_name"] == [r"na\udcefve", "dog"]
    with (tmp_path / "rows").open("wb") as file:
        spec.write_rows(file, {name: column for name, column in found.items() if isinstance(column, list)})
