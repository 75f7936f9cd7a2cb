"""Sweeps that stop jobs early: under faults, after kills and on other workers they decide the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.integration

RATES = "optimizer.lr=0.001,0.1,0.01,0.03,0.2,0.0001,0.3,0.003,1"
TINY = ("-m", "data=tiny", "model=tiny", "trainer.epochs=9", "cluster.n_workers=2", "dispatch.ranks=1", RATES)
ASHA = (*TINY, "hydra.launcher.stop=asha")
MEDIAN = (*TINY, "hydra.launcher.stop={rule: median, after: 2, trials: 2}")
STEPS = 12
"""In an epoch."""


def rows(folder: Path) -> list[dict[str, Any]]:
    return sorted(json.loads((folder / "sweep.json").read_text())["jobs"], key=lambda row: row["number"])


def table(folder: Path, without: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
    """What was decided, without the time that it took, and without metrics with some words in their names."""
    timed = ("per_s", "wait", "bytes", "slowest", *without)
    return [
        (
            *(row[name] for name in ("number", "state", "objective", "step", "message", "value")),
            {name: value for name, value in row["metrics"].items() if not any(word in name for word in timed)},
        )
        for row in rows(folder)
    ]


@pytest.fixture(scope="module")
def undisturbed(module_cli) -> dict[tuple[str, ...], Path]:
    """The folders of sweeps that nothing has disturbed; each is run when it is first asked for."""

    class Sweeps(dict[tuple[str, ...], Path]):
        def __missing__(self, words: tuple[str, ...]) -> Path:
            name = f"undisturbed-{len(self)}"
            self[words] = module_cli.folder / name
            module_cli.done(*words, f"hydra.sweep.dir={name}")
            return self[words]

    return Sweeps()


@pytest.mark.slow
def test_asha_stops_most_jobs_and_their_checkpoints_stay(undisturbed, module_cli):
    found = rows(undisturbed[ASHA])
    ended = {row["number"]: (row["state"], row["step"]) for row in found}
    assert sorted({step for _, step in ended.values()}) == [STEPS, 3 * STEPS, 9 * STEPS]
    assert [state for state, step in ended.values()].count("stopped") >= 6
    assert all((step == 9 * STEPS) == (state == "done") for state, step in ended.values())
    for row in found:
        folder = undisturbed[ASHA] / row["folder"]
        assert torch.load(folder / "checkpoints" / "last.pt")["position"]["step"] == row["step"]
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == row["state"]
        if row["state"] == "stopped":
            epochs, rung = row["step"] // STEPS, {STEPS: 0, 3 * STEPS: 1}[row["step"]]
            assert row["message"] == summary["stopped"]
            assert row["message"].startswith(f"stopped at {epochs} of 9 epochs: rung {rung}: place ")
    best = max(found, key=lambda row: row["objective"])
    assert best["state"] == "done"
    listed = module_cli.done("runs", "ls", str(undisturbed[ASHA]), "status=stopped").stdout.splitlines()
    assert sum(" stopped " in line for line in listed) == [row["state"] for row in found].count("stopped")


@pytest.mark.slow
def test_a_job_that_went_on_is_the_same_bit_for_bit_as_one_that_never_paused(undisturbed, cli):
    (best,) = [row for row in rows(undisturbed[ASHA]) if row["state"] == "done"][:1]
    cli.done(*(word for word in TINY[1:] if word != RATES), *best["overrides"], "hydra.run.dir=alone")
    ends = [
        torch.load(folder / "checkpoints" / "last.pt")
        for folder in (undisturbed[ASHA] / best["folder"], cli.folder / "alone")
    ]
    for name, value in ends[0]["model"].items():
        assert torch.equal(value, ends[1]["model"][name])


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [ASHA, MEDIAN], ids=["asha", "median"])
@pytest.mark.parametrize("workers", [1, 4])
def test_the_number_of_workers_changes_no_decision(sweep, workers, undisturbed, cli):
    words = (word if not word.startswith("cluster.n_") else f"cluster.n_workers={workers}" for word in sweep)
    cli.done(*words, "hydra.sweep.dir=sweep")
    assert table(cli.folder / "sweep") == table(undisturbed[sweep])


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [ASHA, MEDIAN], ids=["asha", "median"])
def test_ranks_that_are_killed_at_work_and_when_a_job_goes_on_change_no_decision(sweep, undisturbed, cli):
    """In the first epoch, in the first step after the pause, and later."""
    faults = [f"kill,rank=0,step={step},attempt={attempt}" for step, attempt in ((5, 0), (STEPS + 1, 1), (50, 2))]
    words = f"faults=[{','.join(repr(fault) for fault in faults)}]"
    cli.done(*sweep, words, "dispatch.max_restarts=5", "hydra.sweep.dir=sweep")
    assert table(cli.folder / "sweep") == table(undisturbed[sweep])
    summaries = [
        json.loads((cli.folder / "sweep" / row["folder"] / "summary.json").read_text())
        for row in rows(cli.folder / "sweep")
    ]
    assert all(summary["attempts"] for summary in summaries), "each was killed at least once"


@pytest.mark.slow
@pytest.mark.parametrize("ended", [2, 5, 8])
@pytest.mark.parametrize("sweep", [ASHA, MEDIAN], ids=["asha", "median"])
def test_a_killed_sweep_that_goes_on_decides_the_same(sweep, ended, undisturbed, cli, wait_for, ranks_alive):
    slow = (*sweep, "data.delay_s=0.01", "hydra.sweep.dir=sweep")
    process = cli.start(*slow)
    folder = cli.folder / "sweep"

    def ends() -> int:
        known = rows(folder) if (folder / "sweep.json").exists() else []
        return sum(row["state"] in ("paused", "stopped", "done") for row in known)

    wait_for(lambda: ends() >= ended, "some jobs that have paused or ended")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not ranks_alive(), "no rank left")
    cli.done(*slow)
    assert table(folder) == table(undisturbed[sweep])
    again = cli.done(*slow)
    assert "running" not in again.stderr, "what is stopped is not run again"
    assert table(folder) == table(undisturbed[sweep])


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_and_decides_the_same(undisturbed, cli, wait_for):
    slow = (*ASHA, "data.delay_s=0.01", "hydra.sweep.dir=sweep")
    process = cli.start(*slow)
    folder = cli.folder / "sweep"
    wait_for(lambda: (folder / "sweep.json").exists() and "paused" in str(rows(folder)), "a paused job")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "paused" in err.splitlines()[-1]
    cli.done(*slow)
    # Training metrics behind an interrupt are means of the steps since then.
    assert table(folder, ("train/",)) == table(undisturbed[ASHA], ("train/",))


@pytest.mark.slow
def test_a_search_by_optuna_learns_from_jobs_that_are_stopped_by_its_pruner(cli):
    search = ("hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=3")
    trials = ("hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=3", "hydra.sweeper.direction=maximize")
    pruner = "hydra.launcher.stop={_target_: optuna.pruners.MedianPruner, n_startup_trials: 2}"
    rates = "optimizer.lr=choice(0.1,0.01,0.001,0.0001)"
    words = [word for word in TINY if word != RATES]
    ended = cli.done(*words, *search, *trials, pruner, rates, "hydra.sweep.dir=sweep")
    found = rows(cli.folder / "sweep")
    stopped = [row for row in found if row["state"] == "stopped"]
    assert stopped
    assert len(found) == 6
    assert all(row["message"].endswith("MedianPruner has pruned it") for row in stopped)
    best = max(found, key=lambda row: row["objective"])
    assert f"best_value: {best['objective']}" in (cli.folder / "sweep" / "optimization_results.yaml").read_text()
    assert "Traceback" not in ended.stderr


APP = """
import time
import hydra
from ddp_hydra import results

