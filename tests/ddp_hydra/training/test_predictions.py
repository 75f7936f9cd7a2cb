"""What a task predicts becomes columns."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_hydra.errors import ConfigError
from ddp_hydra.rank import spec
from ddp_hydra.training import inference
from ddp_hydra.training.data_description import DataDescription
from ddp_hydra.training.inference import part_length


class Padded(NamedTuple):
    x: torch.Tensor
    lengths: torch.Tensor
    y: torch.Tensor


class Rated(NamedTuple):
    x: torch.Tensor
    rating: torch.Tensor


NAMES = ["dog", "cat"]


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
        ((torch.ones(2, 4), torch.tensor([3, 4]), torch.tensor([1, 0])), {}),  # lengths
        ([torch.ones(2, 4), torch.ones(2, 3), torch.tensor([1, 0])], {}),
        (
            Padded(torch.ones(2, 4), torch.tensor([3, 4]), torch.tensor([1, 0])),
            {"target": [1, 0], "target_name": NAMES},
        ),
        (SimpleNamespace(x=torch.ones(2, 4), y=torch.tensor([1, 0])), {"target": [1, 0], "target_name": NAMES}),
        (Rated(torch.ones(2, 4), torch.tensor([0.5, 2.0])), {"target": [0.5, 2.0]}),
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


@pytest.mark.parametrize("name", ["index", "id"])
def test_a_column_that_each_table_has_is_refused(name):
    said = rf"predict\(\) of the task has a column {name}, a name of the table's own: rename it"
    with pytest.raises(ConfigError, match=said):
        inference.identified(SimpleNamespace(sample_id=str), [0], {name: [5]})


def predicted(monkeypatch: pytest.MonkeyPatch, batches: list[Any], stopped: int = 0, **job: Any) -> list[int]:
    """Predict batches of (x, indices, is_own) with a task that returns them, in parts of 4; return the parts."""
    parts: list[int] = []
    rounds = SimpleNamespace(of=lambda _: iter(batches), stopped=stopped)
    monkeypatch.setattr(inference, "Rounds", lambda *_: rounds)
    monkeypatch.setattr(inference, "submit", lambda spool, part: parts.append(part))
    monkeypatch.setattr(inference.builders, "autocast", lambda *_: contextlib.nullcontext())
    trained = SimpleNamespace(model=None, cfg=SimpleNamespace(seed=0), device=None, parallel=None)
    run: Any = SimpleNamespace(
        trained=trained,
        task=SimpleNamespace(predict=lambda model, batch: batch[0]),
        data=(),
        world=None,
        job={"kind": "table", "targets": True, **job},
    )
    inference.send_parts(run, SimpleNamespace(spare=None), [], 4)  # type: ignore[arg-type]
    return parts


def test_a_rank_without_batches_of_its_own_is_interrupted(monkeypatch):
    spare = (torch.ones(2), torch.ones(2)), [], False
    assert predicted(monkeypatch, [spare], stopped=1) == []
    own = (torch.ones(4), torch.ones(4)), [4, 5, 6, 7], True
    assert predicted(monkeypatch, [own], stopped=1) == [1]
    assert predicted(monkeypatch, [((torch.ones(2), torch.ones(2)), [4, 5], True)], stopped=1) == []


@pytest.mark.parametrize(
    ("first", "second", "kind", "said"),
    [
        (((2, 3), (2,)), ((2, 5), (2,)), "table", r"row 2 .*\(prediction_3, prediction_4\)"),
        (((2, 1), (2,)), ((2, 3), (2,)), "table", r"\(prediction, prediction_0, prediction_1, …\)"),
        (((2, 3), (2,)), ((2, 5), (2,)), "arrays", r"row 2 .*\(prediction\): .*predict"),
        (((2,), (2, 3)), ((2,), (2, 5)), "table", r"\(target_3, target_4\): give targets=false$"),
    ],
)
def test_batches_with_other_columns_are_refused_at_once(first, second, kind, said, monkeypatch):
    batches = [(tuple(map(torch.ones, shapes)), [2 * n, 2 * n + 1], True) for n, shapes in enumerate((first, second))]
    with pytest.raises(ConfigError, match=said):
        predicted(monkeypatch, batches, kind=kind)
    predicted(monkeypatch, [batches[0], (batches[0][0], [2, 3], True)], kind=kind)
