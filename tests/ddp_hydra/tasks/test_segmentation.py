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


@pytest.mark.parametrize("masks", [MASKS.float(), MASKS.half(), MASKS.int(), MASKS.double()], ids=str)
def test_whole_numbers_are_classes_whatever_their_type(masks):
    for criterion, outputs in ((None, OUTPUTS.expand(2, 3, 2, 2)), (torch.nn.BCEWithLogitsLoss(), OUTPUTS)):
        task = Segmentation(criterion, ignore=255)
        found, right = (task.step(lambda x: x, (outputs, one)) for one in (masks, MASKS))
        assert torch.equal(found.loss, right.loss)
        assert torch.equal(found.target, MASKS)
    is_class = MASKS == 1
    found, right = (
        Segmentation(torch.nn.BCEWithLogitsLoss()).step(lambda x: x, (OUTPUTS, one))
        for one in (is_class, is_class.long())
    )
    assert torch.equal(found.loss, right.loss)


SOFT = torch.tensor([[[0.75, 0.25], [0.0, 255.0]], [[1.0, 255.0], [0.5, 0.1]]])


@pytest.mark.parametrize("ignore", [255, -100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("criterion", "outputs"), [(torch.nn.BCEWithLogitsLoss(), OUTPUTS), (torch.nn.BCELoss(), OUTPUTS.sigmoid())]
)
def test_shares_of_a_class_go_to_the_loss_as_they_are(criterion, outputs, dtype, ignore):
    task, outputs = Segmentation(criterion, ignore=ignore), outputs.to(dtype)
    masks = SOFT.where(SOFT != 255, ignore)
    step, counted = task.step(lambda x: x, (outputs, masks)), masks != ignore
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    right = criterion(outputs[:, 0][counted].to(precise), masks[counted].to(precise))
    assert torch.equal(step.loss, right)
    assert step.target.tolist() == [[[1, 0], [0, ignore]], [[1, ignore], [0, 0]]]
    assert (int(step.n), step.sums["pixels"], step.sums["intersection"].tolist()) == (6, 6, [2, 2])


def test_a_loss_of_ones_own_gets_shares_as_they_are():
    seen = []
    task = Segmentation(lambda output, masks: seen.append(masks) or output.mean())
    masks = torch.tensor([[[0.25, 1.0]]])
    assert task.step(lambda x: x, (torch.rand(1, 1, 1, 2), masks)).target.tolist() == [[[0, 1]]]
    assert torch.equal(seen[0], masks)


@pytest.mark.parametrize(
    ("criterion", "n_channels", "values", "held"),
    [
        (None, 3, [0.0, 1 / 255], "0.003922"),
        (dice, 1, [0.0, 1.5], "1.5"),
        (torch.nn.BCEWithLogitsLoss(), 1, [0.5, 1.25], "1.25"),
        (torch.nn.BCEWithLogitsLoss(), 1, [0.5, -1.0], "-1"),
        (torch.nn.BCEWithLogitsLoss(), 1, [0.5, float("nan")], "nan"),
        (None, 3, [0.0, float("inf")], "inf"),
    ],
)
def test_masks_of_fractions_that_are_no_shares_are_refused(criterion, n_channels, values, held):
    said = rf"hold {held}: give class numbers, .*scale=False, or shares of one class.*BCEWithLogitsLoss"
    with pytest.raises(ConfigError, match=said):
        Segmentation(criterion).step(lambda x: x, (torch.rand(1, n_channels, 1, 2), torch.tensor([[values]])))


@pytest.mark.parametrize("criterion", [None, torch.nn.BCEWithLogitsLoss(), dice])
@pytest.mark.parametrize("wrong", [-1, 7])
def test_masks_of_other_numbers_are_refused_with_the_key_of_this_task(criterion, wrong):
    n_channels = 3 if criterion is None else 1
    masks = torch.tensor([[[0, wrong], [1, 255]]])
    with pytest.raises(ConfigError, match=rf"hold class {wrong}, .* or task\.ignore=<class>$"):
        Segmentation(criterion, ignore=255).step(lambda x: x, (torch.rand(1, n_channels, 2, 2), masks))


@pytest.mark.parametrize(
    ("criterion", "said"),
    [
        (torch.nn.CrossEntropyLoss(torch.ones(2)), r"^task\.criterion\.weight has 2 numbers"),
        (torch.nn.BCEWithLogitsLoss(), r"for the numbers of classes, give task\.criterion=null \("),
    ],
)
def test_a_criterion_that_can_not_take_the_masks_is_named_by_the_key_of_this_task(criterion, said):
    with pytest.raises(ConfigError, match=said):
        Segmentation(criterion).step(lambda x: x, (torch.rand(2, 3, 2, 2), torch.ones(2, 2, 2).long()))
