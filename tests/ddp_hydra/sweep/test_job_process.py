"""How a job ends in its own process, where Hydra or the task ends it in an odd way."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize
from hydra._internal.callbacks import Callbacks
from hydra.types import HydraContext
from omegaconf import OmegaConf, open_dict

from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.sweep import other_apps
from ddp_hydra.sweep.planned_job import JobOutcome, PlannedJob, run_planned_job
from ddp_hydra.sweep.rows import JobRow, JobState


@pytest.fixture
def end(tmp_path, hydra_restore_singletons):
    """Run a task as a job."""

    def run(task, env=None) -> JobOutcome:
        with initialize(None, **VERSION_BASE):
            config = compose(overrides=["hydra.job.name=app", f"hydra.sweep.dir={tmp_path}"], return_hydra_config=True)
        with open_dict(config):
            config.hydra.sweep.subdir, config.hydra.job.id, config.hydra.job.num = "0", "0", 0
            config.hydra.job.env_set = env or {}
        return run_planned_job(
            PlannedJob(JobRow(0, [], "0"), config=config), HydraContext(None, Callbacks()), task, None
        )

    return run


@pytest.mark.medium
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (7, "the task exited with code 7 (sys.exit)"),
        (None, "the task exited with code 0 (sys.exit) before it returned"),
        ("no disk\nat all", "the task exited with code 1 (sys.exit): no disk"),
    ],
)
def test_an_exit_code_is_told_as_such(end, code, said):
    ended = end(lambda _: sys.exit(code))
    assert (ended.state, ended.message) == (JobState.failed, said)


@pytest.mark.medium
def test_what_hydra_cannot_begin_with_is_told(end, capsys):
    ended = end(lambda _: 1.0, {"PLACE": "${nowhere}"})
    assert ended.state == JobState.failed
    assert "Interpolation key 'nowhere' not found" in ended.message
    assert "Interpolation key 'nowhere' not found" in capsys.readouterr().out, "in the job's log, with the traceback"


def test_a_rank_logs_as_hydra_does_or_prints_where_the_folder_is_elsewhere(tmp_path, capsys):
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "app.log")}
    logging_of = {"version": 1, "handlers": {"file": handler}, "root": {"level": "INFO", "handlers": ["file"]}}
    logging_of["disable_existing_loggers"] = False
    cfg = OmegaConf.create({"hydra": {"job_logging": logging_of, "verbose": False}})
    other_apps.set_up_logging(cfg)
    logging.getLogger("app").info("one")
    assert (tmp_path / "app.log").read_text() == "one\n"
    cfg.hydra.job_logging.handlers.file.filename = str(Path("/nowhere") / "app.log")
    other_apps.set_up_logging(cfg)
    logging.getLogger("app").info("two")
    out = capsys.readouterr().out
    assert "hydra.job_logging cannot be set up on this host" in out
    assert "No such file or directory: '/nowhere/app.log'" in out
    assert "INFO:app:two" in out
