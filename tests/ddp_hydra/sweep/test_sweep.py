"""What a sweep does as it starts and is closed; tests/integration/test_sweep.py runs whole ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import dask
import distributed  # noqa: F401 (brings its settings along)
import pytest
from distributed.batched import BatchedSend
from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError, Interrupted, RecordError, SweepFailed
from ddp_hydra.sweep import launcher, sweep
from ddp_hydra.sweep.launcher import GangLauncher
from ddp_hydra.sweep.pruning import FINISH_S
from ddp_hydra.sweep.queue import CachingConfigLoader
from ddp_hydra.sweep.rows import JobRow, JobState
from ddp_hydra.sweep.scheduler import SHORT_LOGS, sweep_locked
from ddp_hydra.sweep.settings import SweepSettings
from ddp_hydra.sweep.summary_files import read
from ddp_hydra.sweep.sweep import Sweep

CONFIG = {"results": "own", "hydra": {"overrides": {"task": []}, "sweep": {"dir": "."}, "job": {"name": "app"}}}


def start(folder: Path) -> Sweep:
    """Start a sweep of an app of others, whose task has one rank."""
    loader, settings = CachingConfigLoader(None), SweepSettings(ranks=1, direction="minimize")
    return Sweep(folder, settings, None, loader, lambda config: None, OmegaConf.create(CONFIG), is_resumed=False)


@pytest.mark.integration
def test_an_interrupt_as_it_starts_ends_what_it_has_started_already(tmp_path, monkeypatch):
    closed = []

    def interrupted(is_ours: bool) -> None:
        raise KeyboardInterrupt

    cluster = SimpleNamespace(close=lambda: closed.append("cluster"))
    monkeypatch.setattr(sweep, "ClusterProcess", lambda *_, **__: cluster)
    monkeypatch.setattr(sweep, "preload", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)  # the process that will draw is a real one, which may not be left behind
    assert closed == ["cluster"]
    with sweep_locked(tmp_path):  # the next sweep in this folder may begin
        pass


@pytest.mark.integration
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_process_that_draws_waits_for_the_end(tmp_path, is_killed):
    one = start(tmp_path)
    picture = one.start_picture()
    one.rows = [JobRow(number, [f"lr={number}"], "", JobState.done, float(number)) for number in range(2)]
    one.files.write(one.rows, now=True)
    if is_killed:
        picture.process.kill()
        picture.process.join()
    one.close()
    assert picture.process.exitcode == (-9 if is_killed else 0)
    assert (tmp_path / "sweep.png").exists() is not is_killed


@pytest.mark.integration
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_after_the_last_job_leaves_whole_tables(tmp_path, monkeypatch, times):
    one = start(tmp_path)
    one.rows = [JobRow(0, ["lr=1"], "", JobState.done, 1.0), JobRow(1, ["lr=2"], "", JobState.done, 2.0)]
    waits = []

    def finish(rows: list[JobRow], timeout_s: Callable[[], float]) -> None:
        waits.append(timeout_s())
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        waits.append(timeout_s())

    monkeypatch.setattr(one.pruning, "finish", finish)
    with pytest.raises((Interrupted, KeyboardInterrupt)[times - 1]):
        one.run([], 0, [])
    assert waits == [FINISH_S, 0.0][: 3 - times]
    assert [row.state for row in read(tmp_path)] == [JobState.done] * 2
    one.close()


@pytest.mark.integration
def test_a_sweep_of_many_batches_is_summed_up_after_the_first_and_at_its_end(tmp_path, monkeypatch):
    """Optuna asks for a batch at a time."""
    monkeypatch.chdir(tmp_path)
    shown: list[list[str]] = []
    monkeypatch.setattr(sweep.LiveTable, "close", lambda table, rows, lines: shown.append(lines))
    one = start(tmp_path)
    for _ in range(3):
        one.run([], 0, [])
    assert shown == [["0 jobs:   ->  ./sweep.md"], [], []]
    one.close()
    assert shown[3:] == shown[:1]


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


def test_an_option_that_the_launcher_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"^hydra\.launcher\.n_jobs: there is no such key: did you mean .*max_jobs\?"):
        GangLauncher(n_jobs=2, keep="all").setup(
            hydra_context=SimpleNamespace(config_loader=None), task_function=None, config=OmegaConf.create({})
        )


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_search_of_optuna_none_of_whose_trials_has_a_value_ends_with_a_sentence(ours_to_launch, is_dry):
    one, _ = ours_to_launch
    one.config.dry_run, one.sweep.closing_line = is_dry, "2 jobs: 2 failed  ->  m/sweep.md"
    said = "^no job has a finite value for Optuna: 2 jobs: 2 failed  ->  m/sweep.md$"
    with nullcontext() if is_dry else pytest.raises(SweepFailed, match=said):
        launcher.end_without_values(ValueError("No trials are completed yet."))


@pytest.fixture
def ours_to_launch(tmp_path):
    one, closed = GangLauncher(), []
    hydra = {"sweep": {"dir": str(tmp_path)}, "hydra_logging": None, "verbose": False}
    config = {"cluster": {"_target_": "x", "password": "hunter2"}, "dispatch": {}, "trainer": {}, "hydra": hydra}
    one.config = OmegaConf.create(config)
    one.sweep = SimpleNamespace(folder=tmp_path, run=lambda *_: [], close=lambda: closed.append(True))
    launcher._open.append(one)
    yield one, closed
    launcher.close_all()


def test_the_words_of_a_sweep_are_kept_for_any_sweeper(ours_to_launch, tmp_path):
    one, _ = ours_to_launch
    saved = tmp_path / "multirun.yaml"
    assert not saved.exists(), "Optuna's writes none, and a sweep that is refused changes none"
    assert one.launch([], 0) == []
    assert OmegaConf.load(saved).cluster == {"_target_": "x", "password": "***"}
    saved.unlink()
    one.launch([], 0)
    assert not saved.exists(), "once for all batches"


def test_a_sweep_that_cannot_keep_its_words_ends(ours_to_launch, tmp_path):
    one, closed = ours_to_launch
    (tmp_path / "multirun.yaml").mkdir()
    with pytest.raises(RecordError, match=r"multirun\.yaml"):
        one.launch([], 0)
    assert closed == [True]


def test_few_messages_are_kept():
    assert all(map(dask.config.get, SHORT_LOGS)), "Dask has these settings"

    async def kept() -> int | None:
        return BatchedSend(interval="2ms").recent_message_log.maxlen

    with dask.config.set(SHORT_LOGS):
        assert asyncio.run(kept()) == 100
