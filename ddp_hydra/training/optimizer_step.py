"""From a loss to new weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from ddp_hydra.training.ema import Ema
from ddp_hydra.training.finite import Gradients
from ddp_hydra.training.parallel import Parallel


class OptimizerStep:
    """One optimizer step, with all that belongs to it.

    Args:
        model: whose weights.
        optimizer: its optimizer.
        scaler: of the gradients; disabled but for fp16.
        clip_norm: longest gradient, over all parameters; None for any.
        ema: the moving average of the weights; None for none.

    Attributes:
        gradients: of the last step, where somebody looks at them.
        lr: learning rate of the last step.
        grad_norm: length of the last gradient before it was clipped, where that is known.
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
        names = {part: name for name, part in model.model.named_parameters()}
        self.trained = [(names[part], part) for group in optimizer.param_groups for part in group["params"]]
        self.gradients: Gradients | None = None
        self.lr = 0.0
        self.grad_norm: torch.Tensor | None = None
        # The schedule goes on where a step was left out, which torch takes for a mistake where it is the first.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: torch.Tensor) -> None:
        """Add a part's gradients."""
        self.scaler.scale(loss).backward()

    def measure(self, losses: Sequence[torch.Tensor] = ()) -> Gradients | None:
        """Take the lengths of the gradients, which are the same on all ranks now.

        Args:
            losses: of the step's parts, on this rank.

        Returns:
            None where the loss is scaled: then it is for the scaler to look at them, and to lower the scale.
        """
        self.gradients = None if self.scaler.is_enabled() else Gradients(self.trained, losses)
        return self.gradients

    def apply(self) -> None:
        """Step."""
        if self.clip_norm is not None and self.gradients is not None and not self.gradients.sparse:
            self.grad_norm = self.gradients.total
            self.gradients.clip(self.clip_norm)
        elif self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            self.grad_norm = nn.utils.clip_grad_norm_([part for _, part in self.trained], self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.model.after_step()
        if self.ema is not None:
            self.ema.update(self.model.model)

    def discard(self) -> None:
        """Leave the step out."""
        self.model.forget()

    def synchronise(self) -> None:
        """Make the weights, and their average, the same on all ranks; before they are judged or saved. A collective."""
        self.model.synchronise(*([self.ema.model] if self.ema is not None else []))

    def metrics(self) -> dict[str, float]:
        """What is logged: the learning rate, and what else there is."""
        found = {"lr": self.lr}
        if self.grad_norm is not None:
            found["grad_norm"] = float(self.grad_norm)
        if self.scaler.is_enabled():
            found["loss_scale"] = float(self.scaler.get_scale())
        return found
