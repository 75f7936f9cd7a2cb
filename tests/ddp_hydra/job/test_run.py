from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from omegaconf import OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.config.schema import resolved
from ddp_hydra.dispatch.gang import Gang
from ddp_hydra.errors import (
    ConfigError,
    RecordError,
)
from ddp_hydra.job import job_config
from ddp_hydra.job.run import TRAIN, Job, run_job
from ddp_hydra.job.summary import read_result
from ddp_hydra.rank import fault_injection, torchrun
from ddp_hydra.rank.fault_injection import InterruptWriter
from ddp_hydra.record import Metrics, Record, Start, Text
from ddp_hydra.run_state import AttemptEntry, Summary
from ddp_hydra.writers.run_dir import write_summary
from tests.ddp_hydra.job.jobs import PACKED, VALUE, checkpoint, config, make, zipped


@pytest.mark.parametrize(
    ("device", "given", "wanted"),
    [("cpu", "auto", "gloo"), ("auto", "auto", "auto"), ("cuda", "auto", "auto"), ("cpu", "nccl", "nccl")],
)
def test_ranks_that_compute_on_the_cpu_leave_the_gpus_alone(device, given, wanted):
    cfg = config(trainer__device=device, dispatch__backend=given)
    assert job_config.backend(cfg) == wanted
    assert job_config.backend(OmegaConf.create(OmegaConf.to_container(cfg, enum_to_str=True))) == wanted  # a driver's


LOCAL = "distributed.LocalCluster"


@pytest.mark.parametrize(
    ("target", "given", "variable", "seconds"),
    [
        (LOCAL, None, None, 300.0),
        (LOCAL, None, "0", 0.0),
        (LOCAL, 20.0, "0", 20.0),
        ("a.Cluster", None, "60", 0.0),
        ("a.Cluster", 20.0, None, 20.0),
    ],
)
def test_torch_stays_imported_on_this_machine_only_unless_it_is_asked_for(
    monkeypatch, target, given, variable, seconds
):
    monkeypatch.delenv("DDP_HYDRA_KEEP_WARM_S")
    if variable:
        monkeypatch.setenv("DDP_HYDRA_KEEP_WARM_S", variable)
    cfg = config(cluster___target_=target, dispatch__keep_warm_s=given)
    assert job_config.gang_settings(cfg).keep_warm_s == seconds


def test_a_variable_that_is_no_number_is_a_mistake(monkeypatch):
    monkeypatch.setenv("DDP_HYDRA_KEEP_WARM_S", "ever")
    with pytest.raises(ConfigError, match="DDP_HYDRA_KEEP_WARM_S=ever: give seconds"):
        job_config.keep_warm_s(config(cluster___target_=LOCAL))


def test_the_global_batch_stays_where_torchrun_starts_a_job_again_on_fewer_hosts(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torchrun, "read_memory", lambda: (1, 4, str(tmp_path)))
    cfg = config(cluster___target_="ddp_hydra.cluster.kinds.torchrun.Torchrun")
    again = Job(tmp_path, cfg, resolved(cfg), {}, Summary(status="failed")).call(0, 2)
    assert again.kwargs["first_ranks"] == 4


def test_a_job_begins_with_no_fewer_workers_than_its_cluster_was_asked_for(tmp_path, monkeypatch):
    asked = {}

    def run_attempts(gang, call, *readers, **settings):
        asked.update(settings)
        return ["value"]

    monkeypatch.setattr(connect, "connect", lambda *_: nullcontext())
    monkeypatch.setattr(Gang, "run_attempts", run_attempts)
    assert make(tmp_path, cluster__n_workers=2).run_on_dask(PACKED) == "value"
    assert (asked["expected"], asked["ranks_before"]) == (2, None)


def test_the_first_attempt_runs_the_job_as_it_was_composed(tmp_path):
    file = tmp_path / "elsewhere.pt"
    made = make(tmp_path, files={"resume": file})
    call = made.call(0, 4)
    assert (call.fn, call.files, call.kwargs) == (TRAIN, {"resume": file}, {"kept": None, "first_save": True})
    assert make(tmp_path).call(0, 4).kwargs["first_save"] is False
    checkpoint(tmp_path, 10)
    assert make(tmp_path, files={"resume": file}).call(0, 4).kwargs["first_save"] is False
    assert call.args == (made.config,)
    assert made.first_world_size == 4


def test_a_later_attempt_goes_on_from_the_newest_checkpoint_with_the_same_global_batch(tmp_path, caplog):
    checkpoint(tmp_path, 10, 20)
    made = make(tmp_path, files={"resume": tmp_path / "elsewhere.pt"})
    before = json.dumps(made.call(0, 4).args)
    call = made.call(1, 2)
    assert call.files["resume"].is_absolute()
    assert call.files["resume"].read_bytes() == zipped(b"content 20")
    assert call.kwargs["first_ranks"] == 4
    assert call.kwargs["first_save"] is False
    assert json.dumps(made.call(0, 4).args) == before


def test_where_the_newest_checkpoint_is_damaged_the_one_before_it_will_do(tmp_path, caplog):
    checkpoint(tmp_path, 10, 20, damaged=(20,))
    call = make(tmp_path, first_world_size=4).call(1, 4)
    assert call.files["resume"].read_bytes() == zipped(b"content 10")
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("there", ["nothing", "damaged", "no manifest to be read"])
@pytest.mark.parametrize("files", [{}, {"resume": Path("elsewhere.pt")}], ids=["new", "resumed"])
def test_where_no_checkpoint_is_whole_the_job_begins_as_it_did_at_first(there, files, tmp_path, caplog):
    if there != "nothing":
        checkpoint(tmp_path, 10, 20, damaged=(10, 20))
    if there == "no manifest to be read":
        (tmp_path / "checkpoints" / "manifest.json").write_text("{")
    assert make(tmp_path, first_world_size=4, files=files).call(1, 4).files == files
    assert ("from the beginning again: " in caplog.text) == (there != "nothing")


