"""Defines a task that distils a trained model, the teacher, into a smaller one (Hinton et al., 2015)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ddp_hydra.tasks import Classification, Step
from ddp_hydra.training import load_run


class Distillation(Classification):
    """Trains a classifier on the answers of a teacher, too. The teacher is frozen.

    Args:
        teacher: run directory of the teacher, or its URL; each host must be able to read it.
        temperature: both models' scores are divided by it, so that small ones count more.
        share: of the teacher in the loss, 0..1; the rest is that of the labels.
        options: of `Classification`.
    """

    def __init__(self, teacher: str, temperature: float = 4.0, share: float = 0.7, **options: Any) -> None:
        super().__init__(**options)
        self.teacher = load_run.load(teacher).model.requires_grad_(False)
        self.temperature, self.share = temperature, share

    def step(self, model: Any, batch: Any) -> Step:
        """Add the distance to the teacher's answers to the loss."""
        step = super().step(model, batch)
        with torch.no_grad():
            goal = (self.teacher(batch[0]) / self.temperature).softmax(-1)
        answer = (step.prediction / self.temperature).log_softmax(-1)
        distance = F.kl_div(answer, goal, reduction="batchmean") * self.temperature**2
        return step._replace(loss=self.share * distance + (1 - self.share) * step.loss)
