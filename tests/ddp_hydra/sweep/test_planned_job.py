"""Which jobs a sweep has, how each ends in its own process, and how that travels to the sweep's."""

from __future__ import annotations

import logging
import math
import os
import pickle
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import distributed  # noqa: F401 (teaches pickle the exceptions that there are; not those that follow)
import numpy as np
import pytest
from hydra import compose, initialize, utils
from hydra._internal.callbacks import Callbacks
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from hydra.types import HydraContext
from omegaconf import OmegaConf, open_dict

from ddp_hydra.config.hydra_compat import VERSION_BASE, allowing, targets_allowed_by, variables_of_job
from ddp_hydra.dispatch.call import pickled_call
from ddp_hydra.errors import ConfigError, Failure, RankFailed
from ddp_hydra.sweep import other_apps, planned_job
from ddp_hydra.sweep.planned_job import (
    JobOutcome,
    Need,
    PlannedJob,
    describe_error,
    portable,
    run_planned_job,
)
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective
from ddp_hydra.sweep.sweep import Sweep


def row(number: int, override: str, state: JobState = JobState.done) -> JobRow:
    return JobRow(number, [override], str(number), state)


def planned(folder: Path, earlier: JobRow | None = None, is_ours: bool = True) -> PlannedJob:
    config = OmegaConf.create({"resume": None, "hydra": {}})
    return PlannedJob(JobRow(0, [], "0"), (), earlier, config, Need(), folder, is_ours)


@pytest.mark.parametrize(
    ("state", "has_checkpoint", "is_ours", "resumes"),
    [
        (JobState.interrupted, True, True, True),
        (JobState.interrupted, False, True, False),
        (JobState.interrupted, True, False, False),
    ],
)
def test_a_job_goes_on_from_its_checkpoint_where_it_has_one(tmp_path, state, has_checkpoint, is_ours, resumes):
    if has_checkpoint:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "manifest.json").write_text("{}")
    job = planned(tmp_path, row(0, "", state), is_ours)
    planned_job.resume(job, 60.0)
    assert (job.config.resume == str(tmp_path)) == resumes
    assert job.spent_s == 60.0 * resumes, "the time that it took before counts, where it is not begun anew"


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_job_that_was_killed_before_its_first_manifest_goes_on_where_its_checkpoint_is_whole(tmp_path, is_whole):
    (tmp_path / "checkpoints").mkdir()
    file = tmp_path / "checkpoints" / "step-000004.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data", "weights")
    if not is_whole:
        file.write_bytes(file.read_bytes()[:-9])
    job = planned(tmp_path, row(0, "", JobState.running), True)
    planned_job.resume(job, 60.0)
    assert (job.config.resume == str(tmp_path)) == is_whole


def test_the_folder_of_another_job_is_not_taken(tmp_path):
    planned_job.take_over_folder(planned(tmp_path))
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- lr=1\n- data=b\n")
    with pytest.raises(ConfigError, match=r"lr=1 data=b.*give another hydra\.sweep\.dir"):
        planned_job.take_over_folder(planned(tmp_path))


