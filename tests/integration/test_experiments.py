"""The experiments of conf/experiment that need data of others, for a few steps on small sets of the same kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_hydra.data.shards.write import write_shards
from ddp_hydra.training.seeds import seed_step
from models.resnet import resnet18
from tests.integration.support import training

pytestmark = pytest.mark.integration
SMALL = (
    "data.batch_size=4",
    "data.image_size=32",
    "trainer.max_steps=2",
    "trainer.log_every_steps=1",
)
SMALLER = "model._target_=models.resnet.resnet18"
"""In place of ResNet-50, which one of the tests trains."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(40):
        file = folder / "images" / "abcd"[number % 4] / f"{number:03}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.RandomState(number).randint(0, 255, (8, 10, 3), np.uint8)
        Image.fromarray(pixels).resize((50, 40)).save(file)
    return folder


def names(run: training.Trained) -> set[str]:
    return {name for line in run.metrics() for name in line}


@pytest.mark.slow
def test_transfer(client2, project, photos, tmp_path):
    folder = (f"data.bucket=file://{photos}", "data.train_prefix=images", "data.val_prefix=images", "data.holdout=0.3")
    settings = ("experiment=transfer", "model.weights=null", SMALLER, *folder, *SMALL)
    first = training.train(client2, project, tmp_path / "first", *settings)
    assert {"train/loss", "val/accuracy"} <= names(first)
    frozen = training.train(client2, project, tmp_path / "frozen", *settings, "trainer.freeze=['*','!fc.*']")
    seed_step(0, 0, 0)
    start = resnet18(num_classes=4).state_dict()
    moved = [
        {name for name, value in run.checkpoint("last.pt")["model"].items() if not torch.equal(value, start[name])}
        for run in (first, frozen)
    ]
    assert {"conv1.weight", "bn1.running_mean", "fc.weight"} <= moved[0]
    assert moved[1] == {"fc.weight", "fc.bias"}
    lines = next(record.data.lines for record in frozen.records if record.kind == "start")
    assert any("of them frozen" in line for line in lines)


@pytest.mark.slow
def test_imagenet_out_of_a_bucket(client2, project, photos, tmp_path):
    folder = (f"data.bucket=file://{photos}", "data.train_prefix=images", "data.val_prefix=images")
    run = training.train(client2, project, tmp_path / "run", "experiment=imagenet_s3", *folder, *SMALL)
    rates = [line["lr"] for line in run.metrics() if "lr" in line]
    assert 0 < rates[0] < rates[1] <= 0.1 * 8 / 256  # in the warm-up, and for a batch of 8
    groups = run.checkpoint("last.pt")["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.0001, 0.0]


@pytest.mark.slow
def test_imagenet_out_of_shards(client2, project, photos, tmp_path):
    write_shards(str(photos / "images"), str(tmp_path / "shards"), shard_mb=0.02)
    index = tmp_path / "shards" / "index.json"
    settings = (f"data.index={index}", f"data.val_index={index}", "trainer.log_every_steps=1")
    run = training.train(client2, project, tmp_path / "run", "experiment=imagenet_wids", SMALLER, *settings, *SMALL)
    assert {"train/accuracy", "val/accuracy"} <= names(run)


MINE = """\
_target_: torchvision.transforms.v2.Compose
transforms:
  - {_target_: torchvision.transforms.v2.Resize, size: [20, 24]}
  - {_target_: torchvision.transforms.v2.RandomHorizontalFlip}
  - {_target_: torchvision.transforms.v2.ToImage}
"""


@pytest.mark.slow
def test_a_transform_of_torchvision_is_chosen_by_its_name(photos, tmp_path):
    """In a project of its own, by the installed package alone, as no path leads to the checkout."""
    config = tmp_path / "conf" / "transform" / "mine.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(MINE)
    folder = (f"data.bucket=file://{photos}", "data.train_prefix=images", "data.val_prefix=images", "data=s3_photos")
    chosen = [f"transform@data.{split}.transform=mine" for split in ("train", "val")]
    command = (sys.executable, "-c", "from ddp_hydra.cli.main import entry; entry()")
    done = subprocess.run(
        [*command, *folder, *chosen, "cluster=inline", "dry_run=true", "data.batch_size=4"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert "x (4, 3, 20, 24) " in done.stdout, done.stderr
