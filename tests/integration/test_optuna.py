"""A search by Optuna, whose trials our launcher runs: each batch on the same cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
COUNTED = ("cluster._target_=data.counted.LocalCluster", "cluster.n_workers=2", "dispatch.ranks=1")


def rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "sweep.json").read_text())["jobs"]


@pytest.mark.slow
def test_the_search_that_comes_with_pet_names(cli):
    names = cli.folder / "names.json"
    names.write_text(json.dumps([f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]))
    small = ("trainer.epochs=1", "data.batch_size=16", "model.num_layers=1", "model.hidden_size=8")
    search = (
        "experiment=pet_names",
        "hparams_search=pet_names_optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
    )
    ended = cli.done(*search, f"data.source={names}", *small, *COUNTED, "hydra.sweep.dir=sweep")
    found = rows(cli.folder / "sweep")
    assert [(row["number"], row["state"]) for row in found] == [(number, "done") for number in range(2)]
    assert (cli.folder / "clusters").read_text() == "started\n", "both batches on one cluster"
    told = OmegaConf.load(cli.folder / "sweep" / "optimization_results.yaml")
    best = min(found, key=lambda row: row["objective"])
    assert told.best_value == best["objective"] == best["metrics"]["val/loss"]
    assert {f"{key}={value}" for key, value in told.best_params.items()} <= set(best["overrides"])
    assert set(told.best_params) == {"optimizer.lr", "model.dropout"}, "what is given is not searched for"
    assert len({row["objective"] for row in found}) == 2
    assert ended.stderr.count("2 jobs: 2 done  ->  sweep/sweep.md") == 1
    cli.done("-m", "hydra.sweep.dir=sweep")
    assert rows(cli.folder / "sweep") == found, "the folder alone goes on with the search, and its jobs are done"


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "code"), [pytest.param(1, 0, marks=pytest.mark.slow), (0, 1)])
def test_a_trial_that_fails_ends_the_search_only_where_too_many_do(cli, rate, code):
    search = ("-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.direction=maximize")
    seed = "hydra.sweeper.sampler.seed=8"  # takes the second, then the first
    kinds = "faults=choice([],['raise,rank=0,step=1'])"
    settings = ("hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2", f"hydra.sweeper.max_failure_rate={rate}")
    tiny = ("data=tiny", "model=tiny", "trainer.max_steps=2", "dispatch.max_restarts=0", *COUNTED)
    ended = cli.run(*search, seed, kinds, *settings, *tiny, "hydra.sweep.dir=sweep")
    assert ended.returncode == code, ended.stderr
    assert sorted(row["state"] for row in rows(cli.folder / "sweep")) == ["done", "failed"]
    assert "Traceback" not in ended.stderr
    results = cli.folder / "sweep" / "optimization_results.yaml"
    if code == 0:
        (best,) = [row["objective"] for row in rows(cli.folder / "sweep") if row["state"] == "done"]
        assert OmegaConf.load(results).best_value == best
    else:
        assert ended.stderr.splitlines()[-1] == "ddp_hydra: 2 jobs: 1 done, 1 failed  ->  sweep/sweep.md"
        assert not results.exists()


@pytest.mark.slow
def test_a_search_whose_trials_all_fail_ends_with_a_sentence(cli):
    search = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.max_failure_rate=1")
    settings = (
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=2",
        "seed=choice(1,2)",
        "faults=['raise,rank=0,step=1']",
    )
    tiny = ("data=tiny", "model=tiny", "trainer.max_steps=2", "dispatch.max_restarts=0", *COUNTED)
    ended = cli.run(*search, *settings, *tiny, "hydra.sweep.dir=sweep")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("ddp_hydra: no job has a finite value for Optuna: 2 jobs: 2 failed")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_without_the_package_only_a_search_is_missing(cli):
    blocked = cli.folder / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text("import sys; sys.modules['hydra_plugins.hydra_optuna_sweeper'] = None\n")
    path = f"{blocked}:{ROOT}"
    for question, said in (("--help", "hparams_search: pet_names_optuna"), ("--cfg=job", "n_workers: 2")):
        assert said in cli.done(question, PYTHONPATH=path).stdout
    ended = cli.run("experiment=pet_names", "hparams_search=pet_names_optuna", PYTHONPATH=path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("not installed: type pip install 'ddp-hydra[optuna]'")
