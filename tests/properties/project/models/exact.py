"""Data sets, models, tasks and losses in float64, which draw nothing from global generators.

They stand in one file, so that the test can import them without the project space.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hydra.tasks import Step, Task

CLASSES, FEATURES, TIME, SIDE, TOKENS = 3, 5, 6, 4, 7
WEIGHTS = [1.0, 5.0, 0.5]


class Exact(Dataset[Any]):
    """Samples of a kind.

    Args:
        kind: classes, ignored, numbers, pixels, tokens, labels (a dict) or several (labels of one sample).
        n: number of samples.
        seed: of what they are made of.
    """

    num_classes = CLASSES

    def __init__(self, kind: str, n: int, seed: int = 0) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.x: Tensor = torch.randn(n, FEATURES, generator=chance, dtype=torch.float64)
        self.kind = kind
        if kind in ("classes", "ignored"):
            self.y = torch.randint(CLASSES, (n,), generator=chance)
            if kind == "ignored":
                self.y[torch.rand(n, generator=chance) < 0.5] = -100
        elif kind == "numbers":
            self.y = torch.randn(n, 2, generator=chance, dtype=torch.float64)
        elif kind == "several":
            self.y = torch.randint(2, (n, CLASSES), generator=chance).double()
        elif kind == "pixels":
            self.x = torch.randn(n, 1, SIDE, SIDE, generator=chance, dtype=torch.float64)
            self.y = torch.randint(CLASSES, (n, SIDE, SIDE), generator=chance)
            self.y[torch.rand(n, SIDE, SIDE, generator=chance) < torch.rand(n, 1, 1, generator=chance)] = 255
        else:
            self.x = torch.randint(1, TOKENS, (n, TIME), generator=chance)
            self.y = torch.randint(1, TOKENS, (n, TIME), generator=chance)
            lengths = torch.randint(0, TIME + 1, (n, 1), generator=chance)
            self.y[torch.arange(TIME) >= lengths] = -100 if kind == "labels" else 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x, y = self.x[index], self.y[index]
        return {"tokens": x, "labels": y} if self.kind == "labels" else (x, y)


def exact(kind: str) -> nn.Module:
    """Return a model for a kind of data."""
    made: nn.Module
    if kind in ("tokens", "labels"):
        made = Tokens(kind == "labels")
    elif kind == "pixels":
        made = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, CLASSES, 1))
    elif kind == "two parts":
        made = nn.ModuleDict({name: nn.Linear(FEATURES, CLASSES) for name in ("one", "other")})
    else:
        made = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2 if kind == "numbers" else CLASSES))
    made = made.double()
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance, dtype=torch.float64) / 2)
    return made


class Tokens(nn.Module):
    """Scores of the next token; or the mean loss of the tokens that count, as transformers' models give it.

    Args:
        gives_loss: a loss.
    """

    def __init__(self, gives_loss: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(TOKENS, 6), nn.Linear(6, TOKENS)
        self.gives_loss = gives_loss

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        """Score each place."""
        scores = self.head(self.table(tokens).tanh())
        if not self.gives_loss:
            return scores
        loss = None if labels is None else F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": scores}


def weighted() -> nn.Module:
    """Return a loss with a weight for each class."""
    return nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64))


class Centres(nn.Module):
    """A loss with parameters: a centre for each class, to which it draws the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.linspace(-1, 1, CLASSES * CLASSES, dtype=torch.float64).view(CLASSES, -1))

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the mean over the samples."""
        return F.cross_entropy(scores, y) + (scores - self.centres[y]).square().sum(-1).mean()


class Own(Task):
    """Counts the tokens that are not padding, and says so; its metric has a count of its own."""

    def step(self, model: Any, batch: Any) -> Step:
        """Compute the mean squared score of the tokens that count, and the share of the first half that is right."""
        x, y = batch
        scores, counts = model(x), y > 0
        n = counts.sum()
        loss = (scores.square().mean(-1) * counts).sum() / n.clamp(min=1)
        half = counts[:, ::2]
        right = (scores.argmax(-1)[:, ::2] == y[:, ::2]) & half
        return Step(loss, n, {"even": (right.sum(), half.sum())})


class Plain(Task):
    """Returns nothing but a mean over the samples."""

    def step(self, model: Any, batch: Any) -> Tensor:
        """Compute a loss of its own."""
        x, y = batch
        return (model(x) - F.one_hot(y, CLASSES)).abs().sum(-1).mean()


class Parts(Task):
    """Updates two parts, one after the other; each weighs its samples in its own way."""

    def updates(self, step: int) -> tuple[str, ...]:
        """Return both."""
        return ("one", "other")

    def step(self, model: Any, batch: Any, update: str = "one") -> Step:
        """Compute the loss of a part: over all samples, or over those of class 0."""
        x, y = batch
        losses = F.cross_entropy(model[update](x), y, reduction="none")
        if update == "one":
            return Step(losses.mean(), len(y))
        counts = y == 0
        return Step((losses * counts).sum() / counts.sum().clamp(min=1), counts.sum())


class Drawing(Dataset[Any]):
    """Adds noise of all three global generators to each sample."""

    num_classes = CLASSES

    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(n))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return self.x[index] + float(noise), index % CLASSES


def noisy() -> nn.Module:
    """Return a model with batch statistics and dropout."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))
