"""Defines a character-level LSTM, as in the pet-names example."""

from __future__ import annotations

from torch import Tensor, nn


class CharLSTM(nn.Module):
    """Predicts the next character at every position of a window.

    Args:
        num_classes: number of characters in the alphabet.
        hidden_size: width of each LSTM layer.
        num_layers: number of LSTM layers.
        dropout: probability that a value between two layers is dropped in training, 0..1.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(self, num_classes: int, hidden_size: int = 128, num_layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        for name, size in (("num_classes", num_classes), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}, and must be a positive whole number: type model.{name}=1")
        # nn.LSTM drops only between layers, and warns if there is only one.
        between = dropout if num_layers > 1 else 0.0
        self.lstm = nn.LSTM(num_classes, hidden_size, num_layers, batch_first=True, dropout=between)
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next characters.

        Args:
            x: one-hot characters, float (batch, time, num_classes).

        Returns:
            Logits of the next character at each position, (batch, time, num_classes).
        """
        hidden, _ = self.lstm(x)
        return self.head(hidden)
