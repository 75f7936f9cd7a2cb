"""How a job ends: what it returns, prints, and writes to its summary."""

import contextlib
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS, STATUS_UNKNOWN
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ddp_hydra.api import Run
from ddp_hydra.cli.main import error_message
from ddp_hydra.errors import (
    ClusterError,
    ConfigError,
    DdpHydraError,
    Failure,
    Interrupted,
    NonFiniteLoss,
    RankFailed,
    RecordError,
    SchedulerLost,
)
from ddp_hydra.job import job_config, summary
from ddp_hydra.job.inference import InferenceJob
from ddp_hydra.job.run import Job, run_job
from ddp_hydra.job.run_dir import hold, is_held
from ddp_hydra.job.summary import explain, summarised
from ddp_hydra.record import Metrics, Record, Start
from ddp_hydra.run_state import AttemptEntry, Best
from ddp_hydra.storage.files import cannot_write
from ddp_hydra.storage.manifest import CheckpointEntry, CheckpointPart, encode_manifest
from tests.ddp_hydra.job.jobs import PACKED, VALUE, checkpoint, config, ended, make, zipped

KEYS = {"kind", "rank", "host", "attempt", "step", "message", "place", "traceback"}


@pytest.fixture
def returned(monkeypatch) -> dict[str, Any]:
    """What `run` gets from rank 0, without a cluster."""
    value = dict(VALUE)

    def run_on_dask(self, packed, stop):
        self.summary.steps, self.summary.samples = 7, 56
        return value

    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    monkeypatch.setattr(job_config.project, "find", Path)
    monkeypatch.setattr(job_config.project, "pack", lambda root: PACKED)
    return value


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def test_a_job_that_is_done_says_so_and_returns_its_objective(returned, tmp_path, capsys):
    cfg = config(
        tags=["a", "https://me:word@host/x"], objective__metric="val/accuracy", data__val={"_target_": "a.Set"}
    )
    assert run_job(cfg, tmp_path / "run") == 0.5
    summary = summary_of(tmp_path / "run")
    assert {
        name: summary[name]
        for name in ("status", "steps", "samples", "tags", "failure", "interrupted", "stopped_early")
    } == {
        "status": "done",
        "steps": 20,
        "samples": 160,
        "tags": ["a", "https://***@host/x"],
        "failure": None,
        "interrupted": "",
        "stopped_early": "",
    }
    assert summary["metrics"] == {"val/accuracy": 0.5, "train/loss": None}
    assert summary["objective"] == {"metric": "val/accuracy", "direction": "maximize"}
    assert (tmp_path / "run" / "project.zip").read_bytes() == PACKED.archive
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"ddp_hydra  ->  {tmp_path / 'run'}"
    assert second.startswith("done: 20 steps in 1.5 s, 107 samples/s, 900 tokens/s, val/accuracy 0.5")


def test_what_was_downloaded_to_begin_with_goes_at_the_end(returned, tmp_path, monkeypatch):
    downloads = tmp_path / "run" / ".resume"

    def fetch(url, folder, which, retry_s):
        assert (url, folder, which, retry_s) == ("s3://bucket/run", downloads, "last", 7.0)
        (folder / "step-000010-0123456789ab.pt").write_bytes(zipped(b"content"))
        return folder / "step-000010-0123456789ab.pt"

    def run_on_dask(self, packed, stop):
        assert self.files == {"resume": downloads / "step-000010-0123456789ab.pt"}
        assert self.files["resume"].is_file()
        return returned

    monkeypatch.setattr("ddp_hydra.storage.run_ref.fetch_checkpoint", fetch)
    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    run_job(config(resume="s3://bucket/run", results__retry_s=7.0), tmp_path / "run")
    assert not downloads.exists()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("interrupt", "interrupted; saved at step 20: go on with resume="),
        ("time_limit", "the time of trainer.time_limit_s is up; saved at step 20"),
        ("preemption", "a worker is being shut down (SIGTERM); saved at step 20"),
    ],
)
def test_a_job_that_was_asked_to_end_says_why_and_how_to_go_on(reason, words, returned, tmp_path):
    returned["interrupted"] = reason
    with pytest.raises(Interrupted) as caught:
        run_job(config(), tmp_path)
    assert words in str(caught.value)
    assert (summary_of(tmp_path)["status"], summary_of(tmp_path)["interrupted"]) == ("interrupted", reason)


