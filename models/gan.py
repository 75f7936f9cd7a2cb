"""Defines a generative adversarial network (Goodfellow et al., 2014) for small images, its task, and a look at it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_hydra.tasks import Step, Task
from ddp_hydra.training.callbacks import Callback, RunView


class GAN(nn.Module):
    """A generator and a discriminator.

    Args:
        size: height and width of an image, in pixels.
        noise: numbers that an image is made from.
        width: of each hidden layer.
    """

    def __init__(self, size: int = 8, noise: int = 16, width: int = 128) -> None:
        super().__init__()
        self.size, self.noise = size, noise
        pixels = size * size
        self.generator = nn.Sequential(
            *(nn.Linear(noise, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2)),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2)),
            *(nn.Linear(width, pixels), nn.Sigmoid(), nn.Unflatten(1, (1, size, size))),
        )
        self.discriminator = nn.Sequential(
            *(nn.Flatten(), nn.Linear(pixels, width), nn.LeakyReLU(0.2)),
            *(nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Return images (batch, 1, size, size), 0..1, for noise (batch, noise)."""
        return self.generator(noise)


class Adversarial(Task):
    """Lets the discriminator tell images from the generator's, and the generator deceive it.

    Each step first updates the discriminator, then the generator.
    """

    def updates(self, step: int) -> tuple[str, ...]:
        """Return both, in this order."""
        return ("discriminator", "generator")

    def step(self, model: Any, batch: Any, update: str = "") -> Step:
        """Compute the loss of one of them."""
        real = batch[0]
        noise = torch.randn(len(real), model.noise, device=real.device)
        if update == "generator":
            opinion = model.discriminator(model.generator(noise))
            return Step(F.binary_cross_entropy_with_logits(opinion, torch.ones_like(opinion)), len(real))
        with torch.no_grad():
            made = model.generator(noise)
        on_real, on_made = model.discriminator(torch.cat([real, made])).chunk(2)
        loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        loss = loss + F.binary_cross_entropy_with_logits(on_made, torch.zeros_like(on_made))
        right = (on_real > 0).sum() + (on_made < 0).sum()
        return Step(loss, len(real), {"accuracy": right / 2})


class ShowSamples(Callback):
    """Shows a grid of generated images after each epoch, always of the same noise.

    Args:
        side: images in a row and in a column.
    """

    def __init__(self, side: int = 8) -> None:
        self.side = side

    @torch.no_grad()
    def on_validation(self, run: RunView) -> None:
        """Show them in TensorBoard."""
        model: Any = (run.average or run.model).eval()
        noise = torch.randn(self.side**2, model.noise, generator=torch.Generator().manual_seed(0))
        images = model(noise.to(run.device)).view(self.side, self.side, model.size, model.size)
        run.image("samples", (images.permute(0, 2, 1, 3).reshape(self.side * model.size, -1) * 255).byte())
