"""Turns gradients into new weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from ddp_hydra.training.ema import Ema
from ddp_hydra.training.finite import GradientNorms
from ddp_hydra.training.parallel import Parallel


class OptimizerStep:
    """Takes optimizer steps: scales the loss, clips gradients, updates the weights and their average.

    Args:
        model: the model among its ranks.
        optimizer: its optimizer.
        scaler: scales the loss of fp16; disabled for other precisions.
        clip_norm: the largest norm of all gradients together; None for no limit.
        ema: the moving average of the weights; None for none.

    Attributes:
        gradients: norms of the last step's gradients; None if they are scaled.
        lr: learning rate of the last step.
        grad_norm: norm of the last step's gradients before clipping; None without clipping.
    """

    def __init__(
        self,
        model: Parallel,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        clip_norm: float | None = None,
        ema: Ema | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.scaler, self.clip_norm, self.ema = scaler, clip_norm, ema
        names = {parameter: name for name, parameter in model.model.named_parameters()}
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.trained = [(names[parameter], parameter) for parameter in trained]
        self.gradients: GradientNorms | None = None
        self.lr = 0.0
        self.grad_norm: torch.Tensor | None = None
        # The schedule moves on when a step is skipped. If that is the first step, torch would warn of a mistake.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")

    def begin(self) -> None:
        """Clear the last step's gradients."""
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch.

        Args:
            loss: of the micro-batch, times its share of the step.
        """
        self.scaler.scale(loss).backward()

    def measure(self, losses: Sequence[torch.Tensor] = ()) -> GradientNorms | None:
        """Compute the norms of the gradients, after the backward pass.

        Args:
            losses: of the step's micro-batches, on this rank.

        Returns:
            None if the loss is scaled: then the scaler checks the gradients, and lowers the scale.
        """
        self.gradients = None if self.scaler.is_enabled() else GradientNorms(self.trained, losses)
        return self.gradients

    def apply(self) -> None:
        """Clip the gradients, and update the weights and their average."""
        if self.clip_norm is not None and self.gradients is not None and not self.gradients.sparse:
            self.grad_norm = self.gradients.total_norm
            self.gradients.clip(self.clip_norm)
        elif self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            self.grad_norm = nn.utils.clip_grad_norm_([parameter for _, parameter in self.trained], self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.after_step()
        if self.ema is not None:
            self.ema.update(self.model.model)

    def discard(self) -> None:
        """Drop the gradients of a step that is left out."""
        self.model.discard_gradients()

    def synchronise(self) -> None:
        """Make the weights and their average the same on all ranks, before validation or a save. A collective."""
        self.model.synchronise(*([self.ema.model] if self.ema is not None else []))

    def metrics(self) -> dict[str, float]:
        """Return the learning rate and, where they exist, the gradient norm and the loss scale."""
        found = {"lr": self.lr}
        if self.grad_norm is not None:
            found["grad_norm"] = float(self.grad_norm)
        if self.scaler.is_enabled():
            found["loss_scale"] = float(self.scaler.get_scale())
        return found
