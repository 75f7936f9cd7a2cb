"""An error in a step says what shapes there were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Classification, ModelLoss, Regression, Segmentation, Step, Task
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
    assert place.startswith("tests/ddp_hydra/training/test_train_step.py, line 26")
    assert place.endswith("in forward: x (4, 1, 8, 8) float32, flat (4, 64) float32")


@pytest.mark.parametrize("layer", [nn.Flatten(), nn.Conv2d(1, 1, 1)])
def test_a_batch_of_another_type_than_the_weights_is_told_with_what_to_write(layer):
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(64, 10))
    assert "x.float() makes float32" in noted(Classification(CrossEntropy()), model, (IMAGES.double(), LABELS))[2]


def test_in_the_loss_the_output_is_named():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    _, batch, output = noted(Classification(CrossEntropy()), model, (IMAGES, torch.zeros(3).long()))
    assert (batch, output) == ("the batch: x (4, 1, 8, 8) float32, y (3,) int64", "the model's output: (4, 10) float32")


def test_a_batch_of_another_structure_is_described():
    with pytest.raises(ConfigError, match="Narrow takes no pixels, and the batch has pixels, labels"):
        TrainStep(ModelLoss(), Narrow())({"pixels": IMAGES, "labels": LABELS})


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
    with pytest.raises(ConfigError, match=said):
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


class Returns(Task):
    """Returns what a function makes of the loss."""

    def __init__(self, made) -> None:
        self.made = made

    def step(self, model, batch):
        return self.made(model(batch).square().mean())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda loss: {"loss": loss}, r"step returned a dict: return the loss, a scalar tensor, or .*Step\(loss, n"),
        (lambda loss: (loss, 4), "step returned a tuple"),
        (lambda loss: None, "step returned a NoneType"),
        (lambda loss: Step(0), r"Step.loss is a int: return the loss, a scalar tensor"),
        (lambda loss: Step(loss, 4, {"loss": loss}), "sums have 'loss', a name of the loop's own"),
        (lambda loss: Step(loss, 4, {"n": 4}), "sums have 'n', a name of the loop's own"),
        (lambda loss: Step(loss, 4, {"boxes/n": 4}), "sums have 'boxes/n', a name of the loop's own"),
        (lambda loss: Step(loss, 4, {"right": torch.ones(4)}), r"'right' is \(4,\) float32: add it up.*define Returns"),
        (lambda loss: Step(loss, 4, {"right": torch.ones(1)}), r"'right' is \(1,\) float32: add it up"),
        (lambda loss: Step(loss, 4, {"right": [1, 2]}), r"'right' is \[int, int\]: give a number, a tensor, or a pair"),
        (lambda loss: Step(loss, -1), r"the task's n is -1: .*give 0 or more"),
        (lambda loss: Step(loss, torch.tensor(float("nan"))), r"the task's n is nan: "),
        (lambda loss: loss.detach(), r"depends on none of the weights.*return Step\(loss, n=0\)"),
    ],
)
def test_what_a_task_returns_is_refused_by_what_it_is(made, said):
    with pytest.raises(ConfigError, match=said):
        TrainStep(Returns(made), nn.Linear(3, 1))(torch.ones(4, 3))


@pytest.mark.parametrize("n", [0, torch.tensor(0)])
def test_a_constant_where_nothing_counts_gives_each_weight_a_gradient_of_zero(n):
    model = nn.Linear(3, 1)
    step = TrainStep(Returns(lambda loss: Step(torch.tensor(torch.nan), n)), model)(torch.ones(4, 3))
    step.loss.backward()
    assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in model.parameters())


def test_pairs_and_numbers_are_sums_and_a_task_with_metrics_of_its_own_may_have_any_shape():
    class Own(Returns):
        def metrics(self, sums):
            return {}

    sums = {"right": (torch.tensor(3), 4), "seen": (7, None), "error": 0.5}
    assert TrainStep(Returns(lambda loss: Step(loss, 4, sums)), nn.Linear(3, 1))(torch.ones(4, 3)).sums == sums
    TrainStep(Own(lambda loss: Step(loss, 4, {"each": torch.ones(4)})), nn.Linear(3, 1))(torch.ones(4, 3))


def test_a_loss_of_each_sample_is_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"the loss is \(3,\) float32, and must be a scalar: return its mean"):
        as_step(torch.zeros(3))
