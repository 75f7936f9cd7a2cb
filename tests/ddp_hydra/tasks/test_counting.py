"""What a criterion is a mean over, and what is said of targets that it can't take."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Classification
from ddp_hydra.tasks.counting import Counting
from ddp_hydra.tasks.losses import CrossEntropy

NUMBERS = torch.arange(8) % 3


class Scaled(nn.CrossEntropyLoss):
    def forward(self, prediction, target):
        return super().forward(prediction * 2, target)


class Focal(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__(reduction="none", ignore_index=0)

    def forward(self, prediction, target):
        losses = super().forward(prediction, target)
        return ((1 - (-losses).exp()) ** 2 * losses).mean()


class Ours(CrossEntropy):
    def forward(self, prediction, target):
        return super().forward(prediction, target) + 1


class Stable(nn.NLLLoss):
    def forward(self, prediction, target):
        return super().forward(prediction.log_softmax(1), target)


class Summed(nn.BCEWithLogitsLoss):
    def forward(self, prediction, target):
        return super().forward(prediction * 2, target)


class Same(nn.CrossEntropyLoss):
    pass


class Normed(nn.Module):
    """Has a layer of the name of the method that counts."""

    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(3)

    def forward(self, prediction, target):
        return F.cross_entropy(self.n(prediction), target)


LAYERS = [Scaled(ignore_index=0), Focal(), Ours(ignore_index=0), Stable(), Normed()]


@pytest.mark.parametrize("criterion", LAYERS, ids=repr)
def test_a_subclass_with_a_forward_of_its_own_is_weighed_by_samples_and_the_header_says_so(criterion):
    counting = Counting(criterion)
    assert counting.n(torch.randn(8, 3), NUMBERS) == 8
    assert counting.note.startswith(f"{type(criterion).__name__} by samples")


def test_a_subclass_whose_sum_may_be_another_is_named():
    assert Counting(Summed(reduction="sum")).note.startswith("Summed as a sum, by its reduction")


def test_a_subclass_with_the_forward_of_torch_counts_as_torch_does():
    assert Counting(Same(ignore_index=0)).n(torch.randn(8, 3), NUMBERS) == 5


@pytest.mark.parametrize(
    "criterion", [CrossEntropy(), nn.CrossEntropyLoss(), nn.NLLLoss(), F.cross_entropy], ids=range(4)
)
@pytest.mark.parametrize(
    ("target", "said"),
    [
        (NUMBERS[:, None], r"return y.squeeze\(-1\)"),
        (NUMBERS[:, None].float(), r"return y.squeeze\(-1\).long\(\)"),
        (NUMBERS.float(), r"return y.long\(\); for numbers that are to be predicted, type task=regression"),
        (NUMBERS.int(), r"class numbers of int64, so let the data set return y.long\(\)"),
        (F.one_hot(NUMBERS), r"return y.argmax\(-1\)"),
        (NUMBERS + 1, "hold class 3, and the model's output has 3 classes, 0 to 2"),
        (NUMBERS - 1, "hold class -1"),
    ],
)
def test_targets_that_are_no_class_numbers(criterion, target, said):
    with pytest.raises(ConfigError, match=said):
        Classification(criterion).step(nn.Linear(4, 3), (torch.randn(8, 4), target))


@pytest.mark.parametrize("criterion", [CrossEntropy(ignore_index=1), nn.CrossEntropyLoss(ignore_index=1)], ids=str)
def test_shares_of_classes_have_none_to_ignore(criterion):
    with pytest.raises(ConfigError, match="ignore_index=1 does not go with targets that are shares"):
        Classification(criterion).step(nn.Linear(4, 3), (torch.randn(8, 4), torch.full((8, 3), 1 / 3)))


@pytest.mark.parametrize(
    ("target", "said"),
    [(NUMBERS[:, None], r"takes floats.* y.float\(\)"), (NUMBERS.float(), r"the same shape.* y.unsqueeze\(-1\)")],
)
def test_targets_of_one_answer(target, said):
    with pytest.raises(ConfigError, match=said):
        Classification(nn.BCEWithLogitsLoss(), class_axis=None).step(nn.Linear(4, 1), (torch.randn(8, 4), target))


def test_numbers_of_classes_are_no_targets_of_a_loss_of_elements():
    with pytest.raises(ConfigError, match=r"the same shape; for the numbers of classes, give loss=cross_entropy"):
        Classification(nn.BCEWithLogitsLoss(), class_axis=None).step(nn.Linear(4, 3), (torch.randn(8, 4), NUMBERS))


@pytest.mark.parametrize("criterion", [CrossEntropy, nn.CrossEntropyLoss, nn.NLLLoss])
def test_weights_of_another_number_of_classes(criterion):
    loss = criterion(weight=torch.ones(2))
    with pytest.raises(ConfigError, match=r"loss\.weight has 2 numbers, and the model has 3 classes"):
        Classification(loss).step(nn.Linear(4, 3), (torch.randn(8, 4), NUMBERS))


def test_an_error_of_a_users_loss_stays_as_it_is():
    def broken(prediction, target):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        Classification(broken).step(nn.Linear(4, 3), (torch.randn(8, 4), NUMBERS))


def test_a_count_of_ones_own_may_be_any_function():
    loss = nn.CrossEntropyLoss()
    loss.n = functools.partial(lambda factor, prediction, target: factor * len(target), 2)
    assert Counting(loss).kind == "own"
    assert Counting(loss).n(torch.randn(8, 3), NUMBERS) == 16
