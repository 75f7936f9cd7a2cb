"""An error in a step says what shapes there were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hydra.tasks import Classification, ModelLoss, Regression, Segmentation, Step
from ddp_hydra.tasks.losses import CrossEntropy
from ddp_hydra.training.train_step import TrainStep, as_step

IMAGES, LABELS = torch.zeros(4, 1, 8, 8), torch.zeros(4).long()


class Narrow(nn.Module):
    """Takes 32 pixels, not 64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.layer(flat)


def noted(task, model, batch):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (of any type)
        TrainStep(task, model)(batch)
    return [str(caught.value), *caught.value.__notes__]


def test_in_the_model_the_line_and_its_tensors_are_named():
    text, batch, place = noted(Classification(CrossEntropy()), Narrow(), (IMAGES, LABELS))
    assert "4x64 and 32x10" in text
    assert batch == "the batch: x (4, 1, 8, 8) float32, y (4,) int64"
    assert place.startswith("tests/ddp_hydra/training/test_train_step.py, line 25")
    assert place.endswith("in forward: x (4, 1, 8, 8) float32, flat (4, 64) float32")


def test_in_the_loss_the_output_is_named():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    _, batch, output = noted(Classification(CrossEntropy()), model, (IMAGES, torch.zeros(3).long()))
    assert (batch, output) == ("the batch: x (4, 1, 8, 8) float32, y (3,) int64", "the model's output: (4, 10) float32")


def test_a_batch_of_another_structure_is_described():
    _, batch, *_ = noted(ModelLoss(), Narrow(), {"pixels": IMAGES, "labels": LABELS})
    assert batch == "the batch: pixels (4, 1, 8, 8) float32, labels (4,) int64"


@pytest.mark.parametrize(
    ("task", "model", "batch", "said"),
    [
        (
            Regression(nn.MSELoss()),
            nn.Flatten(),
            (IMAGES, torch.zeros(4, 3)),
            r"output is \(4, 64\).*target is \(4, 3\)",
        ),
        (Segmentation(), nn.Flatten(), (IMAGES, torch.zeros(4, 8, 8)), r"output of \(batch, classes, height, width\)"),
        (ModelLoss(), lambda x: {"logits": x}, (IMAGES,), "without a loss: it must have `loss`"),
    ],
    ids=["regression", "segmentation", "model_loss"],
)
def test_shapes_that_do_not_fit_are_said_in_the_users_terms(task, model, batch, said):
    with pytest.raises(ValueError, match=said):
        task.step(model, batch)


def test_a_regression_does_not_broadcast():
    """(batch,) and (batch, 1) would be compared as (batch, batch)."""
    x = torch.randn(6, 1)
    step = Regression(nn.MSELoss()).step(lambda x: 2 * x, (x, x[:, 0]))
    assert step.loss.item() == pytest.approx(x.square().mean().item())


class Counted(nn.Module):
    """Counts the calls of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.model(x)


def test_the_task_calls_the_wrapper_of_its_model_and_the_parameters_keep_their_names():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    step, wrapper = TrainStep(Classification(CrossEntropy()), model), Counted(model)
    names = [name for name, _ in step.named_parameters()]
    step.wrap(lambda wrapped: wrapper if wrapped is model else None)
    step((IMAGES, LABELS))
    assert wrapper.calls == 1
    assert [name for name, _ in step.named_parameters()] == names


def test_a_scalar_loss_gets_no_further_node_in_its_graph():
    step = Step(torch.ones(3, requires_grad=True).mean(), 3)
    assert as_step(step).loss is step.loss
    assert as_step(Step(step.loss.reshape(1), 3)).loss.ndim == 0
