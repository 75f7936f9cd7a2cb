"""The character LSTM: shapes, causality, and what a bad argument says."""

from __future__ import annotations

import pytest
import torch

from models.char_lstm import CharLSTM


def test_gives_logits_for_every_position():
    assert CharLSTM(num_classes=31)(torch.zeros(3, 8, 31)).shape == (3, 8, 31)


def test_a_later_character_changes_no_earlier_prediction():
    model = CharLSTM(num_classes=5, hidden_size=8, num_layers=2).eval()
    one, other = torch.zeros(1, 6, 5), torch.zeros(1, 6, 5)
    other[0, 4, 2] = 1
    with torch.no_grad():
        difference = (model(one) - model(other)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:4] == 0)
    assert torch.all(difference[4:] > 0)


def test_dropout_acts_in_training_only():
    model = CharLSTM(num_classes=5, hidden_size=8, dropout=0.5)
    x = torch.rand(2, 4, 5)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_one_layer_needs_no_dropout_and_gives_no_warning():
    assert CharLSTM(num_classes=4, num_layers=1, dropout=0.1)(torch.zeros(1, 2, 4)).shape == (1, 2, 4)


@pytest.mark.parametrize("name", ["num_classes", "hidden_size", "num_layers"])
def test_a_size_that_is_not_positive_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"{name} is 0.*model\.{name}="):
        CharLSTM(**{"num_classes": 4, name: 0})
