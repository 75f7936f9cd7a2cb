"""Turns gradients into new weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from ddp_hydra.training.finite import GradientNorms
from ddp_hydra.training.parallel import Parallel


class OptimizerStep:
    """Takes optimizer steps: scales the loss, clips gradients, and updates the weights of the model or of a part of it.

    Args:
        parallel: the training step among its ranks.
        optimizer: of what the step trains.
        scaler: scales the loss of fp16; disabled for other precisions.
        clip_norm: the largest norm of all gradients together; None for no limit.
        update: name of the update that this is for; "" for the only one.

    Attributes:
        gradients: norms of the last step's gradients; None if they are scaled.
        lr: learning rate of the last step.
        grad_norm: norm of the last step's gradients before clipping; None without clipping.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        clip_norm: float | None = None,
        update: str = "",
    ) -> None:
        self.parallel, self.optimizer = parallel, optimizer
        self.scaler, self.clip_norm, self.update = scaler, clip_norm, update
        names = {parameter: name for name, parameter in parallel.part.named_parameters(prefix=update)}
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
        """Clip the gradients, and update the weights."""
        if self.clip_norm is not None and self.gradients is not None and not self.gradients.sparse:
            self.grad_norm = self.gradients.total_norm
            self.gradients.clip(self.clip_norm)
        elif self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            self.grad_norm = nn.utils.clip_grad_norm_([parameter for _, parameter in self.trained], self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.parallel.after_step()

    def metrics(self) -> dict[str, float]:
        """Return the learning rate and, where they exist, the gradient norm and the loss scale."""
        prefix = f"{self.update}/" if self.update else ""
        found = {f"{prefix}lr": self.lr}
        if self.grad_norm is not None:
            found[f"{prefix}grad_norm"] = float(self.grad_norm)
        if self.scaler.is_enabled():
            found[f"{prefix}loss_scale"] = float(self.scaler.get_scale())
        return found
