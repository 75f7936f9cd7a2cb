"""Runs that outlive their commands, workers, drivers and schedulers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import psutil
import pytest

from ddp_hydra.storage.manifest import decode_manifest
from tests.integration.conftest import alive, wait_for
from tests.integration.support.chaos import Dask
from tests.integration.test_shared_results import (
    SHORT,
    SLOW,
    Results,
    attach,
    drivers,
    ended,
)
from tests.integration.test_shared_results import access as access
from tests.integration.test_shared_results import dask as dask
from tests.integration.test_shared_results import nothing_left as nothing_left
from tests.integration.test_shared_results import remote as remote
from tests.integration.test_shared_results import root as root
from tests.integration.test_shared_results import server as server
from tests.support.warm_server import PATIENCE_S

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def detached(cli, remote, root, access, name: str, *words: str) -> tuple[Results, psutil.Process]:
    """Start a run that its command leaves alone; return its results after some steps, and its driver."""
    cli.done(*SLOW, *remote, f"results.root={root}", f"hydra.run.dir={name}", "detach=true", *words)
    results = Results(f"{root}/{name}", access)
    wait_for(lambda: results.step() >= 6, "some steps")
    (driver,) = drivers()
    return results, driver


def test_attach_leaves_the_run_alone_and_the_run_outlives_a_killed_command(cli, remote, root, access):
    job = (*SHORT, "data.delay_s=0.4", f"results.root={root}", "hydra.run.dir=outputs/day/alone")
    url = f"{root}/day/alone"
    command = cli.start(*job, *remote, "detach=true")
    results = Results(url, access)
    wait_for(lambda: (results.status() and command.poll() is not None) or drivers(), "the run has begun")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)
    ended(command)
    wait_for(lambda: results.step() >= 2, "some steps")

    watching = cli.start("attach", f"run={url}", **access)
    watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    left = ended(watching)
    assert left.returncode == 130
    assert "the run goes on" in left.stderr

    shown = attach(cli, access, f"run={url}")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1].startswith("done: 12 steps")
    assert results.json("summary.json")["status"] == "done"


def test_a_second_command_that_is_refused_leaves_the_folder_that_points_to_the_run(cli, remote, root, access):
    def files() -> dict[str, bytes]:
        folder = cli.folder / "first"
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    detached(cli, remote, root, access, "first", "trainer.checkpoint_every_steps=3")
    before = files()
    second = ("hydra.run.dir=first", f"results.root={root}", "detach=true", "seed=7", *remote)
    for words in (SLOW, (f"resume={root}/first",)):
        refused = cli.run(*words, *second, **access)
        assert "another run is active in" in refused.stderr
        assert files() == before
    here = cli.run(*SLOW, "hydra.run.dir=first", "cluster=inline")
    assert "first holds another run" in here.stderr
    assert files() == before
    assert attach(cli, access, "run=first", "stop=true").returncode == 130

    results = Results(f"{root}/first", access)
    kept = [results.get(name) for name in ("summary.json", ".hydra/overrides.yaml")]
    again = ("resume=first", "hydra.run.dir=first", "data.delay_s=0", *remote)
    refused = cli.run(*again, "model.num_classes=7", **access)
    assert "not of this model" in refused.stderr
    assert [results.get(name) for name in ("summary.json", ".hydra/overrides.yaml")] == kept
    assert files() == before
    steps = json.loads(kept[0])["steps"] + 3
    cli.done(*again, f"trainer.max_steps={steps}", **access)
    for summary in (results.json("summary.json"), json.loads(files()["summary.json"])):
        assert (summary["status"], summary["steps"]) == ("done", steps)
    assert f"trainer.max_steps={steps}".encode() in results.get(".hydra/overrides.yaml")
    assert files()[".hydra/overrides.yaml"] == results.get(".hydra/overrides.yaml")


def test_ctrl_c_saves_and_a_killed_command_ends_its_run(cli, remote, root, access, ranks_alive):
    for number, name in ((signal.SIGINT, "asked"), (signal.SIGKILL, "killed")):
        url = f"{root}/{name}"
        command = cli.start(*SLOW, *remote, f"results.root={root}", f"hydra.run.dir={name}")
        results = Results(url, access)
        wait_for(lambda results=results: results.step() >= 6, "some steps")
        command.send_signal(number)
        said = ended(command)
        wait_for(lambda: not ranks_alive() and not drivers(), "the end of the run")
        assert results.json("summary.json")["status"] == "interrupted"
        newest = max(
            entry.step for entry in decode_manifest(results.get("checkpoints/manifest.json")).checkpoints.values()
        )
        assert newest == results.json("summary.json")["steps"]
        if number == signal.SIGINT:
            assert said.returncode == 130
            assert f"go on with resume={url}" in said.stderr
    cli.done(*SHORT, *remote[:-1])  # the workers are free


def test_a_second_ctrl_c_ends_at_once(cli, remote, root, access):
    job = (*SLOW[:-2], "data.delay_s=1", f"results.root={root}", "hydra.run.dir=twice")
    command = cli.start(*job, *remote)
    results = Results(f"{root}/twice", access)
    wait_for(lambda: results.status().get("state") == "running", "the first step")
    command.send_signal(signal.SIGINT)
    said = ""
    while "A second" not in said:  # the kernel makes one signal of two that are not yet handled
        said += (line := command.stderr.readline())
        assert line, said
    began = time.monotonic()
    command.send_signal(signal.SIGINT)
    assert ended(command).returncode == 130
    assert time.monotonic() - began < PATIENCE_S
    assert results.json("summary.json")["status"] == "interrupted"


# -- what goes wrong ---------------------------------------------------------------------------------------


def test_a_failing_run_says_why_in_the_store(cli, remote, root, access):
    fault = "+fault=raise,rank=1,step=3"
    job = (*SHORT, f"results.root={root}", fault, "dispatch.max_restarts=0", "hydra.run.dir=failing")
    said = cli.run(*job, *remote)
    assert said.returncode == 1
    results = Results(f"{root}/failing", access)
    summary = results.json("summary.json")
    assert summary["status"] == "failed"
    assert summary["failure"]["rank"] == 1
    shown = attach(cli, access, f"run={root}/failing")
    assert shown.returncode == 1
    assert summary["failure"]["message"].splitlines()[0] in shown.stderr
    assert "rank 1" in said.stderr
    assert "Traceback" not in said.stderr.partition("rank 1")[0]


def test_a_killed_worker_and_a_killed_driver_do_not_end_a_run(cli, dask, remote, root, access):
    """A driver outlives the worker that started it; another one is started by a task, which has outlived its worker."""

    def guards(dask_scheduler):
        return [task.processing_on.address for key, task in dask_scheduler.tasks.items() if "-guard-" in str(key)]

    results, driver = detached(cli, remote, root, access, "hurt", "dispatch.lost_timeout_s=5")
    with dask.client() as client:  # the guard runs beside ranks that take all slots
        killed = client.run(os.getpid, workers=client.run_on_scheduler(guards)).values()
    for pid in {driver.ppid(), *killed}:
        psutil.Process(pid).kill()
    wait_for(lambda: results.status().get("attempt") == 1 and results.step() > 6, "a second attempt")
    assert drivers() == [driver]

    driver.kill()
    killed_at = results.step()
    watching = cli.start("attach", f"run={root}/hurt", **access)
    wait_for(lambda: results.status()["pid"] != driver.pid and results.step() > killed_at, "another driver")
    stopped = attach(cli, access, f"run={root}/hurt", "stop=true")
    assert stopped.returncode == 130
    assert "saved at step" in stopped.stderr
    assert ended(watching).returncode == 130
    steps = [line["step"] for line in results.metrics() if "train/loss" in line]
    assert steps[0] == 1
    assert set(steps) == set(range(1, max(steps) + 1))
    summary = results.json("summary.json")
    assert summary["status"] == "interrupted"
    attempts = summary["attempts"]  # of both drivers, and the one that was under way when the first was killed
    assert [attempt["attempt"] for attempt in attempts] == [0, 1]
    assert f"its driver, process {driver.pid} on" in attempts[1]["failure"]["message"]

    def kept(dask_scheduler):
        topics = [name for name in dask_scheduler._broker._topics if name.startswith(("driver-", "job-"))]
        return [*topics, *dask_scheduler._ddp_hydra_reservations, *dask_scheduler.tasks]

    with dask.client() as client:
        dask.heal(client)
        wait_for(lambda: not client.run_on_scheduler(kept), "nothing left on the scheduler")


def test_a_driver_that_is_lost_for_good_is_missed(cli, dask, remote, root, access):
    _, driver = detached(cli, remote, root, access, "lost", "dispatch.max_restarts=0")
    driver.kill()
    began = time.monotonic()
    missed = attach(cli, access, f"run={root}/lost", "lost_timeout_s=5")
    assert missed.returncode == 1
    assert f"process {driver.pid} on " in missed.stderr
    assert f"resume={root}/lost" in missed.stderr
    assert time.monotonic() - began < PATIENCE_S
    assert list(dask.folder.rglob("ddp_hydra-run-*"))
    cli.done(*SHORT, *remote, f"results.root={root}", "hydra.run.dir=after")  # its driver clears up


def test_a_run_goes_on_once_its_scheduler_is_back_and_ends_without_one(cli, tmp_path, warm_server):
    folder = tmp_path / "dask"
    folder.mkdir()
    dask = Dask(folder, programs=1)
    try:
        address = json.loads(wait_for(lambda: dask.file.exists() and dask.file.read_text(), "a scheduler"))["address"]
        where = (
            "cluster=remote",
            f"cluster.address={address}",
            "results.handler=cluster",
            f"results.root={tmp_path}/runs",
        )
        cli.done(*SLOW, *where, "dispatch.ranks=1", "detach=true", "dispatch.restart_wait_s=120", "hydra.run.dir=a")
        run = Results(f"{tmp_path}/runs/a", {})
        wait_for(lambda: run.step() >= 6, "some steps")
        first = run.status()
        dask.scheduler.kill()
        wait_for(lambda: run.status()["state"] == "lost", "the driver notices it")

        wait_for(lambda: not dask.programs[0].is_running(), "the end of the workers")
        dask.scheduler = dask.start("scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2])
        dask.programs = [dask.add()]
        wait_for(lambda: run.status()["pid"] != first["pid"] and run.step() > first["step"], "it goes on")
        wait_for(lambda: [driver.pid for driver in drivers()] == [run.status()["pid"]], "one driver")
        (lost,) = run.status()["attempts"]
        assert lost["failure"]["message"].endswith("lost the scheduler")

        dask.scheduler.kill()
        wait_for(lambda: run.status()["state"] == "lost", "the driver notices it")
        shown = attach(cli, {}, f"run={run.url}", "stop=true")
        assert shown.returncode == 1
        assert "the scheduler tcp://" in shown.stderr
        assert run.json("summary.json")["status"] == "failed"
        wait_for(lambda: not drivers(), "no driver left running")
    finally:
        dask.close()


def test_a_driver_that_is_suspended_is_replaced_and_writes_no_more(cli, remote, root, access):
    results, asleep = detached(cli, remote, root, access, "asleep", "dispatch.lost_timeout_s=5")
    asleep.suspend()
    try:
        step = results.step()
        wait_for(lambda: results.status()["pid"] != asleep.pid and results.step() > step, "another driver")
    finally:
        asleep.resume()
    wait_for(lambda: not alive(asleep.pid), "the end of the one before")
    assert results.status()["pid"] != asleep.pid
    assert attach(cli, access, f"run={root}/asleep", "stop=true").returncode == 130
