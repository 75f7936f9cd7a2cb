"""What a checkpoint keeps of its data is compared when it is used with other data."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import ConcatDataset, Subset, random_split
from torchvision.transforms import v2

from ddp_hydra.data import wrappers
from ddp_hydra.data.images.dataset import ImageDataset
from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Regression
from ddp_hydra.training import build_data
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.data_description import DataDescription, shown
from tests.ddp_hydra.training.loop_runs import Numbers

ABC = DataDescription(("a", "b", "c"), 3)


class Named(Numbers):
    """Numbers whose classes have names."""

    classes = ("a", "b", "c")


class Renamed(Numbers):
    classes = ("a", "c", "z")


class Columns(Numbers):
    features = ("age", "height", "weight", "sex")


class OtherColumns(Numbers):
    features = ("height", "age", "weight", "sex")


def classes(*names: str) -> DataDescription:
    return DataDescription(names, len(names))


def test_it_survives_a_checkpoint():
    whole = DataDescription(("a",), 1, ("x", "y"), 7, "bytes", (1, 3))
    assert DataDescription.from_dict(whole.as_dict()) == whole
    assert DataDescription.from_dict(None) == DataDescription()
    before = whole.as_dict() | {"classes": ["na\udcefve"]}  # of a checkpoint of an older version
    assert DataDescription.from_dict(before).classes == (r"na\udcefve",)


def test_a_vector_must_have_one_length_in_all_data():
    train, val = (DataDescription((), 0, ("age", "code"), widths=(1, width)) for width in (3, 4))
    with pytest.raises(ConfigError, match=r"the feature code has 4 numbers in a row of data\.val, and 3 in"):
        train.check_validation(val)
    train.check_validation(train)


def test_one_class_is_told():
    task = SimpleNamespace(criterion=torch.nn.CrossEntropyLoss())
    assert "data.train has one class only (cats), and nothing" in build_data.only_class(task, classes("cats"))
    assert not build_data.only_class(task, classes("cats", "dogs"))
    assert not build_data.only_class(SimpleNamespace(criterion=torch.nn.BCEWithLogitsLoss()), classes("cats"))


def test_attributes_that_mean_something_else_are_left_alone():
    data: Any = Numbers(3)
    data.features, data.scaling, data.classes = data.x, 2.0, 5
    assert DataDescription.of(data) == DataDescription(num_classes=5, n_samples=3)


def repr_sorted(value: Any) -> str:
    """Return an id that is the same in all processes, also of a set."""
    return repr(
        sorted(value) if isinstance(value, set | frozenset) else type(value) if hasattr(value, "__next__") else value
    )


@pytest.mark.parametrize(
    ("given", "names", "number"),
    [
        (["cats", "dogs"], ("cats", "dogs"), 2),
        ([7, 8], ("7", "8"), 2),
        (np.array(["cats", "dogs"]), ("cats", "dogs"), 2),
        ({"dogs": 1, "cats": np.int64(0)}, ("cats", "dogs"), 2),
        ({1: "dogs", 0: "cats"}, ("cats", "dogs"), 2),
        ({1: "crane", 0: "crane"}, ("crane", "crane"), 2),
        ({"n01": "tench", "n02": "goldfish"}, ("n01", "n02"), 2),
        ([("crane",), ("crane",)], ("('crane',)", "('crane',)"), 2),  # two classes of ImageNet have one name
        ({"cats", "dogs"}, (), 2),  # whose order is another one in each process
        (frozenset("ab"), (), 2),
        (["a", "b", "a"], (), 0),  # the labels of its three samples
        (Counter("aab"), (), 0),
        (Counter([0, 0, 1]), (), 0),
        ({0: 100, 1: 50}, (), 0),
        ({7: 0, 8: 1}, ("7", "8"), 2),
        ({"cats": 1, "dogs": 2}, (), 0),  # their numbers begin with 1
        (iter("ab"), (), 0),
        (5, (), 5),
        (None, (), 0),
    ],
    ids=repr_sorted,
)
def test_classes_are_names_only_where_their_numbers_are_known(given, names, number):
    data = type("Data", (), {"classes": given, "__len__": lambda self: 3})()
    found = DataDescription.of(data)
    assert (found.classes, found.num_classes) == (names, number)


def test_labels_of_samples_are_no_names_behind_a_part_of_the_data_either():
    data = Numbers(9)
    data.classes = data.features = ["a", "b", "a"] * (len(data) // 3)
    for part in (Subset(data, [0, 1]), random_split(data, [len(data) - 2, 2])[0], ConcatDataset([data, data])):
        found = DataDescription.of(wrappers.look_into(part))
        assert (found.classes, found.num_classes, found.features) == ((), 0, ())


def test_validation_data_must_number_the_classes_as_training_data_does():
    train = classes("cats", "dogs")
    for fits in ((), ("cats",), ("cats", "dogs", "owls"), ("apes", "owls")):
        train.check_validation(classes(*fits))
    with pytest.raises(ConfigError, match=r"cats has number 0 in data\.train and 1 in data\.val: .*classes_from="):
        train.check_validation(classes("apes", "cats", "dogs"))


def test_a_model_that_the_training_gives_its_size_has_no_other_class_of_the_validation():
    task, check = SimpleNamespace(criterion=torch.nn.CrossEntropyLoss()), build_data.check_validation_classes
    open_, typed = (OmegaConf.create({"model": {"num_classes": number}}) for number in (None, 3))
    train, more = classes("cats", "dogs"), SimpleNamespace(classes=["cats", "dogs", "owls"], targets=[2, 1, 0])
    for targets in (more.targets, torch.tensor(more.targets), np.array(more.targets)):
        with pytest.raises(
            ConfigError, match=r"of classes that data\.train does not have: owls; .* the 2 of data\.train"
        ):
            check(open_, task, train, SimpleNamespace(classes=more.classes, targets=targets))
    for targets in ([1, 0], None, [[2], [0, 1]], [[2, 1]] * 3, [0.5, 2.0], ["owls"], []):
        check(open_, task, train, SimpleNamespace(classes=more.classes, targets=targets))
    check(open_, task, train, SimpleNamespace(**vars(more), target_transform=str))
    for config in (typed, OmegaConf.create({"model": {}})):
        check(config, task, train, more)
    check(open_, SimpleNamespace(criterion=torch.nn.MSELoss()), train, more)
    for other in (classes("a", "b", "c"), DataDescription(("a", "b"), 10), DataDescription()):
        check(open_, task, other, more)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            classes("a", "c", "z"),
            r"data\.train are a, c, z, and the checkpoint was trained on a, b, c: .*model\.weights=",
        ),
        (classes("b", "a", "c"), r"are b, a, c, and the checkpoint was trained on a, b, c"),
        (classes("a", "b", "c", "d"), r"are a, b, c, d, and"),
        (DataDescription((), 4), r"classes of data\.train are 4, and the checkpoint was trained on 3"),
    ],
)
def test_a_resume_with_other_classes_shows_both(now, said):
    with pytest.raises(ConfigError, match=said):
        ABC.check_resume(now)
    assert ABC.check_resume(ABC) == ABC.check_resume(DataDescription()) == DataDescription().check_resume(now) == ""


def test_a_resume_with_more_samples_says_what_that_means():
    warned = DataDescription(n_samples=1000).check_resume(DataDescription(n_samples=1200))
    assert warned.startswith("data.train has 1,200 samples, and had 1,000 at the checkpoint: in the epoch")
    assert DataDescription(n_samples=9).check_resume(DataDescription(n_samples=9)) == ""
    assert DataDescription(n_samples=9).check_resume(DataDescription()) == ""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (classes("a", "c", "z"), r"classes of data\.val are a, c, z, and the model was trained on a, b, c"),
        (classes("a", "b", "c", "d"), r"are a, b, c, d, and"),
        (DataDescription((), 4), r"classes of data\.val are 4, and the model was trained on a, b, c"),
        (DataDescription(features=("x",)), ""),
        (classes("a", "b"), ""),
        (classes("p", "q", "r"), ""),
    ],
)
def test_a_model_is_given_classes_by_their_numbers(data, said):
    if not said:
        ABC.check_model(data, "data.val")
        assert ABC.other_names(data) == ("p" in data.classes)
        return
    with pytest.raises(ConfigError, match=said):
        ABC.check_model(data, "data.val")


def test_features_are_compared_by_name_and_order():
    trained = DataDescription(features=("age", "height"))
    for check in (trained.check_validation, trained.check_resume):
        with pytest.raises(ConfigError, match=r"height, age \(others, or in another order\).*features=\[age,height\]"):
            check(DataDescription(features=("height", "age")))
    with pytest.raises(
        ConfigError, match=r"features of data\.val are age, sex \(height missing\), and the features of the mo"
    ):
        trained.check_model(DataDescription(features=("age", "sex")), "data.val")


def test_a_set_of_columns_reads_those_of_the_model_unless_the_config_names_others():
    trained = DataDescription(features=("age", "height"))
    for given, taken in ((None, ["age", "height"]), (["height"], ["height"])):
        node = OmegaConf.create({"_target_": "x", "features": given})
        assert build_data.with_features(node, trained).features == taken
        assert node.features == given
    other = OmegaConf.create({"_target_": "x"})
    assert "features" not in build_data.with_features(other, trained)


class Blank(ImageDataset):
    """Images without files, for what their transform makes of them."""

    def fetch(self, index: int) -> bytes:
        raise NotImplementedError

    def name(self, index: int) -> str:
        return str(index)

    def where(self) -> str:
        return "nowhere"

    def __len__(self) -> int:
        return 1


FLOATS = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


@pytest.mark.parametrize(
    ("train", "val", "said"),
    [
        (
            {"transform": FLOATS},
            {},
            r"data\.val are bytes, normalised by mean \(0\.485, .*data\.train are float32, as th",
        ),
        ({}, {"transform": FLOATS}, r"data\.val are float32, .*data\.train are bytes"),
        ({"mean": (0.5, 0.5, 0.5)}, {}, r"mean \(0\.485, .*mean \(0\.5, 0\.5, 0\.5\)"),
        ({"transform": FLOATS}, {"transform": v2.Compose([v2.RandomCrop(8), FLOATS])}, ""),
        ({"transform": v2.RandomCrop(8)}, {"transform": v2.CenterCrop(8)}, ""),  # PIL images: the loader refuses them
        ({"transform": lambda image, rng: image[:0][0]}, {}, ""),  # it can't be tried on a blank image
    ],
    ids=["floats, bytes", "bytes, floats", "other mean", "floats", "pictures", "unknown"],
)
def test_training_and_validation_images_must_be_scaled_alike(train, val, said):
    ours, theirs = (DataDescription.of(Blank(**arguments)) for arguments in (train, val))
    if not said:
        ours.check_validation(theirs)
        return
    with pytest.raises(ConfigError, match=said):
        ours.check_validation(theirs)
    with pytest.raises(ConfigError, match="let both transforms return the same type"):
        ours.check_model(theirs, "data.val")


def test_asking_how_images_are_scaled_draws_nothing():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert Blank(transform=lambda image: v2.ToImage()(image).float() * torch.rand(1)).scaling.startswith("float32")
    assert torch.rand(1) == expected


@pytest.mark.medium
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (Named, Renamed, r"are a, c, z, and the checkpoint was trained on a, b, c"),
        (Columns, OtherColumns, r"features of data\.train are height, age"),
    ],
)
def test_a_run_is_not_resumed_on_data_that_mean_something_else(before, after, said, train):
    first = train(stop_at=("forward", 2), data=before)
    assert read(first.last)["data"]["n_samples"] == 9
    with pytest.raises(ConfigError, match=said):
        train(resume=first.last, data=after)
    assert train(resume=first.last, data=before).value["steps"] == 8


@pytest.mark.medium
def test_a_run_that_is_resumed_on_more_samples_is_told_and_goes_on(train, capsys):
    first = train(stop_at=("forward", 2))
    assert train(resume=first.last, data=lambda n: Numbers(n + 4)).value["samples"] > 16
    assert "data.train has 13 samples, and had 9 at the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("given", [{"b": 1, "a": 0}, {1: "b", 0: "a"}, ["a", "b"]])
def test_names_of_classes_have_the_order_of_their_numbers(given):
    data = Numbers(4)
    data.classes = given
    assert DataDescription.of(data) == DataDescription(("a", "b"), 2, n_samples=4)


def test_a_name_that_is_a_newline_stays_in_its_line():
    assert shown(["\n", "a", "\x1b"]) == "'\\n', a, '\\x1b'"


def test_features_that_are_samples_are_no_names_of_columns():
    class Texts(list):
        features = ("a good film", "a bad one")

    assert DataDescription.of(Texts([0, 1])).features == ()
    assert DataDescription.of(Texts([0, 1, 2])).features == Texts.features


@pytest.mark.parametrize(
    ("num_classes", "criterion", "kept"),
    [
        ({"num_classes": 1}, nn.MSELoss(), 0),  # whole numbers to predict
        ({}, nn.MSELoss(), 0),
        ({"num_classes": 3}, nn.MSELoss(), 3),
        ({"num_classes": None}, None, 3),
        ({"num_classes": 7}, nn.CrossEntropyLoss(), 3),
        ({"num_classes": 1}, None, 0),
    ],
)
def test_whole_numbers_are_classes_where_the_loss_or_the_model_takes_them_for_classes(num_classes, criterion, kept):
    counted = SimpleNamespace(num_classes=3)
    cfg = OmegaConf.create({"model": num_classes})
    found = build_data.description_of(cfg, SimpleNamespace(criterion=criterion), counted)
    assert found.num_classes == kept
    found.check_resume(DataDescription(num_classes=kept))
    named = SimpleNamespace(classes=["a", "b"])
    assert build_data.description_of(cfg, SimpleNamespace(), named).num_classes == 2


def test_numbers_that_a_table_takes_for_names_of_classes_are_no_targets_of_a_regression():
    ages, task, cfg = ["18.5", "40", "1000"], Regression(nn.MSELoss()), OmegaConf.create({"model": {}})
    table = SimpleNamespace(classes=ages, class_to_idx={name: number for number, name in enumerate(ages)})
    with pytest.raises(ConfigError, match=r"numbers its classes 18\.5, 40, 1000 from 0"):
        build_data.check_classes(cfg, task, table, 3)
    table.target_transform = lambda number: float(ages[number])
    build_data.check_classes(cfg, task, table, 3)
    for names in (["0", "1", "2"], ["cat", "dog"]):
        build_data.check_classes(cfg, task, SimpleNamespace(class_to_idx={n: i for i, n in enumerate(names)}), 3)
