"""A process lives through two worlds: a gang trains, loses a member, forms again, and trains on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_hydra import heartbeat, results
from ddp_hydra.dispatch.inline import DirectSender
from ddp_hydra.rank import fault_injection
from ddp_hydra.training.consensus import StopSignal
from ddp_hydra.training.loop import fit
from ddp_hydra.training.run import TrainingRun
from tests.integration.support.worlds import KILLED, data, settings

pytestmark = pytest.mark.integration

BY_GLOO = {"parallel": {"comm_hook": "none"}}
CASES = {
    "smaller": ([0, 1], {}),
    "a newcomer is rank 0": ([3, 0, 1], BY_GLOO),
    "with other ranks": pytest.param([1, 0], {}, marks=pytest.mark.slow),
    "smaller, by gloo": pytest.param([0, 1], BY_GLOO, marks=pytest.mark.slow),
    "with other ranks, by gloo": pytest.param([1, 0], BY_GLOO, marks=pytest.mark.slow),
    "a newcomer is rank 0, in shared memory": pytest.param([3, 0, 1], {}, marks=pytest.mark.slow),
}


@pytest.mark.parametrize(("later", "parts"), CASES.values(), ids=CASES.keys())
def test_a_gang_that_loses_a_member_forms_again_and_trains_on(alone, later, parts, tmp_path):
    command = [sys.executable, "-m", "tests.integration.support.worlds"]
    worlds = [[0, 1, KILLED], later]
    given = [json.dumps(worlds), json.dumps(parts), str(tmp_path)]
    ended = subprocess.run(
        [*command, *given], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["exits"] == [-9 if number == KILLED else 0 for number in sorted({*worlds[0], *later})]
    for began, steps, weights, loss in told["found"]:
        assert (began, steps) == (2, 6), ended.stderr  # the step under way is done again, no other
        for name, value in alone[0].items():
            torch.testing.assert_close(torch.tensor(weights[name]), value, rtol=1e-5, atol=1e-6)
        assert loss == pytest.approx(alone[1], rel=1e-5)


@pytest.fixture
def alone(tmp_path):
    """What one rank comes to that nothing disturbs."""
    results.connect(DirectSender(lambda record: None, tmp_path))
    fault_injection.install(0, 0, {})
    run = TrainingRun(settings(1), data(), None, None, fault_injection.activate([]), StopSignal())
    fit(run)
    yield run.model.state_dict(), run.metrics["train/loss"]
    results.connect(None)
    heartbeat.connect(None)
