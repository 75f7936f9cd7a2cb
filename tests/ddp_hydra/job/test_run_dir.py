from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from ddp_hydra.config import project
from ddp_hydra.errors import ConfigError
from ddp_hydra.job import run_dir
from ddp_hydra.job.run_dir import RunDirCallback, refuse_other_run, remove_unused
from ddp_hydra.storage.manifest import FOLDER, NAME, CheckpointEntry, CheckpointPart, encode_manifest
from ddp_hydra.writers import run_dir as writers_run_dir
from ddp_hydra.writers.run_dir import last_metrics, locked, next_attempt

HOLD = """
import sys, pathlib
from ddp_hydra.writers.run_dir import locked
with locked(pathlib.Path(sys.argv[1])):
    print(flush=True)
    input()
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("password: hunter2", False),
        ("  auth: {user: me, token: 'abc'}", False),
        ('"api_key": "abc"', False),
        ("url: https://me:hunter2@host/", False),
        ("password: null", True),
        ("password: ${oc.env:PASSWORD}   # of the cluster", True),
        ("# password: hunter2", True),
        ("seed: 0", True),
    ],
)
def test_code_is_kept_unless_a_config_holds_a_secret(line, kept, tmp_path):
    (tmp_path / "own" / "conf").mkdir(parents=True)
    (tmp_path / "own" / "conf" / "config.yaml").write_text(f"{line}\n")
    packed = project.pack(tmp_path / "own", project.starter())
    run_dir.keep_project(tmp_path, packed)
    assert (tmp_path / "project.zip").is_file() is kept
    run_dir.keep_project(tmp_path / "missing", packed)


def test_the_jobs_of_a_sweep_share_one_copy_of_the_code(tmp_path, monkeypatch):
    sweep = tmp_path / "sweep"
    monkeypatch.setattr(run_dir, "sweep_dir", lambda _: sweep)
    first, edited = (project.Project("0", make(f"seed: {n}")) for n in range(2))
    for number, packed in enumerate((first, first, edited, edited)):
        (sweep / f"lr={number}" / "deep").mkdir(parents=True)
        run_dir.keep_project(sweep / f"lr={number}" / "deep", packed)
    files = [sweep / f"lr={number}" / "deep" / "project.zip" for number in range(4)]
    assert [path.read_bytes() for path in files] == [first.archive] * 2 + [edited.archive] * 2
    assert len({path.stat().st_ino for path in files}) == 2
    assert (sweep / "project.zip").samefile(files[3])
    (sweep / "project.zip").unlink()
    (sweep / "project.zip").symlink_to(tmp_path / "else.zip")
    (tmp_path / "else.zip").write_bytes(first.archive)
    run_dir.keep_project(sweep / "lr=0" / "deep", first)
    assert not files[0].is_symlink(), "nothing goes through a link"


def make(line: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("conf/config.yaml", line)
    return content.getvalue()


def test_a_secret_is_not_kept_beside_a_sweep_either(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "sweep_dir", lambda _: tmp_path)
    (tmp_path / "0").mkdir()
    run_dir.keep_project(tmp_path / "0", project.Project("0", make("password: hunter2")))
    assert not list(tmp_path.rglob("*.zip"))


@pytest.mark.parametrize(
    ("mode", "run", "found"),
    [("MULTIRUN", "sweep/a/0", True), ("MULTIRUN", "other/0", False), ("RUN", "sweep/0", False)],
)
def test_a_run_of_a_sweep_knows_the_folder_of_the_sweep(tmp_path, monkeypatch, mode, run, found):
    monkeypatch.setattr(run_dir.HydraConfig, "initialized", lambda: True)
    hydra_cfg = OmegaConf.create({"mode": RunMode[mode], "sweep": {"dir": str(tmp_path / "sweep")}})
    monkeypatch.setattr(run_dir.HydraConfig, "get", lambda: hydra_cfg)
    assert run_dir.sweep_dir(tmp_path / run) == (tmp_path / "sweep" if found else None)


@pytest.mark.medium
def test_one_process_at_a_time_writes_and_a_dead_one_lets_go(tmp_path):
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        with (
            pytest.raises(
                ConfigError, match=rf"run is being written by process {holder.pid} on .*hydra\.run\.dir=.*resume="
            ),
            locked(run_dir),
        ):
            pass
        holder.kill()
        holder.wait()
    for _ in range(2):
        with locked(run_dir):
            assert (run_dir / ".lock").exists()
        assert not list(run_dir.iterdir())


def test_a_lock_that_its_holder_has_just_taken_away_is_none(tmp_path, monkeypatch):
    real, calls = fcntl.flock, []

    def late(handle, operation):
        calls.append(operation)
        if len(calls) == 1:
            (tmp_path / ".lock").unlink()
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with ExitStack() as stack:
        stack.enter_context(locked(tmp_path))
        assert len(calls) == 2
        with pytest.raises(ConfigError, match="is being written"):
            stack.enter_context(locked(tmp_path))


@pytest.mark.parametrize(
    ("instead", "advice"),
    [("", "give another with hydra.run.dir=<folder>"), ("wait", "choose a folder that you may write")],
)
def test_a_folder_that_cannot_be_written_is_told_with_what_its_user_may_type(tmp_path, instead, advice):
    (tmp_path / "file").touch()
    with ExitStack() as stack, pytest.raises(ConfigError, match=rf"/file/x can't be written \(Not a .*\): {advice}$"):
        stack.enter_context(locked(tmp_path / "file" / "x", instead))


def test_a_disk_that_knows_no_locks_will_do(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    "resume", ["{}/run", "run", "file://{}/run", "{}/run/checkpoints", "run/checkpoints/step-000010.pt"]
)
def test_a_run_goes_on_in_its_own_folder(tmp_path, resume, monkeypatch):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-000010.pt").touch()
    monkeypatch.chdir(tmp_path)
    refuse_other_run(tmp_path / "run", resume.format(tmp_path))
    assert next_attempt(tmp_path / "run") == next_attempt(tmp_path / "nowhere") == 0


@pytest.mark.parametrize("resume", [None, "other", "s3://bucket/run", "/"])
def test_another_run_does_not_get_into_it(tmp_path, resume):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").write_text('{"status": "failed"}')
    refuse_other_run(tmp_path / "run", resume)  # it has left nothing to go on from
    (tmp_path / "run/summary.json").write_text('{"status": "done"}')
    with pytest.raises(ConfigError, match="holds another run"):
        refuse_other_run(tmp_path / "run", resume)


def test_a_folder_that_points_to_its_results_is_that_run(tmp_path):
    (tmp_path / "results.url").write_text("s3://bucket/run\n")
    refuse_other_run(tmp_path, None)  # its driver finds the other run
    with pytest.raises(ConfigError, match="holds another run"):
        refuse_other_run(tmp_path, None, is_stored=False)
    (tmp_path / "summary.json").write_text('{"status": "done"}')
    for own in ("s3://bucket/run", "s3://bucket/run/", str(tmp_path)):
        refuse_other_run(tmp_path, own)
    for other in ("s3://bucket/other", str(tmp_path.parent / "other")):
        with pytest.raises(ConfigError, match="holds another run"):
            refuse_other_run(tmp_path, other)


@pytest.mark.parametrize(
    ("files", "mode", "found"),
    [
        ({}, "RUN", False),
        ({"summary.json": '{"status": "failed"}', "results.url": "s3://bucket/run"}, "RUN", False),
        ({"summary.json": '{"status": "failed", "from_step": 0}'}, "RUN", True),
        ({"summary.json": '{"status": "done"}'}, "RUN", True),
        ({"summary.json": '{"status": "done"}'}, "MULTIRUN", False),
        ({"results.url": "s3://bucket/run"}, "RUN", True),
        ({"checkpoints/last.pt": ""}, "RUN", True),
    ],
)
def test_only_a_run_that_has_trained_has_a_record_that_is_kept(files, mode, found, tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir.HydraConfig, "initialized", lambda: True)
    hydra_cfg = OmegaConf.create({"mode": RunMode[mode], "sweep": {"dir": str(tmp_path)}})
    monkeypatch.setattr(run_dir.HydraConfig, "get", lambda: hydra_cfg)
    for name, content in files.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(content)
    assert run_dir.has_record(tmp_path / "run") is found


def test_a_run_that_was_killed_while_it_wrote_its_first_checkpoint_may_begin_again(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with zipfile.ZipFile(folder / "step-000004.pt", "w") as archive:
        archive.writestr("data", "weights")
    with pytest.raises(ConfigError, match="holds another run"):
        refuse_other_run(tmp_path, None)  # it was written whole, and can be resumed
    whole = (folder / "step-000004.pt").read_bytes()
    (folder / "step-000004.pt").write_bytes(whole[:-9])
    refuse_other_run(tmp_path, None)
    (folder / "manifest.json").write_text('{"checkpoints": {}}')
    with pytest.raises(ConfigError, match="holds another run"):
        refuse_other_run(tmp_path, None)


def test_hydra_is_stopped_before_it_writes_into_the_folder_of_another_run(tmp_path):
    hydra = {"run": {"dir": str(tmp_path / "run")}, "output_subdir": ".hydra"}
    cfg = OmegaConf.create({"resume": None, "dry_run": False, "hydra": hydra})
    RunDirCallback().on_run_start(cfg)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/last.pt").touch()
    with pytest.raises(SystemExit, match=r"ddp_hydra: .*run holds another run"):
        RunDirCallback().on_run_start(cfg)
    cfg.resume = str(tmp_path / "run")
    RunDirCallback().on_run_start(cfg)
    cfg.resume, cfg.hydra.output_subdir = None, None
    RunDirCallback().on_run_start(cfg)


def test_a_dry_run_writes_no_config_over_that_of_the_run_in_its_folder(tmp_path):
    cfg = OmegaConf.create({"dry_run": True, "hydra": {"run": {"dir": str(tmp_path)}, "output_subdir": ".hydra"}})
    OmegaConf.set_struct(cfg, True)
    OmegaConf.set_readonly(cfg.hydra, True)
    RunDirCallback().on_run_start(cfg)
    assert cfg.hydra.output_subdir is None
    (tmp_path / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    for name in ("empty", "", "missing"):
        remove_unused(tmp_path / name, None)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("files", "is_unused"),
    [
        ((".hydra/config.yaml", ".hydra/overrides.yaml"), True),
        ((".hydra/config.yaml", "summary.json"), False),
        ((".hydra/config.yaml", ".hydra/notes.txt"), False),
        (("notes.txt",), False),
    ],
)
def test_only_a_folder_in_which_nobody_but_hydra_has_written_is_removed(tmp_path, files, is_unused):
    run_dir = tmp_path / "run"
    for name in files:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("")
    remove_unused(run_dir, ".hydra")
    assert run_dir.exists() != is_unused
    assert sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()) == sorted(
        () if is_unused else files
    )


def lines(*found: dict[str, Any]) -> str:
    return "".join(json.dumps({"attempt": 0, "epoch": 1, "samples": None, **line}) + "\n" for line in found)


def test_what_was_measured_until_a_step_comes_from_the_newest_place_that_knows_it(tmp_path):
    part = CheckpointPart(name="step.pt", size=1, sha256="")
    entry = CheckpointEntry(parts=[part], step=20, samples=160, metrics={"val/loss": 0.5, "val/f1": 0.6, "lr": 0.1})
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / NAME).write_bytes(encode_manifest({"step-000020.pt": entry}))
    (tmp_path / "metrics.jsonl").write_text(
        lines(
            {"step": 20, "train/loss": 2.0, "metrics/step": 5.0, "text": "odd"},
            {"step": 20, "val/loss": None},
            {"step": 20, "host": 7.0, "rank": 1},
            {"step": 21, "train/loss": 1.0, "val/loss": 9.0},
            {"step": 19, "late": 3.0},
        )
        + '{"step": 20, "cut'
    )
    before = run_dir.Measured(10, 80, {"val/loss": 0.9, "rare": 4.0})
    lost = run_dir.Measured(25, 200, {"val/loss": 9.0, "only later": 1.0})
    saved = {"val/loss": 0.5, "val/f1": 0.6, "lr": 0.1}  # means over an epoch, where a line has those of its last steps
    logged = {"train/loss": 2.0, "step": 5.0, "late": 3.0, **saved}
    found = run_dir.measured_until(tmp_path, 20, [lost, before])
    assert found == run_dir.Measured(20, 160, {"rare": 4.0, **logged})
    assert run_dir.measured_until(tmp_path, 20, [lost]).metrics == logged
    assert run_dir.measured_until(tmp_path, 25, [lost, before]) is lost
    assert run_dir.measured_until(tmp_path / "none", 20, [lost]) == run_dir.Measured(20)


def test_of_many_lines_only_the_last_ones_up_to_a_step_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(writers_run_dir, "_TAIL_BYTES", 70)  # lines are split there
    monkeypatch.setattr(writers_run_dir, "_LINES_BYTES", 1000)
    found = [{"step": step, f"of/{step}": step} for step in range(1, 100)]
    (tmp_path / "metrics.jsonl").write_text(lines(*found))
    assert last_metrics(tmp_path, 0) == {}
    last = last_metrics(tmp_path, 50)
    assert last == {f"of/{step}": step for step in range(51 - len(last), 51)}
    assert 10 < len(last) < 20


def test_a_folder_that_cannot_be_looked_at_is_left_to_hydra(tmp_path):
    config = OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path / ("x" * 300))}, "output_subdir": ".hydra"}})
    RunDirCallback().on_run_start(config)


def test_a_summary_that_is_cut_off_is_told_with_what_to_do(tmp_path):
    (tmp_path / "summary.json").write_text('{"status": "do')
    with pytest.raises(ConfigError, match=r"summary\.json can't be read: .*; to go on without it, move it away$"):
        refuse_other_run(tmp_path, str(tmp_path))
