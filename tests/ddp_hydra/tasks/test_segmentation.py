from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Segmentation
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.metrics import Meter, count
from ddp_hydra.training.train_step import as_step
from ddp_hydra.training.update import Weighing


def test_a_batch_without_a_pixel_that_counts_counts_nothing_and_breaks_nothing():
    model = torch.nn.Conv2d(1, 3, 1)
    step = as_step(Segmentation(ignore=255).step(model, (torch.rand(2, 1, 4, 4), torch.full((2, 4, 4), 255))))
    assert (int(step.n), step.loss.item()) == (0, 0.0)
    Weighing(2, StepConsensus()).weigh(step, 2).backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(("n_classes", "dtype"), [(256, torch.uint8), (257, torch.int32)])
def test_each_class_has_its_number(n_classes, dtype):
    logits = torch.zeros(1, n_classes, 2, 2)
    logits[:, -1] = 1
    found = Segmentation().predict(lambda x: logits, None)
    assert (found.dtype, found.unique().tolist()) == (dtype, [n_classes - 1])


OUTPUTS = torch.tensor([[[[2.0, -1.0], [0.5, -3.0]]], [[[1.0, 4.0], [-2.0, 0.1]]]])  # (2, 1, 2, 2)
MASKS = torch.tensor([[[1, 0], [0, 255]], [[1, 255], [1, 0]]])


def dice(output, masks):
    shares, masks = output[:, 0].sigmoid(), masks == 1
    return 1 - 2 * (shares * masks).sum() / (shares.sum() + masks.sum())


@pytest.mark.parametrize(
    ("criterion", "outputs"),
    [
        (torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), OUTPUTS),
        (torch.nn.BCELoss(), OUTPUTS.sigmoid()),
        (dice, OUTPUTS),
    ],
    ids=["logits", "probabilities", "own"],
)
def test_a_model_of_one_channel_tells_two_classes(criterion, outputs):
    import torchmetrics

    task, meter, jaccard = (
        Segmentation(criterion, ignore=255),
        Meter(torch.device("cpu")),
        torchmetrics.JaccardIndex("binary"),
    )
    for x, y in zip(outputs.split(1), MASKS.split(1), strict=True):
        step = task.step(lambda x: x, (x, y))
        meter.add(count(step, 1))
        task.update_metric(jaccard, step)
    counted, guess = MASKS != 255, OUTPUTS[:, 0] > 0
    assert task.predict(lambda x: x, outputs).tolist() == guess.int().tolist()
    found, truth = task.metrics(meter.result()), MASKS[counted] == 1
    iou = [
        (guess[counted] & truth).sum() / (guess[counted] | truth).sum(),
        (~guess[counted] & ~truth).sum() / (~guess[counted] | ~truth).sum(),
    ]
    assert found["accuracy"] == pytest.approx((guess[counted] == truth).double().mean().item())
    assert found["iou"] == pytest.approx(sum(map(float, iou)) / 2)
    assert float(jaccard.compute()) == pytest.approx(float(iou[0]))
    if criterion is not dice:
        assert found["loss"] == pytest.approx(float(criterion(outputs[:, 0][counted], truth.float())))


@pytest.mark.parametrize("criterion", [None, torch.nn.CrossEntropyLoss(), torch.nn.NLLLoss()])
def test_a_cross_entropy_of_one_channel_is_refused(criterion):
    with pytest.raises(ConfigError, match="one channel, whose cross-entropy is 0"):
        Segmentation(criterion).step(lambda x: x, (OUTPUTS, MASKS))


@pytest.mark.parametrize("n_channels", [1, 3])
def test_masks_of_classes_that_the_output_does_not_tell_are_refused(n_channels):
    task = Segmentation(lambda output, masks: output.mean())
    with pytest.raises(ConfigError, match=f"hold class 255, and the model's output has {n_channels} channel"):
        task.step(lambda x: x, (torch.rand(2, n_channels, 2, 2), MASKS))


def test_metrics_of_classes_get_the_pixels_that_count():
    import torchmetrics

    task, logits = Segmentation(ignore=255), torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    metric = torchmetrics.Accuracy("multiclass", num_classes=3, average="micro")
    step = task.step(lambda x: x, (logits, MASKS))
    task.update_metric(metric, step)
    counted = MASKS != 255
    assert float(metric.compute()) == pytest.approx(float((logits.argmax(1) == MASKS)[counted].double().mean()))
    assert float(step.loss) == pytest.approx(float(F.cross_entropy(logits, MASKS, ignore_index=255)))
