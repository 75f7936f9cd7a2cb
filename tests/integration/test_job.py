"""The command line, from a config to a finished run directory."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import OmegaConf

from ddp_hydra.config.project import pack
from tests.integration.support.training import train

pytestmark = pytest.mark.integration

TINY = ("data=tiny", "model=tiny", "optimizer.lr=0.1", "trainer.log_every_steps=1")
ENDLESS = (*TINY, "trainer.epochs=100000", "data.delay_s=0.001", "trainer.checkpoint_every_steps=5")


def lines_of(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


def summary_of(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


# -- a whole run, of the real data --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(module_cli) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A short run of the demo's images, on two ranks. test_wheel.py has its model."""
    run = module_cli.folder / "run"
    ended = module_cli.done(
        "data=s3_images",
        "data.image_size=8",
        "model=pixels",
        "data.batch_size=16",
        "trainer.epochs=1",
        "trainer.max_steps=4",
        "trainer.log_every_steps=1",
        "trainer.checkpoint_every_steps=3",
        "tags=[short,test]",
        f"hydra.run.dir={run}",
    )
    return run, ended


def test_the_run_directory_is_as_designed(digits):
    run, _ = digits
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    events = [name for name in files if name.startswith("tensorboard/events.out.tfevents.")]
    assert [name.endswith(".hparams") for name in sorted(events)] == [True, False, True]  # begin, curves, end
    assert files.difference(events) == {
        ".hydra/config.yaml",
        ".hydra/hydra.yaml",
        ".hydra/overrides.yaml",
        "metrics.jsonl",
        "checkpoints/step-000003.pt",
        "checkpoints/step-000004.pt",
        "checkpoints/last.pt",
        "checkpoints/best.pt",
        "checkpoints/manifest.json",
        "logs/rank-0.log",
        "logs/rank-1.log",
        "project.zip",
        "summary.json",
    }


def test_the_metrics_have_a_line_per_step_and_one_of_the_validation(digits):
    lines = lines_of(digits[0])
    training = [line for line in lines if "train/loss" in line]
    (validation,) = [line for line in lines if "val/accuracy" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4]
    assert [line["samples"] for line in training] == [32, 64, 96, 128]
    assert {"time", "attempt", "step", "epoch", "samples", "train/accuracy", "lr", "samples_per_s"} <= training[
        0
    ].keys()
    assert (validation["step"], validation["attempt"]) == (4, 0)
    assert {line["epoch"] for line in lines} == {1}  # as on the terminal
    assert {"val/loss", "val/accuracy"} <= validation.keys()


def _tag(name: str) -> str:
    """What costs time is in a group of its own, behind training and validation."""
    costs = ("data_wait", "samples_per_s", "slowest_rank")
    return f"work/{name.removeprefix('data/')}" if name in costs or name.startswith("data/") else name


def test_tensorboard_shows_the_same_scalars(digits):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    run, _ = digits
    (events,) = [path for path in (run / "tensorboard").iterdir() if path.suffix != ".hparams"]
    points = {
        (value.tag, event.step): value.tensor.float_val[0]
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
    }
    fields = ("time", "attempt", "step", "epoch", "samples")
    zeros = ("data/retries", "data/bad_samples", "data/cache_hits")
    expected = {
        (_tag(name), line["step"]): value
        for line in lines_of(run)
        for name, value in line.items()
        if name not in fields and (value or name not in zeros)
    }
    assert points.keys() == expected.keys()
    assert points == pytest.approx(expected, rel=1e-6)


def test_checkpoints_are_plain_and_as_the_manifest_says(digits):
    folder = digits[0] / "checkpoints"
    entries = json.loads((folder / "manifest.json").read_text())["checkpoints"]
    assert set(entries) == {"step-000003.pt", "step-000004.pt", "last.pt", "best.pt"}
    for name, entry in entries.items():
        content = (folder / name).read_bytes()
        (part,) = entry["parts"]
        assert part["size"] == len(content)
        assert part["sha256"] == hashlib.sha256(content).hexdigest()
    last = torch.load(folder / "last.pt", weights_only=True)
    assert last["position"] == {"step": 4, "epoch": 0, "samples": 128, "offset": 128}
    assert last["config"]["data"]["batch_size"] == 16
    assert {"model", "optimizer", "scheduler"} <= last.keys()
    assert not [name for name in last["model"] if name.startswith("module.")]
    assert entries["last.pt"]["step"] == 4


def test_the_summary_says_how_it_went(digits):
    summary = summary_of(digits[0])
    assert summary["status"] == "done"
    assert (summary["steps"], summary["samples"], summary["world_size"], summary["restarts"]) == (4, 128, 2, 0)
    assert summary["failure"] is None
    assert summary["tags"] == ["short", "test"]
    assert summary["samples_per_s"] > 0
    assert {"train/loss", "val/accuracy"} <= summary["metrics"].keys()


