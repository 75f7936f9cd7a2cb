"""The character LSTM: shapes, causality, and what a bad argument says."""

from __future__ import annotations

import pytest
import torch

from models.char_lstm import CharLSTM


@pytest.mark.parametrize("num_layers", [4, 1])  # one layer needs no dropout, of which torch would warn
def test_gives_logits_for_every_position(num_layers):
    assert CharLSTM(num_classes=31, num_layers=num_layers)(torch.zeros(3, 8, 31)).shape == (3, 8, 31)


def test_a_later_character_changes_no_earlier_prediction():
    model = CharLSTM(num_classes=5, hidden_size=8, num_layers=2).eval()
    one, other = torch.zeros(1, 6, 5), torch.zeros(1, 6, 5)
    other[0, 4, 2] = 1
    with torch.no_grad():
        difference = (model(one) - model(other)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:4] == 0)
    assert torch.all(difference[4:] > 0)


@pytest.mark.parametrize("name", ["num_classes", "hidden_size", "num_layers"])
def test_a_size_that_is_not_positive_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"{name} is 0.*model\.{name}="):
        CharLSTM(**{"num_classes": 4, name: 0})