def test_a_paused_job_went_well_and_says_how_to_go_on(returned, tmp_path, capsys):
    returned |= {"interrupted": "pause", "metrics": {"train/loss": 0.5}}
    cfg = config(objective__metric="val/accuracy", data__val={"_target_": "a.Set"})
    run_job(cfg, tmp_path / "run")
    assert (summary_of(tmp_path / "run")["status"], summary_of(tmp_path / "run")["interrupted"]) == ("paused", "pause")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("paused: 20 steps")
    assert lines[-1].endswith(f"saved at step 20: go on with resume={tmp_path / 'run'}")


def test_the_objective_of_a_validation_just_before_a_restart_is_returned(returned, monkeypatch, tmp_path):
    def run_on_dask(self, packed, stop):
        self.summary.update({"steps": 20, "samples": 160, "metrics": {"val/accuracy": 0.75}})
        return {**returned, "metrics": {}}

    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    cfg = config(objective__metric="val/accuracy", data__val={"_target_": "a.Set"})
    assert run_job(cfg, tmp_path / "run") == 0.75
    assert summary_of(tmp_path / "run")["metrics"] == {"val/accuracy": 0.75}


def test_a_run_that_has_nothing_left_to_do_returns_the_objective_of_its_checkpoint(returned, monkeypatch, tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "last.pt").touch()
    part = {"name": "step.pt", "size": 0, "sha256": "0"}
    entry = {"parts": [part], "metrics": {"val/accuracy": 0.75, "train/loss": None, "lr": 0.5}}
    content = {"step-000020.pt": {**entry, "metrics": {"val/accuracy": 0.5}}, "step-000030.pt": entry}
    (run_dir / "checkpoints" / "manifest.json").write_text(json.dumps({"checkpoints": content}))
    monkeypatch.setattr("ddp_hydra.job.run.find_resume", lambda *_: run_dir / "checkpoints" / "last.pt")
    returned |= {"interrupted": "pause", "metrics": {"lr": 0.1}}
    cfg = config(objective__metric="val/accuracy", data__val={"_target_": "a.Set"}, resume=str(run_dir))
    assert run_job(cfg, run_dir) == 0.75
    assert summary_of(run_dir)["metrics"] == {"val/accuracy": 0.75, "lr": 0.1}
    elsewhere = config(objective__metric="val/accuracy", data__val={"_target_": "a.Set"}, resume=str(run_dir))
    assert run_job(elsewhere, tmp_path / "other") is None, "those are the metrics of another run"


def test_hostile_values_of_a_rank_leave_a_whole_summary_of_a_failed_job(returned, tmp_path):
    returned.update(train_s=float("nan"), status="done")
    with pytest.raises(RecordError):
        run_job(config(), tmp_path)
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["failure"]["kind"], summary["steps"]) == ("failed", "RecordError", 7)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("reason", "status"), [("", STATUS_SUCCESS), ("pause", STATUS_SUCCESS), ("time_limit", STATUS_UNKNOWN)]
)
def test_a_job_shows_in_tensorboard_what_it_was_given_and_how_it_ended(reason, status, returned, tmp_path):
    returned["interrupted"] = reason
    with contextlib.suppress(Interrupted):
        run_job(config(), tmp_path, ["optimizer.lr=0.5"])
    start, end = [
        HParamsPluginData.FromString(event.summary.value[0].metadata.plugin_data.content)
        for path in sorted((tmp_path / "tensorboard").glob("*.hparams"))
        for event in EventFileLoader(str(path)).Load()
        if event.HasField("summary")
    ]
    assert {name: value.number_value for name, value in start.session_start_info.hparams.items()} == {
        "optimizer.lr": 0.5
    }
    assert end.session_end_info.status == status


def summary_after(error: BaseException | None, run_dir: Path) -> dict[str, Any]:
    def run() -> None:
        with summarised(run_dir, config(tags=["x"])) as summary:
            summary.restarts = 2
            if error is not None:
                raise error
            summary.status = "done"

    if error is None:
        run()
    else:
        with pytest.raises(type(error)) as caught:
            run()
        assert caught.value is error
    assert sorted(path.name for path in run_dir.iterdir()) == ["summary.json"]
    return summary_of(run_dir)