def test_the_logs_name_each_rank_and_the_terminal_shows_plain_lines(digits):
    run, ended = digits
    for rank in range(2):
        assert f"rank {rank} of 2: host" in (run / "logs" / f"rank-{rank}.log").read_text()
    assert "batch     16 x 2 ranks = 32 effective" in ended.stdout
    assert "done: 4 steps" in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Warning" not in ended.stderr


# -- other ways to run it ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_cards_command_runs_as_typed(cli):
    run = cli.folder / "run"
    cli.done("model=resnet18", "data=s3_images", "cluster.n_workers=4", "trainer.max_steps=2", f"hydra.run.dir={run}")
    summary = summary_of(run)
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("done", 2, 4)
    batch = OmegaConf.load(run / ".hydra" / "config.yaml").data.batch_size
    assert summary["samples"] == 2 * 4 * batch


def test_one_batch_and_inline_run_in_the_process_itself(cli):
    run = cli.folder / "run"
    cli.done(*TINY, "debug=one_batch", f"hydra.run.dir={run}")
    summary = summary_of(run)
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("done", 1, 1)
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"step-000001.pt", "last.pt", "best.pt", "manifest.json"}
    assert "val/accuracy" in summary["metrics"]


@pytest.mark.parametrize(
    "variables",
    [
        {"DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "none, so that no worker can start"},
        pytest.param({"PYTHONPROFILEIMPORTTIME": "1"}, marks=pytest.mark.slow),
    ],
    ids=["no-workers", "no-distributed"],
)
def test_a_dry_run_builds_everything_and_starts_no_cluster(cli, variables):
    ended = cli.done(*TINY, "dry_run=true", "cluster.n_workers=4", "cluster.processes=true", **variables)
    assert "dry run: all of it works" in ended.stdout
    assert "data      96 samples, 37 for validation" in ended.stdout
    assert "3 in an epoch with 4 ranks of 8" in ended.stdout
    assert not imported(ended.stderr) & {"distributed"}
    assert "leaked" not in ended.stderr, "torch's libraries find nothing to complain of at the end"
    assert not list(cli.folder.glob("outputs/*/*")), "nothing is left of it"


def test_a_job_may_run_inside_its_run_directory(cli):
    """Paths that were typed are as from where they were typed."""
    words = (*TINY, "cluster=inline", "hydra.job.chdir=true", "hydra.run.dir=first")
    where = os.path.relpath(cli.project, cli.folder)
    ended = cli.done(*words, "trainer.max_steps=1", DDP_HYDRA_PROJECT=where)
    assert "->  first" in ended.stdout
    again = (*words[:-1], "trainer.max_steps=2", "resume=first", "hydra.run.dir=second")
    ended = cli.done(*again, DDP_HYDRA_PROJECT=where)
    summary = summary_of(cli.folder / "second")
    assert (summary["steps"], summary["from_step"]) == (2, 1)
    assert "done: 2 steps, the last 1 in" in ended.stdout


def test_two_runs_of_the_same_second_get_two_run_directories_and_leave_nothing(cli, wait_for):
    def import_folders() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("ddp_hydra-import-*"))

    def processes() -> list[psutil.Process]:
        with_folder = psutil.process_iter(["cwd"])
        return [process for process in with_folder if process.info["cwd"] == str(cli.folder)]

    before = import_folders()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(cli.run, *TINY, "cluster.n_workers=1", "trainer.max_steps=1") for _ in range(2)]
    assert [(run.result().stderr, run.result().returncode) for run in runs] == [("", 0), ("", 0)]
    folders = list((cli.folder / "outputs").glob("*/*"))
    assert len(folders) == 2
    assert [summary_of(folder)["status"] for folder in folders] == ["done", "done"]
    assert import_folders() <= before  # one of a command that was killed goes with the next
    wait_for(lambda: not processes(), "no process of theirs left")


def test_what_was_packed_is_what_runs_also_after_an_edit(client2, gang, tmp_path):
    """On the same workers, which have imported nothing of it."""
    module = tmp_path / "models" / "edited.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").touch()
    for version in (1, 2):
        module.write_text(f"def version():\n    return {version}\n")
        packed = pack(tmp_path)
        module.write_text("raise RuntimeError('edited since')")
        assert gang(client2, project=packed).run("models.edited:version") == [version, version]


