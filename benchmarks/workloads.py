"""Makes what both sides train: a tiny model, and data sets in memory. Nothing here imports ddp_hydra."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InMemory:
    """Tensors in memory, a batch at a time.

    Args:
        x: inputs, (samples, …).
        y: targets, (samples, …).
        num_classes: how many the targets have.
    """

    thread_safe = True

    def __init__(self, x: Tensor, y: Tensor, num_classes: int) -> None:
        self.x, self.y, self.num_classes = x, y, num_classes

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self.x[chosen], self.y[chosen]

    def collate(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a batch, which is one already."""
        return batch

    def prepare(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Nothing to prepare."""
        return batch


class Vectors(InMemory):
    """Random vectors in ten classes, for the tiny model."""

    def __init__(self, n_samples: int) -> None:
        super().__init__(torch.randn(n_samples, 64), torch.randint(10, (n_samples,)), 10)


class LoudVectors(InMemory):
    """Random vectors so long that scaled gradients overflow in fp16."""

    def __init__(self, n_samples: int) -> None:
        super().__init__(100 * torch.randn(n_samples, 64), torch.randint(10, (n_samples,)), 10)


class DigitVectors(InMemory):
    """scikit-learn's handwritten digits, 64 pixels each.

    Args:
        split: "train", or "val": every fifth image.
    """

    def __init__(self, split: str) -> None:
        from data.digits import Digits

        digits = Digits(split)
        super().__init__(digits.images.flatten(1), digits.labels, digits.num_classes)


class Images(InMemory):
    """Random images of 32x32 pixels in ten classes."""

    def __init__(self, n_samples: int) -> None:
        super().__init__(torch.randn(n_samples, 3, 32, 32), torch.randint(10, (n_samples,)), 10)


class Crops(InMemory):
    """Random images of bytes in a thousand classes. A few hundred stand for all: as many as fit into any memory.

    Args:
        n_samples: length of the data set.
        side: height and width of an image.
    """

    thread_safe = True

    def __init__(self, n_samples: int, side: int = 224) -> None:
        self.n_samples = n_samples
        kept = min(n_samples, 512)
        super().__init__(
            torch.randint(256, (kept, 3, side, side), dtype=torch.uint8), torch.randint(1000, (kept,)), 1000
        )

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index % len(self.x))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return super().__getitems__([index % len(self.x) for index in indices])

    def prepare(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Numbers from -1 to 1, on the device."""
        x, y = batch
        return x.float().div(127.5).sub(1), y


class Windows(InMemory):
    """Random windows of eight characters, and the character after each, as of the pet names."""

    thread_safe = True

    def __init__(self, n_samples: int) -> None:
        text = torch.randint(31, (n_samples, 9), dtype=torch.uint8)
        super().__init__(text[:, :-1].contiguous(), text[:, 1:].contiguous(), 31)

    def prepare(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """One-hot characters, float (batch, 8, 31), and the ones after them, (batch, 8)."""
        x, y = batch
        return F.one_hot(x.long(), self.num_classes).float(), y.long()


class PaddedWindows(Windows):
    """Windows of which 1 to 8 characters count, so that each step counts another number; the others are -100."""

    def __init__(self, n_samples: int) -> None:
        super().__init__(n_samples)
        lengths = torch.randint(1, 9, (n_samples, 1))
        self.y = self.y.short().where(torch.arange(8) < lengths, -100)


class Fields(InMemory):
    """Random samples of 20 fields and a class, in a dict."""

    thread_safe = True

    def __init__(self, n_samples: int) -> None:
        super().__init__(torch.randn(n_samples, 20, 16), torch.randint(10, (n_samples,)), 10)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:  # type: ignore[override]
        return self.batch(torch.tensor(indices))

    def batch(self, chosen: Tensor) -> dict[str, Tensor]:
        """Return the fields "f0" … "f19", each (batch, 16), and "labels", (batch,)."""
        fields = self.x[chosen].unbind(1)
        return {f"f{number}": field for number, field in enumerate(fields)} | {"labels": self.y[chosen]}


class FieldsModel(nn.Module):
    """A layer for each field, and one for all; it returns its own loss."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fields = nn.ModuleList(nn.Linear(16, 32) for _ in range(20))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(640, 256), nn.ReLU(), nn.Linear(256, num_classes))

    def forward(self, labels: Tensor, **fields: Tensor) -> dict[str, Tensor]:
        """Return logits and loss."""
        parts = [layer(fields[f"f{number}"]) for number, layer in enumerate(self.fields)]
        logits = self.head(torch.cat(parts, dim=1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Pictures(InMemory):
    """Random grey images of 16x16 pixels, for a GAN."""

    thread_safe = True

    def __init__(self, n_samples: int) -> None:
        super().__init__(torch.rand(n_samples, 1, 16, 16), torch.zeros(n_samples), 1)


class MLP(nn.Sequential):
    """So small a model that a launch is all there is to measure."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, num_classes))


class StampedSGD(torch.optim.SGD):
    """SGD that writes down when rank 0 has done its first step.

    Args:
        params: what to optimize.
        lr: learning rate.
        stamp: file that gets the time, in seconds since the epoch.
    """

    def __init__(self, params: Any, lr: float, stamp: str) -> None:
        super().__init__(params, lr)
        self._stamp: Path | None = Path(stamp) if os.environ.get("RANK", "0") == "0" else None

    def step(self, closure: Any = None) -> Any:
        """Do one step; write down the time of the first."""
        loss = super().step(closure)
        if self._stamp is not None:
            self._stamp.write_text(repr(time.time()))
            self._stamp = None
        return loss


class TracedSGD(torch.optim.SGD):
    """SGD that tells which rank steps, and when: what a benchmark needs that kills ranks and sees them come back.

    Its count of steps is part of its state, so a checkpoint brings it back. `<folder>/rank-<n>` has the process ids of
    a rank and of its Dask worker, `<folder>/steps` a line for each step of rank 0: the time, its process id, the count.

    Args:
        params: what to optimize.
        lr: learning rate.
        step_s: pause in each step, as if it were a larger model's.
        folder: where to write.
    """

    def __init__(self, params: Any, lr: float, step_s: float, folder: str) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["count"] = 0
        self._step_s, self._file = step_s, -1
        rank, worker = os.environ["RANK"], os.environ.get("BENCH_WORKER", "0")
        draft = Path(folder) / f".rank-{rank}"
        draft.write_text(json.dumps({"rank": os.getpid(), "worker": int(worker)}))
        draft.replace(Path(folder) / f"rank-{rank}")
        if rank == "0":
            self._file = os.open(Path(folder) / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, closure: Any = None) -> Any:
        """Do one step."""
        loss = super().step(closure)
        self.param_groups[0]["count"] += 1
        if self._file >= 0:
            os.write(self._file, f"{time.time()} {os.getpid()} {self.param_groups[0]['count']}\n".encode())
        time.sleep(self._step_s)
        return loss
