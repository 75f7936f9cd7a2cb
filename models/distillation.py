"""Defines a task that distils a trained model, the teacher, into a smaller one (Hinton et al., 2015)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ddp_hydra.tasks import Classification, Step
from ddp_hydra.training import load_run


class Distillation(Classification):
    """Trains a classifier on the answers of a teacher, too. The teacher is frozen.

    Labels that the loss leaves out count in no part of the loss, and weights of classes in both.

    Args:
        teacher: run directory of the teacher, or its URL; each host must be able to read it.
        temperature: both models' scores are divided by it, so that small ones count more.
        share: of the teacher in the loss, 0..1; the rest is the labels'.
        options: of `Classification`.
    """

    def __init__(self, teacher: str, temperature: float = 4.0, share: float = 0.7, **options: Any) -> None:
        super().__init__(**options)
        self.teacher = load_run.load(teacher).model.requires_grad_(False)
        self.temperature, self.share = temperature, share

    def step(self, model: Any, batch: Any) -> Step:
        """Add the distance to the teacher's answers to the loss."""
        x, y = self.mixed(batch)  # once: both models see the same
        step = self.counted(self.counting, model(x), y)
        with torch.no_grad():
            axis = -1 if (found := self.axis_of(step.prediction, y)) is None else found
            goal = (self.teacher(x) / self.temperature).softmax(axis)
        answer = (step.prediction / self.temperature).log_softmax(axis)
        distance = F.kl_div(answer, goal, reduction="none").sum(axis)
        if not y.is_floating_point():
            weights = self.counting.place_weights(y)
            distance = distance * (y != self.counting.ignore if weights is None else weights.to(distance.dtype))
        n = 1 if step.summed else len(y) if step.n is None else step.n
        distance = distance.sum() * self.temperature**2 / n  # in this order: a number / n would be of 32 bits
        return step._replace(loss=self.share * distance + (1 - self.share) * step.loss)
