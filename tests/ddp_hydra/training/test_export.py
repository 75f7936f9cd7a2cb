"""What is written for other programs; tests/integration/test_export.py reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.training import export
from ddp_hydra.training.build_data import Classes
from ddp_hydra.training.export_example import Example
from ddp_hydra.training.load_run import Trained
from tests.ddp_hydra.training.loop_runs import config

EXAMPLE = Example((torch.randn(2, 4),), {})


def trained(**data: Any) -> Trained:
    cfg = OmegaConf.merge(config(), {"data": data})
    kept = OmegaConf.to_container(cfg)
    OmegaConf.resolve(cfg)
    return Trained(cfg, nn.Linear(4, 3).eval(), Classes(), torch.device("cpu"), False, 8, kept)


def test_the_config_in_a_file_keeps_interpolations_whose_values_may_be_secret(tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors")
    monkeypatch.setenv("STORE_LOGIN", "top-secret")
    run = trained(login="${oc.env:STORE_LOGIN}", key="top-secret")
    export.export(run, EXAMPLE, "safetensors", tmp_path / "m", 0)
    with safetensors.safe_open(tmp_path / "m", "pt") as file:
        meta = file.metadata()
    assert "top-secret" not in str(meta)
    assert json.loads(meta["config"])["data"] == {"batch_size": 2, "login": "${oc.env:STORE_LOGIN}", "key": "***"}