FAILURE = Failure("killed", 3, "node-7", "killed by SIGKILL", attempt=2, step=20, phase="load")


def test_the_failure_of_a_rank_is_in_the_summary(tmp_path):
    summary = summary_after(RankFailed("m", FAILURE), tmp_path / "run")
    assert summary["failure"] == FAILURE.as_dict()
    assert (summary["status"], summary["restarts"], summary["tags"]) == ("failed", 2, ["x"])
    assert {"started", "wall_s", "ddp_hydra", "steps_lost"} <= summary.keys()


@pytest.mark.medium
@pytest.mark.parametrize(
    "error",
    [ConfigError("bad"), NonFiniteLoss("nan"), DdpHydraError("x"), ZeroDivisionError("oops"), OSError(28, "full")],
    ids=lambda error: type(error).__name__,
)
def test_every_other_failure_has_the_same_fields_and_a_traceback_where_it_is_nobodys_sentence(error, tmp_path):
    failure = summary_after(error, tmp_path)["failure"]
    assert failure.keys() == KEYS == FAILURE.as_dict().keys()
    assert (failure["kind"], failure["message"]) == (type(error).__name__, str(error))
    assert [failure[name] for name in ("rank", "host", "attempt", "step")] == [None] * 4
    assert bool(failure["traceback"]) is not isinstance(error, DdpHydraError)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("saved at step 3")], ids=["at once", "saved"])
def test_an_interrupt_is_no_failure(error, tmp_path):
    summary = summary_after(error, tmp_path)
    assert (summary["status"], summary["failure"], summary["interrupted"]) == ("interrupted", None, "interrupt")


def test_who_does_not_wait_for_a_checkpoint_hears_of_the_last_one(tmp_path):
    checkpoint(tmp_path, 10, 20)
    said = f"interrupted; step 20 is saved: go on with resume={tmp_path}"
    with pytest.raises(KeyboardInterrupt, match=said), summarised(tmp_path, config()):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "has_log"),
    [
        (RankFailed("m", FAILURE), True),
        (RankFailed("m", replace(FAILURE, mistake=True)), False),
        (SchedulerLost("m"), False),
    ],
)
def test_who_failed_hears_where_the_log_and_the_checkpoint_are(tmp_path, error, has_log):
    checkpoint(tmp_path, 10, 20)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-3.log").write_text("printed\n")
    with (
        pytest.raises(ClusterError if isinstance(error, SchedulerLost) else RankFailed),
        summarised(tmp_path, config()),
    ):
        raise error
    saved = f"saved:   step 20; go on with resume={tmp_path}"
    log = f"log:     {tmp_path}/logs/rank-3.log"
    assert explain(error) == "\n".join(["m", "", *([log] if has_log else []), saved])


def test_odd_words_of_a_rank_can_be_written_down(tmp_path):
    odd = Failure("raised", 0, "h", "\ud800 \0 \U0001f600", traceback="\x1b[31m")
    assert summary_after(RankFailed("m", odd), tmp_path)["failure"] == odd.as_dict()


def test_a_run_directory_that_cannot_be_written_is_told_with_what_to_give(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"can't be written .*hydra\.run\.dir="),
        summarised(tmp_path / "file" / "run", config()),
    ):
        pass


@pytest.mark.parametrize(("steps", "advice"), [((10, 20), "step 20 is saved; "), ((), "nothing was saved before; ")])
def test_a_disk_that_stays_full_is_told_with_what_is_safe_and_what_to_type(steps, advice, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if steps:
        checkpoint(run_dir, *steps)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run_dir / "metrics.jsonl"))

    def fail(*_: Any) -> None:
        raise full

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RecordError, match=r"cannot write .*metrics\.jsonl") as caught, summarised(run_dir, config()):
        raise cannot_write("metrics.jsonl", full) from full
    *_, last = error_message(caught.value).splitlines()
    assert last.startswith(advice)
    assert re.search(rf"[\d,]+ bytes are free in {run_dir}: free some space there, then ", last)
    assert last.endswith(f"go on with resume={run_dir}" if steps else "start it again")
    assert not [path.name for path in run_dir.iterdir() if path.name != "checkpoints"]


