"""How a step weighs its micro-batches in the loop: with a loss scale, with clipping, after a resume, and by hooks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.tasks import Step, Task
from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import Numbers, check_resume, flat, weights
from tests.ddp_hydra.training.plain_torch import CONSTANT, begin_alike


class Some(Task):
    """Counts the samples of class 0 and 1, of which a micro-batch may have none."""

    def __init__(self, metric: str = "loss") -> None:
        pass

    def step(self, model, batch):
        x, y = batch
        counts = y < 2
        losses = F.cross_entropy(model(x).float(), y, reduction="none")
        return Step((losses * counts).sum() / counts.sum(), counts.sum())


class Sum(Task):
    """A loss that is a sum."""

    def __init__(self, metric: str = "loss") -> None:
        pass

    def step(self, model, batch):
        x, y = batch
        return Step(F.cross_entropy(model(x), y, reduction="sum"), summed=True)


class Clamped(nn.Linear):
    """Clamps its gradients, the usual recipe against ones that explode."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        begin_alike(self)
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


SOME = {
    "task": {"_target_": f"{__name__}.Some", "metric": "loss"},
    "objective": {"metric": "val/loss", "direction": "minimize"},
}


def split(train, parts, size, **options):
    return train(parts={**SOME, "data": {"batch_size": size}}, gradient_accumulation_steps=parts, **options)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-6),
        ({"clip_norm": 0.05}, 1e-6),
        ({"precision": "fp16"}, 2e-3),
        ({"precision": "fp16", "clip_norm": 0.05}, 2e-3),
        ({"precision": "bf16"}, 2e-2),
        ({"ema_decay": 0.9}, 1e-6),
    ],
    ids=str,
)
def test_micro_batches_of_different_weight_make_the_step_of_one_batch(train, options, tolerance):
    whole = split(train, 1, 4, **options)
    for parts, size in ((2, 2), (4, 1)):
        assert torch.allclose(weights(whole), weights(split(train, parts, size, **options)), atol=tolerance)


def test_a_hook_sees_the_gradients_of_torch(train):
    model, task, numbers = Clamped(4, 3), Some(), Numbers(9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(2):
        for batch in Distributed(9, 4).batches(epoch):
            optimizer.zero_grad()
            task.step(model, (numbers.x[list(batch)], numbers.y[list(batch)])).loss.backward()
            optimizer.step()
    clamped = {"model": {"_target_": f"{__name__}.Clamped", "in_features": 4, "out_features": 3}}
    run = train(whole={**clamped, "scheduler": CONSTANT}, parts={**SOME, "data": {"batch_size": 4}})
    assert flat(read(run.last)["model"]) == flat(model.state_dict())


@pytest.mark.medium
@pytest.mark.parametrize("options", [{}, {"precision": "fp16", "clip_norm": 0.05}], ids=str)
def test_a_resumed_run_weighs_as_the_uninterrupted_one(train, options):
    check_resume(train, parts={**SOME, "data": {"batch_size": 2}}, gradient_accumulation_steps=2, **options)


@pytest.mark.medium
def test_a_sum_stays_a_sum(train):
    summed = {**SOME, "task": {"_target_": f"{__name__}.Sum", "metric": "loss"}, "optimizer": {"lr": 0.001}}
    runs = [
        train(parts={**summed, "data": {"batch_size": size}}, gradient_accumulation_steps=parts, epochs=1)
        for parts, size in ((1, 4), (2, 2), (4, 1))
    ]
    for run in runs[1:]:
        assert torch.allclose(weights(runs[0]), weights(run), atol=1e-6)


class Broken(Numbers):
    """Its first sample can't be read, and its collate leaves it out."""

    def __getitem__(self, index):
        return None if index == 0 else super().__getitem__(index)

    def collate(self, samples):
        return default_collate([sample for sample in samples if sample is not None])


def focal(prediction, target):
    losses = F.cross_entropy(prediction, target, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


@pytest.mark.medium
def test_samples_that_a_collate_leaves_out_do_not_count_whatever_the_batches(train):
    loss = {"loss": {"_target_": f"{__name__}.focal", "_partial_": True}}

    def run(parts, size):
        return train(data=Broken, whole=loss, parts={"data": {"batch_size": size}}, gradient_accumulation_steps=parts)

    whole, cut = run(1, 4), run(2, 2)
    assert torch.allclose(weights(whole), weights(cut), atol=1e-6)
    for name in ("train/loss", "val/loss"):
        assert cut.metrics(name) == [(step, pytest.approx(value, rel=1e-5)) for step, value in whole.metrics(name)]
