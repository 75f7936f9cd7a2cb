"""Defines what a training step means: its loss, the sums that its metrics are made of, and what is predicted."""

from ddp_hydra.tasks.base import Step, Task
from ddp_hydra.tasks.classification import Classification, LanguageModel
from ddp_hydra.tasks.model_loss import ModelLoss
from ddp_hydra.tasks.regression import Regression
from ddp_hydra.tasks.segmentation import Segmentation

__all__ = ["Classification", "LanguageModel", "ModelLoss", "Regression", "Segmentation", "Step", "Task"]