@hydra.main(config_path=None, config_name=None)
def main(cfg):
    for step in range(1, 9):
        time.sleep(0.05)
        results.log({"score": cfg.rate * step}, step=step)
    return cfg.rate * 8

main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "stopped"),
    [("asha", {2: (1, 1.0), 3: (1, 0.5)}), pytest.param("median", {3: (1, 0.5)}, marks=pytest.mark.slow)],
)
def test_tasks_of_other_apps_are_stopped_by_what_they_log(rule, stopped, cli):
    """Its jobs can't pause: asha stops them at rungs."""
    (cli.folder / "app.py").write_text(APP)
    launcher = {"ranks": 1, "cluster": "{n_workers: 2}", "direction": "maximize", "stop": rule}
    words = [f"hydra.launcher.{key}={value}" for key, value in launcher.items()]
    words += ["+rate=4,8,1,0.5", "+objective={metric: score}", "hydra.sweep.dir=sweep"]
    ended = subprocess.run(
        [sys.executable, "app.py", "-m", "hydra/launcher=dask_ddp", *words],
        cwd=cli.folder, env=cli.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = {row["number"]: (row["state"], row["step"], row["value"]) for row in rows(cli.folder / "sweep")}
    assert {number: (step, value) for number, (state, step, value) in found.items() if state == "stopped"} == stopped
    assert all(found[number][2] == rate * 8 for number, rate in ((0, 4), (1, 8)))


def test_a_rule_that_does_not_exist_is_refused_at_once(cli):
    ended = cli.run(*TINY, "hydra.launcher.stop=ascha", "hydra.sweep.dir=sweep")
    assert ended.returncode == 1
    assert "there is no rule 'ascha': give asha, hyperband" in ended.stderr
    assert not (cli.folder / "sweep" / "0").exists()
