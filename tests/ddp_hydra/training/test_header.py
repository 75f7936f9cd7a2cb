"""The numbers of a header, by which the terminal shows how far a run is."""

from __future__ import annotations

import pytest

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.training.setup import epochs_of
from ddp_hydra.training.state import Position


@pytest.mark.parametrize(
    ("batch_size", "total_steps", "position", "epochs"),
    [
        (8, 40, Position(), 4),
        (8, 33, Position(), 4),  # the last epoch is cut short
        (8, 40, Position(step=10, epoch=1, samples=80), 4),
        (8, 40, Position(step=14, epoch=1, samples=112, offset=32), 4),
        (16, 34, Position(step=14, epoch=1, samples=112, offset=32), 6),  # 3 steps of 16 end epoch 2, 17 more follow
        (4, 66, Position(step=14, epoch=1, samples=112, offset=32), 4),  # 12 + 40 are left
        (8, 10, Position(step=10, epoch=0, samples=80, offset=80), 1),  # only its validation is due
        (8, 40, Position(step=40, epoch=4, samples=320), 4),
    ],
    ids=str,
)
def test_epochs_are_counted_from_where_the_attempt_begins(batch_size, total_steps, position, epochs):
    assert epochs_of(Distributed(80, batch_size), total_steps, position) == epochs