@pytest.mark.parametrize("content", ["", "- lr=1\n- 'x", "- lr=1\n- {a", "- lr=1\n-", "hydra:"])
def test_a_folder_whose_files_were_cut_off_holds_no_job(tmp_path, content):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(content)
    planned_job.take_over_folder(job := planned(tmp_path))
    assert job.config.get("resume") is None
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- lr=1\n")
    (tmp_path / ".hydra" / "hydra.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"another job \(lr=1\)"):
        planned_job.take_over_folder(job)


def test_a_job_that_had_started_and_was_not_noted_goes_on(tmp_path):
    job = planned(tmp_path)
    job.row.overrides = ["lr=1", "data=b", "key=${oc.env:NOT_SET}"]
    saved = "".join(f"- {word}\n" for word in job.row.overrides)
    for name, content in ((".hydra/overrides.yaml", saved), ("checkpoints/manifest.json", "{}")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    planned_job.take_over_folder(job)
    assert job.config.resume == str(tmp_path)


def test_a_job_with_other_variables_is_another_one(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- lr=1\n")
    job, of_experiment = planned(tmp_path), "hydra: {job: {env_set: {DATA: /a, TOKEN: '***'}}}\n"
    (tmp_path / ".hydra" / "hydra.yaml").write_text(of_experiment)
    job.row.overrides = ["lr=1"]  # the sweep itself sets none
    job.config = OmegaConf.merge({"reads": ["${oc.env:DATA}", "${oc.env:TOKEN}"]}, OmegaConf.create(of_experiment))
    job.config.hydra.job.env_set.TOKEN = "t"
    planned_job.take_over_folder(job)
    job.config.hydra.job.env_set.DATA = "/b"
    with pytest.raises(ConfigError, match=r"another job \(lr=1 hydra.job.env_set.DATA=/a\)"):
        planned_job.take_over_folder(job)


def test_the_secrets_of_an_app_of_others_are_not_shown_and_do_not_make_it_another_job(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- db.password=hunter2\n")  # as Hydra writes it
    job = planned(tmp_path)
    with pytest.raises(ConfigError, match=r"another job \(db\.password=\*\*\*\)"):
        planned_job.take_over_folder(job)
    job.row.overrides = ["db.password=***"]
    planned_job.take_over_folder(job)
    job.is_secret = True  # swept, so it may be another password
    with pytest.raises(ConfigError, match=r"what may be another job \(db\.password=\*\*\*\)"):
        planned_job.take_over_folder(job)


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        ({"cluster": {"_target_": "a"}, "dispatch": {}, "trainer": {}}, True),
        ({"cluster": {"_target_": "a"}, "dispatch": {}}, False),
        ({"cluster": {"size": 3}, "dispatch": {}, "trainer": {}}, False),
        ({}, False),
    ],
)
def test_our_configs_are_known_by_their_groups(config, ours):
    assert planned_job.is_ours(OmegaConf.create(config)) == ours


def test_apps_of_others_get_a_local_cluster_of_as_many_workers_as_ranks_unless_they_say_which():
    assert planned_job.own_need(None, {"n_workers": 3}) == Need()
    local = OmegaConf.create(planned_job.own_need(2, None).cluster)
    assert (local._target_, local.n_workers, local.host) == ("distributed.LocalCluster", 2, "127.0.0.1")
    assert OmegaConf.create(planned_job.own_need(2, {"n_workers": 4}).cluster).n_workers == 4
    texts = planned_job.own_need(2, {"_target_": "some.Cluster", "prologue": ["cd ${SCRATCH}"]}).cluster
    assert OmegaConf.to_container(OmegaConf.create(texts), resolve=True)["prologue"] == ["cd ${SCRATCH}"]
    given = {"_target_": "some.Cluster", "prologue": [r"cd \${SCRATCH}"], "text": r"\${SCRATCH}"}
    launcher = utils.instantiate({"_target_": "types.SimpleNamespace", "_recursive_": False, "cluster": given})
    texts = OmegaConf.create(planned_job.own_need(2, launcher.cluster).cluster)
    assert (texts.prologue[0], texts.text) == ("cd ${SCRATCH}", "${SCRATCH}")
    other = OmegaConf.create(planned_job.own_need(2, {"_target_": "some.Cluster"}).cluster)
    assert other == {"_target_": "some.Cluster", "n_workers": 2}


def result(value, status=JobStatus.COMPLETED):
    found = JobReturn(status=status)
    found._return_value = value
    return found


NAN = "job 0: val/loss has no finite value, which is a failure (hydra.sweeper.max_failure_rate)"


@pytest.mark.parametrize(
    ("value", "state", "told"),
    [
        (0.5, JobState.done, 0.5),
        (math.inf, JobState.done, NAN),  # as in a second start
        (math.nan, JobState.done, NAN),
        (None, JobState.done, NAN),  # the sweep went on
        (None, JobState.paused, NAN),
        (math.nan, JobState.stopped, "worst"),
        (None, JobState.stopped, "worst"),
    ],
)
@pytest.mark.parametrize("maximize", [False, True])
def test_optuna_gets_a_finite_value_of_a_job_of_ours(tmp_path, value, state, told, maximize):
    worst = -math.inf if maximize else math.inf
    check_told(planned(tmp_path), value, state, worst if told == "worst" else told, maximize)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (math.inf, math.inf),
        (None, None),
        ("text", "text"),
        ("nan", NAN),
        (np.float32("nan"), NAN),
        (np.array([math.nan]), NAN),
        ([1.0, math.nan], NAN),
        (np.array([1.0, math.nan]), NAN),
    ],
    ids=repr,
)
def test_optuna_gets_no_nan_of_another_app(tmp_path, value, told):
    check_told(planned(tmp_path, is_ours=False), value, JobState.done, told)


def check_told(job, value, state, told, maximize=False):
    job.row.state, job.row.value = state, value
    job.result = job.value_return()
    loss = SweepObjective("val/loss", maximize=maximize)
    found = Sweep.result(SimpleNamespace(tells_optuna=True, objective=loss, stop_reason=""), job)
    assert (str(found._return_value) if found.status == JobStatus.FAILED else found.return_value) == told
    assert (found.status == JobStatus.FAILED) == (told == NAN)


