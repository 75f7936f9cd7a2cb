"""What the launcher leaves in the folder of a sweep; tests/test_launcher.py holds it to what Hydra wants."""

from __future__ import annotations

from types import SimpleNamespace

from omegaconf import OmegaConf

from ddp_hydra.sweep import launcher
from ddp_hydra.sweep.launcher import GangLauncher


def test_a_sweep_whose_jobs_hydra_refuses_leaves_no_secrets(tmp_path):
    config = {"cluster": {"_target_": "x", "password": "hunter2"}, "dispatch": {}, "trainer": {}}
    saved = tmp_path / "multirun.yaml"
    OmegaConf.save(OmegaConf.create(config), saved)  # as a sweeper of Hydra does before it looks at the jobs
    one = GangLauncher()
    one.config = OmegaConf.create({**config, "hydra": {"sweep": {"dir": str(tmp_path)}}})
    one.sweep = SimpleNamespace(close=lambda: None)
    launcher._open.append(one)
    launcher.close_all()
    assert OmegaConf.load(saved).cluster == {"_target_": "x", "password": "***"}
