"""A model that computes its own loss from a dict batch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from models.tiny import Tiny


class WithLoss(nn.Module):
    def __init__(self, dropout: float = 0.0, tell: bool = False) -> None:
        super().__init__()
        self.tiny = Tiny(num_classes=4, dropout=dropout, tell=tell)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.tiny(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}