def test_checkpoints_that_lay_there_before_are_of_another_job(tmp_path):
    checkpoint(tmp_path, 10, 20)
    made = make(tmp_path, first_world_size=4)
    made.sent.clear()
    assert made.call(1, 4).files == {}


@pytest.mark.parametrize(("spent_s", "left_s"), [(0.0, 100.0), (30.5, 69.5), (1e6, 0.0)])
@pytest.mark.parametrize("number", [0, 1])
def test_an_attempt_has_the_time_that_is_left(number, spent_s, left_s, tmp_path, monkeypatch):
    made = make(tmp_path, first_world_size=4, trainer__time_limit_s=100.0)
    monkeypatch.setattr(made, "elapsed_s", lambda: spent_s)
    assert made.call(number, 4).args[0]["trainer"]["time_limit_s"] == left_s
    assert made.config["trainer"]["time_limit_s"] == 100.0
    assert make(tmp_path, first_world_size=4).call(number, 4).args[0]["trainer"]["time_limit_s"] is None


def test_the_wait_for_workers_is_no_part_of_the_time(tmp_path):
    made = make(tmp_path, first_world_size=4, trainer__time_limit_s=100.0)
    made.begun -= 1000.0
    assert made.call(0, 4).args[0]["trainer"]["time_limit_s"] > 50.0
    made.begun -= 1000.0
    assert made.call(1, 4).args[0]["trainer"]["time_limit_s"] == 0.0


@pytest.mark.parametrize(
    ("record", "lost"),
    [
        (Record(Start(), step=10, attempt=1), 9),
        (Record(Start(), step=None, attempt=1), 19),
        (Record(Start(), step=19, attempt=1), 0),
        (Record(Start(), step=40, attempt=1), 0),
        (Record(Metrics({}), step=10, attempt=1), 0),
    ],
)
def test_steps_that_are_done_again_are_counted(record, lost, tmp_path):
    made = make(tmp_path)
    made.end_attempt(19, [AttemptEntry(steps_done=19)])
    made.write(record)
    assert made.summary.steps_lost == lost


FAILED = {"attempts": [AttemptEntry(steps_done=6), AttemptEntry(attempt=1, steps_done=10)], "restarts": 1}


@pytest.mark.parametrize(
    ("before", "lost", "restarts"),
    [
        ({}, 0, 0),
        ({"steps": 8}, 0, 0),
        ({**FAILED, "steps": 9, "steps_lost": 2}, 2 + 2, 2),
        ({**FAILED, "restarts": 2, "steps": 12, "steps_lost": 4}, 4 + 4, 2),
    ],
    ids=["killed", "interrupted", "failed", "failed, resumed, interrupted"],
)
def test_a_resume_counts_on_from_what_the_process_before_has_done(before, lost, restarts, tmp_path, monkeypatch):
    """Each process goes on at step 8. One that was killed has written no summary."""
    if before:
        write_summary(tmp_path, Summary(status="failed", **before))
    summary = Summary(status="failed", steps_lost=before.get("steps_lost", 0))
    cfg = config()
    job = Job(tmp_path, cfg, resolved(cfg), {}, summary)
    monkeypatch.setattr(
        "ddp_hydra.job.run.inline.run", lambda *_, on_record, **__: [on_record(Record(Start(), step=8))]
    )
    job.run_here()
    assert (summary.steps_lost, summary.restarts, summary.attempts) == (lost, restarts, before.get("attempts", []))


def test_what_a_training_returns_is_taken_as_it_is():
    found = msgspec.to_builtins(read_result({**VALUE, "status": "done", "failure": b"\0"}))
    assert math.isnan(found["metrics"].pop("train/loss"))
    assert found == {**VALUE, "metrics": {"val/accuracy": 0.5}}


@pytest.mark.parametrize(
    "value",
    [
        None, {}, {**VALUE, "steps": "many"}, {**VALUE, "train_s": math.nan}, {**VALUE, "samples_per_s": 10**400},
        {**VALUE, "metrics": {"a": 10**400}}, {**VALUE, "interrupted": "because"},
    ],
    ids=lambda value: repr(value)[-60:],
)  # fmt: skip
def test_what_no_training_returns_is_refused(value):
    with pytest.raises(RecordError, match="rank 0 returned what no training returns"):
        read_result(value)


def test_a_dry_run_builds_the_model_without_the_path_of_its_weights(tmp_path, monkeypatch):
    (tmp_path / "a.pt").touch()
    built = []
    monkeypatch.setattr("ddp_hydra.job.run.inline.run", lambda _, config, **__: built.append(config["model"]))
    monkeypatch.setattr("ddp_hydra.job.run.packed_project", lambda *_: PACKED)
    run_job(config(dry_run=True, model__weights=str(tmp_path / "a.pt")), tmp_path / "run")
    assert built == [{"weights": None}]


def test_an_interrupt_on_purpose_comes_once_from_its_step_on_in_its_attempt(capsys):
    def metrics(step: int, attempt: int) -> Record:
        return Record(Metrics({}), 0, step, 1.0, attempt)

    writer = InterruptWriter(fault_injection.parse(["interrupt,step=5,attempt=1"]))
    for record in (metrics(4, 1), metrics(9, 0), Record(Text("a", "b"), 0, 9, 1.0, 1)):
        writer.write(record)
    with pytest.raises(KeyboardInterrupt):
        writer.write(metrics(6, 1))
    assert "fault on purpose: Fault(kind='interrupt'" in capsys.readouterr().out
    writer.write(metrics(7, 1))
    writer.close()
