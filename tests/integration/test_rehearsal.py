"""Faults as a user rehearses them: by the command line, on the real job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.integration

TINY = (
    "data=tiny", "model=tiny", "model.dropout=0.3", "optimizer=adam", "optimizer.lr=0.01", "trainer.epochs=4",
    "trainer.log_every_steps=1", "data.delay_s=0.002",
)  # fmt: skip


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"]


def assert_same_weights(run: Path, other: Path) -> None:
    mine, its = weights_of(run), weights_of(other)
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.fixture(scope="module")
def whole(module_cli) -> Path:
    """A run that nothing happens to."""
    run = module_cli.folder / "whole"
    module_cli.done(*TINY, f"hydra.run.dir={run}")
    return run


@pytest.mark.slow
def test_the_rehearsal_of_the_readme_comes_out_of_a_crash_a_lost_worker_and_a_hang(cli, whole):
    run = cli.folder / "run"
    patience = ("dispatch.hang_timeout_s=10", "dispatch.first_step_timeout_s=60")
    ended = cli.done("debug=faults", *TINY, *patience, f"hydra.run.dir={run}")
    summary = summary_of(run)
    kinds = [(attempt["failure"]["kind"], attempt["failure"]["rank"]) for attempt in summary["attempts"]]
    assert kinds == [("killed", 1), ("lost", 1), ("hung", 0)]
    assert (summary["status"], summary["restarts"], summary["failure"]) == ("done", 3, None)
    assert summary["steps_lost"] > 0
    assert "restart 3 of 5" in ended.stdout + ended.stderr
    assert "in trigger" in (run / "logs" / "rank-0.log").read_text()  # where it hung
    assert "most recent call first" in (run / "logs" / "rank-1.log").read_text()
    assert_same_weights(run, whole)


def test_a_misspelt_fault_says_what_there_is(cli):
    ended = cli.run(*TINY, "+fault=explode,rank=1")
    assert ended.returncode == 1
    assert "fault='explode,rank=1' is not a fault" in ended.stderr
    assert "kill" in ended.stderr
