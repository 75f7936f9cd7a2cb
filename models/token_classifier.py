"""Defines a small transformer that is called as Hugging Face's models: by keywords, and it returns its own loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TokenClassifier(nn.Module):
    """Classifies sequences of tokens.

    Args:
        num_classes: number of classes.
        num_tokens: number of different tokens.
        length: longest sequence.
        width: of each layer.
        depth: number of layers.
    """

    def __init__(
        self, num_classes: int, num_tokens: int = 17, length: int = 64, width: int = 32, depth: int = 2
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_tokens, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return logits (batch, num_classes) and, where labels (batch,) are given, the loss.

        Args:
            input_ids: (batch, time).
            attention_mask: (batch, time), 0 for tokens to ignore; None: none.
            labels: (batch,) classes.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        x = self.layers(x, src_key_padding_mask=torch.where(mask > 0, 0.0, -torch.inf))
        seen = mask[..., None].to(x.dtype)
        logits = self.head((x * seen).sum(1) / seen.sum(1).clamp(min=1))
        return {"logits": logits} | ({"loss": F.cross_entropy(logits, labels)} if labels is not None else {})