class Awkward(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_a_failed_gang_arrives_with_its_cause():
    failure = Failure("raised", 1, "h", "ValueError: bad")
    error = pickle.loads(pickle.dumps(RankFailed("rank 1 failed", failure, (failure,))))
    assert (str(error), error.failure, error.symptoms) == ("rank 1 failed", failure, (failure,))


def test_an_error_that_cannot_travel_arrives_in_words():
    found = portable(result(Awkward(1, 2), JobStatus.FAILED))
    with pytest.raises(RuntimeError, match="Awkward: 1 and 2"):
        raise pickle.loads(pickle.dumps(found))._return_value


def test_a_value_that_cannot_travel_is_a_failure_that_says_so():
    found = portable(result(lambda: None))
    assert found.status == JobStatus.FAILED
    with pytest.raises(TypeError, match="the task returned a function, which cannot be sent"):
        _ = found.return_value


def test_a_result_keeps_its_configs_in_little_space():
    cfg = OmegaConf.create({"layers": [{"width": 8, "name": "a"}] * 200})
    given = JobReturn(["a=1"], cfg, OmegaConf.create({"hydra": 1}), "folder", "task", JobStatus.COMPLETED)
    given._return_value = 0.5
    found = pickle.loads(pickle.dumps(portable(given)))
    assert isinstance(found, JobReturn)
    for name in ("overrides", "cfg", "hydra_cfg", "working_dir", "task_name", "status", "return_value"):
        assert getattr(found, name) == getattr(given, name)
    assert len(pickle.dumps(found)) < len(pickle.dumps(given)) / 5
    found.cfg = None
    assert found.cfg is None


@pytest.mark.medium
def test_an_error_shows_where_it_was_raised(end):
    found = pickle.loads(pickle.dumps(end(lambda _: 1 / 0).result))
    with pytest.raises(ZeroDivisionError) as caught:
        _ = found.return_value
    assert "end(lambda _: 1 / 0)" in str(caught.value.__cause__), "the line of the task in the job's process"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("first\nsecond"), "first"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (
            InstantiationException("Error in call to target 'a.Model':\nValueError('no such layer')\nfull_key: model"),
            "InstantiationException: Error in call to target 'a.Model': ValueError('no such layer')",
        ),
        (ConfigError("the data set:"), "the data set:"),
    ],
)
def test_an_error_is_one_line_in_the_overview(error, line):
    assert describe_error(error) == line


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


def called(cfg):
    """A task that calls what its config names."""
    return utils.instantiate(cfg)


def call(cfg, context):
    return pickled_call(called, (cfg, None, Singleton.get_state(), targets_allowed_by(context), {}), {})


@pytest.mark.usefixtures("hydra_restore_singletons")
def test_on_a_rank_the_variables_of_a_jobs_config_are_set_while_its_task_runs(monkeypatch):
    job = OmegaConf.create({"env_set": {"PLACE": "here"}, "env_copy": ["TOKEN", "NOT_SET"]})
    for name, value in {"PLACE": "here", "TOKEN": "a"}.items():  # as Hydra has set them around the launcher's task
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NOT_SET", raising=False)
    variables = variables_of_job(job)
    for name in ("PLACE", "TOKEN"):
        monkeypatch.delenv(name)
    task = pickled_call(lambda _: dict(os.environ), ({}, None, Singleton.get_state(), None, variables), {})
    found = other_apps.run_task(task, [])
    assert (found["PLACE"], found["TOKEN"]) == ("here", "a")
    assert not {"PLACE", "TOKEN", "NOT_SET"} & set(os.environ)


@pytest.mark.skipif(not hasattr(utils, "execution_whitelist"), reason="Hydra 1.3 knows no such lists")
@pytest.mark.usefixtures("hydra_restore_singletons")
def test_on_a_rank_an_app_may_call_what_it_may_call_anywhere():
    with utils.execution_whitelist("fractions.*"):
        context = SimpleNamespace(execution_whitelist=("collections.Counter",))
        found = other_apps.run_task(call({"_target_": "collections.Counter", "_args_": ["aab"]}, context), [])
        assert found == {"a": 2, "b": 1}
        with pytest.raises(InstantiationException, match="not in the Hydra execution whitelist"):
            other_apps.run_task(call({"_target_": "fractions.Fraction"}, context), [])


@pytest.mark.skipif(not hasattr(utils, "execution_whitelist"), reason="Hydra 1.3 knows no such lists")
def test_an_app_that_lifts_all_checks_lifts_them_on_ranks():
    lifted = cloudpickle.loads(cloudpickle.dumps(utils.UNSAFE_DISABLE_EXECUTION_CHECKS))
    with allowing(lifted):
        assert utils.instantiate({"_target_": "collections.Counter"}) == {}


def test_an_app_that_says_nothing_of_it_is_left_alone():
    assert targets_allowed_by(SimpleNamespace()) is None
    with allowing(None):
        pass