# -- stopped -----------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        pytest.param(os.kill, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(os.killpg, signal.SIGINT, marks=pytest.mark.slow),
        (os.killpg, signal.SIGHUP),
    ],
    ids=["client", "terminal", "closed terminal"],
)
def test_an_interrupt_ends_the_job_with_130_and_leaves_nothing_running(cli, wait_for, alive, ranks_alive, whom, number):
    """A terminal's signals go to the workers, too; where it was closed, nothing can be printed any more."""
    run = cli.folder / "run"
    process = cli.start(*ENDLESS, f"hydra.run.dir={run}")
    try:
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(lines_of(run)) > 3, "the job trains")
        children = descendants(process.pid)
        assert len(ranks_alive()) == 2
        if number == signal.SIGHUP:
            process.stdout.close()
            process.stderr.close()
        whom(process.pid, number)
        err = process.communicate()[1] if number == signal.SIGINT else process.wait()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert summary_of(run)["status"] == "interrupted"
    # Python's own resource tracker notices the end of its parent a moment later.
    wait_for(lambda: not [child for child in children if alive(child.pid)], "all its processes are gone")
    assert all("step" in line for line in lines_of(run))
    if number == signal.SIGINT:
        assert "Traceback" not in err
        assert "Ctrl-C: a checkpoint is saved at the next step" in err
        assert "saved at step" in err
    assert (
        torch.load(run / "checkpoints" / "last.pt", weights_only=True)["position"]["step"] == lines_of(run)[-1]["step"]
    )


def test_a_killed_client_leaves_a_whole_run_behind_that_can_be_resumed(cli, client2, project, wait_for, ranks_alive):
    """Killed at any moment, and resumed in its run directory: the same numbers as never stopped, each of them once."""
    settings = (
        *TINY,
        "trainer.epochs=4",
        "trainer.checkpoint_every_steps=2",
        "trainer.threads=1",
        "model.dropout=0.3",
    )
    whole, killed = cli.folder / "whole", cli.folder / "killed"
    train(client2, project, whole, *settings)
    slow = "data.delay_s=0.05"  # time to stop it
    process = cli.start(*settings, slow, f"hydra.run.dir={killed}")
    try:
        wait_for((killed / "checkpoints" / "step-000004.pt").exists, "the job has trained 4 steps")
        process.send_signal(signal.SIGSTOP)  # however long the other takes
        composed = (killed / ".hydra" / "overrides.yaml").read_text()
        refused = cli.run(*TINY, "optimizer.lr=7", f"hydra.run.dir={killed}")
        assert f"is being written by process {process.pid}" in refused.stderr
        assert (killed / ".hydra" / "overrides.yaml").read_text() == composed
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not ranks_alive(), "the ranks of a killed client are gone")
    cli.done(f"resume={killed}", "data.delay_s=0", f"hydra.run.dir={killed}")

    def numbers(run):
        clocks = ("time", "samples_per_s", "tokens_per_s", "slowest_rank", "data_wait", "attempt")
        return [{name: value for name, value in line.items() if name not in clocks} for line in lines_of(run)]

    assert numbers(killed) == numbers(whole)
    attempts = [line["attempt"] for line in lines_of(killed)]
    assert attempts == sorted(attempts)
    assert set(attempts) == {0, 1}
    states = [torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"] for run in (whole, killed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# -- answers at once ---------------------------------------------------------------------------------------


def imported(importtime: str) -> set[str]:
    """Modules in the output of `python -X importtime`."""
    return {line.rpartition("|")[2].strip() for line in importtime.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "ddp-hydra experiment=pet_names"),
        (["--cfg", "job"], "n_workers: 2"),
        pytest.param(["--info", "defaults"], "base_config", marks=pytest.mark.slow),
        (["--info", "plugins"], "DaskDDPLauncher"),
        (["cluster.n_workers=0"], "cluster.n_workers=0"),
    ],
    ids=["help", "cfg", "defaults", "plugins", "mistake"],
)
def test_questions_and_mistakes_are_answered_without_torch(cli, arguments, said):
    ended = cli.run(*arguments, PYTHONPROFILEIMPORTTIME="1")
    assert said in ended.stdout + ended.stderr
    assert not imported(ended.stderr) & {"torch", "distributed", "tensorboard"}
    assert "hydra" in imported(ended.stderr)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ddp-hydra model=res", ["model=resnet18", "model=resnet50"]),
        pytest.param("ddp-hydra trainer=", ["trainer=default"], marks=pytest.mark.slow),
    ],
)
def test_the_console_script_completes_groups_and_options(cli, line, offered):
    """What the shell asks after `ddp-hydra -sc install=bash`."""
    script = "import sys; sys.argv[0] = 'ddp-hydra'; from ddp_hydra.cli.main import entry; entry()"
    done = subprocess.run(
        [sys.executable, "-c", script, "-sc", "query=bash"],
        env=cli.environment(COMP_LINE=line, COMP_POINT=str(len(line))),
        cwd=cli.folder,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == offered, done.stderr
