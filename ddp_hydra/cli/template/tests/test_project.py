"""Run them with `python -m pytest`."""

import subprocess
import sys

import torch

from data.spirals import Spirals
from models.mlp import MLP


def test_the_model_takes_a_batch_of_the_data():
    data = Spirals(n=8, num_classes=3)
    logits = MLP(num_classes=data.num_classes)(torch.stack([point for point, _ in data]))
    assert logits.shape == (8, 3)


def test_the_config_composes_and_one_step_works():
    command = [sys.executable, "-m", "ddp_hydra", "dry_run=true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