def test_where_a_restart_begins_is_told_with_what_is_done_again(tmp_path):
    made = make(tmp_path)
    assert made.end_attempt(0, []) == ", from step 0"
    made.write(Record(Start(), step=4))
    assert made.end_attempt(5, []) == ", from step 4 (1 step again)"
    checkpoint(tmp_path, 10, 20)
    assert made.end_attempt(22, []) == ", from step 4 (18 steps again)"  # the checkpoints are another run's
    made.sent.add(20)
    assert made.end_attempt(22, []) == ", from step 20 (2 steps again)"


def test_a_second_run_does_not_get_into_the_folder_of_the_first(returned, tmp_path):
    checkpoint(tmp_path, 10)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=rf"holds another run.* go on with it by resume={tmp_path}"):
        run_job(config(), tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    run_job(config(resume=str(tmp_path)), tmp_path)
    assert summary_of(tmp_path)["status"] == "done"


def test_attempts_count_on_where_an_earlier_process_ended(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"attempt": 0}\n{"attempt": 2}\n{"att')
    (tmp_path / "summary.json").write_text('{"status": "failed", "attempts": [{"attempt": 1}]}')
    made = make(tmp_path)
    assert (made.first_attempt, made.earlier_attempts) == (3, [AttemptEntry(attempt=1)])
    made.call(3, 4)
    assert made.first_world_size == 4


def test_a_fault_of_a_rank_that_no_attempt_has_is_refused(tmp_path):
    made = make(tmp_path, faults=["kill,rank=4"])
    with pytest.raises(ConfigError, match=r"^fault='kill,rank=4' has no effect: this job has ranks 0 to 3$"):
        made.call(0, 4)
    with pytest.raises(ConfigError, match="rank 0 only"):
        made.run_here()
    assert make(tmp_path, faults=["kill,rank=4", "interrupt,rank=9"], dispatch__ranks=5).call(0, 4)
    assert made.call(1, 2)
    inline = config(cluster___target_="ddp_hydra.cluster.kinds.Inline")
    for fault, told in [("kill,rank=4", "rank 0 only"), ("worker", "strikes a Dask worker.* give cluster=local")]:
        with pytest.raises(ConfigError, match=told):
            InferenceJob(inline, tmp_path / "a.pt", [], {}, faults=(fault,)).run("no:function")
    for fault in ("nanny,rank=1", "term,rank=1"):
        local, remote = (
            make(tmp_path, faults=[fault], cluster___target_=target)
            for target in ("distributed.LocalCluster", "ddp_hydra.cluster.kinds.local.Remote")
        )
        with pytest.raises(ConfigError, match="strikes the nanny of a Dask worker, and this job has none: give the fa"):
            local.call(0, 4)
        assert remote.call(0, 4)


def test_the_last_lines_say_where_a_profile_is_and_conclude_nothing_from_few_steps():
    value = ended("val/accuracy")
    few = msgspec.structs.replace(value, steps=1, data={"wait_s": 0.1, "wait": 0.3}, slowest={"rank": 0, "times": 4.71})
    lines = summary.closing_lines(msgspec.structs.replace(few, profile="profile/table.md"), "outputs/a").splitlines()
    assert lines[0].startswith("done: 1 step in 1.5 s, 107 samples/s, ")
    resumed = summary.closing_lines(msgspec.structs.replace(value, from_step=5), "outputs/a")
    assert resumed.startswith("done: 20 steps, the last 15 in 1.5 s, 107 samples/s, ")
    nothing_left = summary.closing_lines(msgspec.structs.replace(value, from_step=20), "outputs/a").splitlines()
    assert nothing_left[1] == "nothing was left to train: resume= with more, as trainer.epochs=<n>, goes on"
    value.started, value.from_step, value.attempts = 100.0, 20, [AttemptEntry(started=101.0)]
    assert summary.closing_lines(value, "outputs/a").count("\n") == 0, "its own attempt failed after the last step"
    value.attempts[0].started = 50.0
    assert summary.closing_lines(value, "outputs/a").splitlines() == nothing_left
    value.from_step = None
    told = "profile: outputs/a/profile/table.md, and a trace of each rank in the same folder (ui.perfetto.dev)"
    assert lines[1:] == [told]
    assert "bound by" not in summary.closing_lines(value, "outputs/a")
    longer = summary.closing_lines(msgspec.structs.replace(value, train_s=15.0), "outputs/a")
    assert longer.splitlines()[1].startswith("data: bound by compute")


def test_the_last_lines_name_the_objective_and_the_best_checkpoint_unless_it_is_the_last_one():
    value = msgspec.structs.replace(ended("val/mae"), metrics={"val/mae": 0.25, "val/loss": 0.5})
    first = "done: 20 steps in 1.5 s, 107 samples/s, 900 tokens/s, val/loss 0.5, val/mae 0.25  ->  outputs/a"
    assert summary.closing_lines(msgspec.structs.replace(value, best=Best(20, 0.25)), "outputs/a") == first
    lines = summary.closing_lines(msgspec.structs.replace(value, best=Best(10, 0.125)), "outputs/a").splitlines()
    assert lines == [first, "best: val/mae 0.125 at step 10: checkpoints/best.pt"]


def test_the_last_lines_name_the_folder_of_a_best_checkpoint_in_parts(tmp_path):
    value = msgspec.structs.replace(ended("val/mae"), metrics={"val/mae": 0.25}, best=Best(10, 0.125))
    entry = CheckpointEntry(parts=[CheckpointPart(name="state.pt", size=1, sha256="a")])
    (folder := tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    (folder.parent / "manifest.json").write_bytes(encode_manifest({folder.name: entry, "best.pt": entry}))
    assert summary.closing_lines(value, "a", tmp_path).splitlines()[1].endswith("step 10: checkpoints/step-000010")
    (folder.parent / "best.pt").touch()
    assert summary.closing_lines(value, "a", tmp_path).splitlines()[1].endswith("step 10: checkpoints/best.pt")


def test_the_summary_has_step_and_value_of_the_best_checkpoint(returned, tmp_path):
    (tmp_path / "none").mkdir()
    run_job(config(), tmp_path / "none")
    assert summary_of(tmp_path / "none")["best"] is None
    metric = summary_of(tmp_path / "none")["objective"]["metric"]
    checkpoint(tmp_path, 10)
    manifest = tmp_path / "checkpoints/manifest.json"
    entries = json.loads(manifest.read_text())["checkpoints"]
    entries["best.pt"] = {**next(iter(entries.values())), "metrics": {metric: 0.75}}
    manifest.write_text(json.dumps({"checkpoints": entries}))
    run_job(config(resume=str(tmp_path)), tmp_path)
    assert summary_of(tmp_path)["best"] == {"step": 10, "value": 0.75}


def saved(run_dir: Path, accuracies: dict[int, float], best: int) -> None:
    """Checkpoints with metrics of a validation, and best.pt."""
    checkpoint(run_dir, *accuracies)
    manifest = run_dir / "checkpoints" / "manifest.json"
    content = json.loads(manifest.read_text())
    for entry in content["checkpoints"].values():
        entry["metrics"] = {"val/accuracy": accuracies[entry["step"]]}
    content["checkpoints"]["best.pt"] = content["checkpoints"][f"step-{best:06d}.pt"]
    manifest.write_text(json.dumps(content))


def validated(**changes: Any) -> Any:
    return config(objective__metric="val/accuracy", data__val={"_target_": "a.Set"}, **changes)


@pytest.mark.parametrize("error", [RankFailed("m", FAILURE), KeyboardInterrupt(), RecordError("odd")])
def test_a_run_that_does_not_end_well_has_its_best_checkpoint_and_its_metrics_in_the_summary(
    error, returned, monkeypatch, tmp_path
):
    def run_on_dask(self, packed, stop):
        saved(tmp_path, {10: 0.75, 20: 0.5}, best=10)
        self.summary.update({"from_step": 0, "steps": 25, "metrics": {"train/loss": 1.0}})
        raise error

    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    with pytest.raises(type(error)):
        run_job(validated(), tmp_path)
    found = summary_of(tmp_path)
    assert found["best"] == {"step": 10, "value": 0.75}
    assert found["metrics"] == {"val/accuracy": 0.5, "train/loss": 1.0}
    assert found["interrupted"] == ("interrupt" if isinstance(error, KeyboardInterrupt) else None)


@pytest.mark.parametrize(
    ("begin", "steps", "accuracy"),
    [(20, 25, 0.5), (20, None, 0.5), (10, 15, 0.75), (10, None, 0.75)],
)
def test_a_resume_that_fails_keeps_what_its_checkpoints_tell_until_its_step(
    begin, steps, accuracy, returned, monkeypatch, tmp_path
):
    saved(tmp_path, {10: 0.75, 20: 0.5}, best=10)

    def run_on_dask(self, packed, stop):
        self.summary.update({"from_step": begin, "steps": steps})
        raise RankFailed("m", FAILURE)

    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    elsewhere = tmp_path / "elsewhere"
    resumed = validated(resume=str(tmp_path / "checkpoints" / f"step-{begin:06d}.pt"))
    for run_dir in (tmp_path, elsewhere):
        with pytest.raises(RankFailed):
            run_job(resumed, run_dir)
    found = summary_of(tmp_path)
    assert (found["metrics"], found["best"]) == ({"val/accuracy": accuracy}, {"step": 10, "value": 0.75})
    found = summary_of(elsewhere)
    assert (found["metrics"], found["best"]) == ({}, None), "those are of another run"


SESSION = "events.out.tfevents.1.hparams"
NOT_OF_THIS_MODEL = replace(FAILURE, mistake=True, phase="build")


@pytest.mark.parametrize("summary", ['{"status": "done", "steps": 20}', '{"status": "failed"}', None])
def test_a_resume_that_ends_before_it_trains_leaves_the_record_of_the_run_as_it_was(
    summary, returned, monkeypatch, tmp_path
):
    def refuse(self, packed, stop):
        raise RankFailed("the checkpoint is not of this model", NOT_OF_THIS_MODEL)

    def interrupt(self, packed, stop):
        raise KeyboardInterrupt

    def files() -> dict[str, bytes]:
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    saved(tmp_path, {10: 0.75, 20: 0.5}, best=10)
    written = {"project.zip": "of then", ".hydra/overrides.yaml": "[]", f"tensorboard/{SESSION}": "of then"}
    for name, content in (written | ({} if summary is None else {"summary.json": summary})).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    before, again = files(), {"resume": str(tmp_path)}

    def ends(error: type[BaseException], said: str, **changes: Any) -> None:
        hold(tmp_path, {".hydra/overrides.yaml": b"[model.width=32]"})
        with pytest.raises(error, match=said):
            run_job(validated(**again, **changes), tmp_path, ["model.width=32"])
        assert files() == before
        assert not is_held(tmp_path)

    ends(ConfigError, r"trainer\.epochs=-1", trainer__epochs=-1)
    monkeypatch.setattr(Job, "run_on_dask", refuse)
    ends(RankFailed, "not of this model")
    monkeypatch.setattr(Job, "run_on_dask", interrupt)
    ends(KeyboardInterrupt, "step 20 is saved")


@pytest.mark.parametrize("error", [RankFailed("m", FAILURE), None])
def test_a_resume_writes_its_own_record_once_it_trains(error, returned, monkeypatch, tmp_path):
    def run_on_dask(self, packed, stop):
        self.write(Record(Start(), step=20))
        assert (tmp_path / ".hydra" / "overrides.yaml").read_bytes() == b"[lr=1]"
        assert (tmp_path / "project.zip").read_bytes() == PACKED.archive
        assert not (tmp_path / "tensorboard" / SESSION).exists()
        assert not is_held(tmp_path)
        if error is not None:
            raise error
        return returned

    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    saved(tmp_path, {10: 0.75, 20: 0.5}, best=10)
    (tmp_path / "summary.json").write_text('{"status": "done", "steps": 20}')
    (tmp_path / "project.zip").write_text("of then")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / SESSION).touch()
    hold(tmp_path, {".hydra/overrides.yaml": b"[lr=1]"})
    with pytest.raises(RankFailed) if error else contextlib.nullcontext():
        run_job(validated(resume=str(tmp_path)), tmp_path, ["optimizer.lr=1"])
    found = summary_of(tmp_path)
    assert (found["status"], found["from_step"]) == ("failed" if error else "done", 20)


BEFORE = {
    "status": "interrupted",
    "steps": 20,
    "samples": 160,
    "metrics": {"val/accuracy": 0.5, "val/f1": 0.25},
    "matrices": {"val/confusion": [[1, 0], [0, 1]]},
    "attempts": [{"attempt": 0, "world_size": 2}],
    "restarts": 1,
    "steps_lost": 5,
}


@pytest.mark.parametrize("ends", ["fails", "is interrupted", "fails before it trains"])
def test_a_resume_begins_with_what_the_run_has_measured(ends, returned, monkeypatch, tmp_path):
    """Two times in a row: each resume ends before its first validation."""

    def run_on_dask(self, packed, stop):
        if ends == "fails before it trains":
            raise RankFailed("m", replace(FAILURE, kind="lost"))
        with self.handler(None) as handler:
            handler.handle(Record(Start(), step=20, attempt=self.first_attempt))
            assert self.status.metrics.items() >= BEFORE["metrics"].items()
            handler.handle(Record(Metrics({"train/loss": 1.0}), step=20, attempt=self.first_attempt))
        if ends == "fails":
            raise RankFailed("m", FAILURE)
        return {**returned, "metrics": {"train/loss": 1.0}, "interrupted": "interrupt"}

    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    saved(tmp_path, {10: 0.75, 20: 0.5}, best=10)
    (tmp_path / "summary.json").write_text(json.dumps(BEFORE))
    for _ in range(2):
        with pytest.raises(Interrupted if ends == "is interrupted" else RankFailed):
            run_job(validated(resume=str(tmp_path)), tmp_path)
        found = summary_of(tmp_path)
        assert (found["steps"], found["samples"]) == (20, 160)
        assert found["metrics"] == BEFORE["metrics"] | ({} if ends == "fails before it trains" else {"train/loss": 1.0})
        assert [one["attempt"] for one in found["attempts"]] == [0]
        assert (found["restarts"], found["steps_lost"]) == (1, 5)
        assert found["matrices"] == (BEFORE["matrices"] if ends == "is interrupted" else None)
        assert Run(tmp_path).objective == 0.5


def test_a_resume_from_an_earlier_step_forgets_what_was_measured_later(returned, monkeypatch, tmp_path):
    def run_on_dask(self, packed, stop):
        with self.handler(None) as handler:
            handler.handle(Record(Start(), step=10, attempt=1))
            handler.handle(Record(Metrics({"train/loss": 1.0}), step=15, attempt=1))
            self.end_attempt(15, [AttemptEntry(attempt=1, steps_done=15)])
            handler.handle(Record(Metrics({"val/accuracy": 0.875}), step=15, attempt=1))
            handler.handle(Record(Start(), step=10, attempt=2))
        raise RankFailed("m", FAILURE)

    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    saved(tmp_path, {10: 0.75, 20: 0.5}, best=10)
    (tmp_path / "summary.json").write_text(json.dumps(BEFORE))
    with pytest.raises(RankFailed):
        run_job(validated(resume=str(tmp_path / "checkpoints" / "step-000010.pt")), tmp_path)
    found = summary_of(tmp_path)
    assert (found["steps"], found["metrics"]) == (10, {"val/accuracy": 0.75})


def test_a_job_that_is_lost_before_it_trains_tells_torchrun_so(returned, monkeypatch, tmp_path):
    def run_on_dask(self, packed, stop):
        raise RankFailed("m", replace(FAILURE, kind="lost"))

    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    saved(tmp_path, {10: 0.75}, best=10)
    (tmp_path / "summary.json").write_text('{"status": "interrupted", "interrupted": "time_limit"}')
    with pytest.raises(RankFailed):
        run_job(validated(resume=str(tmp_path)), tmp_path)
    assert (summary_of(tmp_path)["failure"]["kind"], summary_of(tmp_path)["interrupted"]) == ("lost", None)


def test_a_new_run_takes_nothing_from_a_manifest_whose_checkpoints_are_gone(returned, monkeypatch, tmp_path):
    saved(tmp_path, {10: 0.75}, best=10)
    for file in (tmp_path / "checkpoints").glob("*.pt"):
        file.unlink()
    (tmp_path / "summary.json").write_text('{"status": "failed", "metrics": {"val/accuracy": 0.75}}')

    def run_on_dask(self, packed, stop):
        raise RankFailed("m", FAILURE)

    monkeypatch.setattr(Job, "run_on_dask", run_on_dask)
    with pytest.raises(RankFailed):
        run_job(validated(), tmp_path)
    assert (summary_of(tmp_path)["metrics"], summary_of(tmp_path)["best"]) == ({}, None)
