"""The numbers of a header, by which the terminal shows how far a run is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hydra import results
from ddp_hydra.data.samplers import Distributed
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import World
from ddp_hydra.training import setup
from ddp_hydra.training.checkpoint import CheckpointSaver
from ddp_hydra.training.setup import epochs_of
from ddp_hydra.training.state import Position
from tests.ddp_hydra.training.loop_runs import Numbers


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


class Described(Numbers):
    """Says what the header shows."""

    classes = ("cat", "dog", "owl")
    features = ("age", "height", "width", "weight")
    scaling = "bytes, normalised by mean (0.5) and std (0.25)"


def test_the_header_names_classes_features_and_how_pixels_are_scaled(train):
    lines = train(data=Described, show=["val/loss"]).header
    for line in (
        "classes   cat, dog, owl",
        "columns   age, height, width, weight",
        "pixels    bytes, normalised by mean (0.5) and std (0.25)",
    ):
        assert line in lines
    bare = train().records[0].data
    assert not [line for line in bare.lines if line.startswith(("classes", "columns", "pixels"))]
    assert bare.show is None


def test_a_large_model_says_what_a_rank_keeps(train, monkeypatch):
    monkeypatch.setattr(setup, "LARGE", 0)
    run = train(ema_decay=0.9, parts={"optimizer": {"momentum": 0.9}})
    (start,) = [record.data for record in run.records if record.kind == "start"]
    (line,) = [line for line in start.lines if line.startswith("memory")]
    assert line == "memory    268 B a rank: weights 120 B, gradients 60 B, optimizer 60 B, activations 28 B"


def test_a_run_begins_only_where_a_checkpoint_fits_into_the_folder_of_the_worker(train, monkeypatch):
    first = train(epochs=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50))
    with pytest.raises(
        ConfigError, match=r"^50 B are free in .* on host \S+, .* 120 B of a checkpoint .*: free 70 B, "
    ):
        train(parts={"optimizer": {"momentum": 0.9}})
    with pytest.raises(ConfigError, match=r"^50 B are free in "):
        train(resume=first.last)
    monkeypatch.setattr(results, "is_first_attempt", lambda: False)
    train(resume=first.last)  # a later attempt waits for space where a save lacks it


def test_on_each_host_the_parts_of_its_ranks_have_to_fit(monkeypatch):
    monkeypatch.setattr(results, "outbox", lambda: Path(__file__))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=400))
    own: list[int] = []

    def check(rows: Callable[[Any], Any], shard_above_gb: float = 0.0, n_bytes: int = 1000) -> None:
        gather = lambda _, row: own.append(row[1]) or rows(row)  # noqa: E731
        monkeypatch.setattr(World, "gather_objects", gather)
        CheckpointSaver(World(size=4, local_size=2, group=object()), shard_above_gb).check_space(n_bytes)

    check(lambda row: [row, (("another", 1), 250, 400, "/one")])
    check(lambda row: [row, (row[0], 250, 400, "/one")])  # the other rank says it
    with pytest.raises(ConfigError, match=r"400 B are free in .* on host \S+, .* 500 B of a .*: free 100 B"):
        check(lambda row: [(row[0], 250, 400, "/one"), row])
    check(lambda row: [row, (row[0], 0, 400, "/one")], 1.0, 400)
    assert own == [250, 250, 250, 400]
