"""Ranks are killed while they save, at each call of a save in turn and at any moment: no half checkpoint is loaded."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from ddp_hydra.config import schema
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.dispatch import health
from ddp_hydra.job.run import run_job
from ddp_hydra.run_state import Summary
from ddp_hydra.storage.manifest import STEP, find_checkpoint
from ddp_hydra.training.checkpoint import read
from ddp_hydra.writers.run_dir import read_summary
from tests.integration.support.training import BLOCKS

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FORMS = {"one file": "trainer.shard_above_gb=null", "parts": "trainer.shard_above_gb=0"}
KILLS = 50


def digest(checkpoint: Path) -> str:
    """The sum of all that a run learns and goes on from."""
    content, sums = read(checkpoint), hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sums.update(f"{value.dtype} {list(value.shape)}".encode() + value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                sums.update(str(key).encode())
                add(value[key])
        else:
            sums.update(repr(value).encode())

    add({name: content[name] for name in ("model", "ema", "optimizer", "scheduler", "position")})
    return sums.hexdigest()


@pytest.fixture
def save_each_step(client2, project, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Run a job of two ranks that saves after each step."""
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(project))
    monkeypatch.setattr("ddp_hydra.cluster.connect.connect", lambda *_, **__: contextlib.nullcontext(client2))
    # It is killed in the same step again and again.
    monkeypatch.setattr(
        health, "repeated", lambda ended: None if ended[-1].failure.kind == "killed" else "it is not killed"
    )
    schema.register()

    def run(name: str, *overrides: str) -> Path:
        each = ("trainer.checkpoint_every_steps=1", "trainer.ema_decay=0.9", "trainer.validate_every_epochs=0")
        gang = ("trainer.threads=1", "dispatch.ranks=2", "dispatch.max_restarts=1000", "parallel=fsdp2")
        objective = ("objective.metric=train/loss", "objective.direction=minimize")
        with initialize_config_dir(str(project / "conf"), **VERSION_BASE):
            cfg = compose("config", [*BLOCKS, *each, *gang, *objective, "model.over_batch=false", *overrides])
        run_job(cfg, tmp_path / name)
        return tmp_path / name / "checkpoints"

    return run


@pytest.fixture
def found(monkeypatch) -> list[tuple[int, str]]:
    """Step and sum of each checkpoint that an attempt began with."""
    told: list[tuple[int, str]] = []

    def noting(folder: Path) -> Path:
        checkpoint = find_checkpoint(folder)
        told.append((read(checkpoint)["position"]["step"], digest(checkpoint)))
        return checkpoint

    monkeypatch.setattr("ddp_hydra.job.run.find_checkpoint", noting)
    return told


def summary_of(checkpoints: Path) -> Summary:
    summary = read_summary(checkpoints.parent)
    assert summary is not None
    return summary


def check(found: list[tuple[int, str]], killed: Path, undisturbed: Path) -> None:
    wanted = {int(STEP.fullmatch(path.name)[1]): digest(path) for path in undisturbed.glob("step-*")}
    assert [step for step, _ in found] == sorted(step for step, _ in found), "a later checkpoint was lost"
    for step, sums in found:
        assert sums == wanted[step]
    assert digest(find_checkpoint(killed)) == wanted[max(wanted)]
    assert not list(killed.rglob(".part-*"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_is_killed_at_each_call_of_a_save(save_each_step, found, form, rank):
    if (form, rank) == ("one file", 1):
        pytest.skip("rank 1 writes nothing")
    steps = (FORMS[form], "trainer.max_steps=20")
    kill = f"+callbacks.kill={{_target_: models.disturbed.KillAtCall, rank: {rank}}}"
    killed = save_each_step("killed", *steps, kill)
    kills = summary_of(killed).restarts
    print(f"{form}, rank {rank}: {kills} kills")
    assert len(found) == kills > 10
    check(found, killed, save_each_step("undisturbed", *steps))


@pytest.mark.parametrize("form", FORMS)
def test_ranks_are_killed_at_any_moment(save_each_step, found, form):
    steps = (FORMS[form], "trainer.epochs=100", f"trainer.max_steps={4 * KILLS}")
    kill = f"{{_target_: models.disturbed.KillAtRandom, attempts: {KILLS}, within_s: 0.2, ranks: 2}}"
    killed = save_each_step("killed", *steps, f"+callbacks.kill={kill}")
    assert summary_of(killed).restarts == KILLS
    assert len(found) >= KILLS - 3
    check(found, killed, save_each_step("undisturbed", *steps))
