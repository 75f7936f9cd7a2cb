"""SaturnCluster of the real dask-saturn, against its REST interface with a real scheduler and workers behind it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.support.by_hand import killed_at_work
from tests.integration.support.saturn import TOKEN, Saturn, serve
from tests.integration.support.training import summary_of

pytestmark = pytest.mark.integration

TINY = ("cluster=saturn", "data=tiny", "model=tiny", "optimizer.lr=0.1")


@pytest.fixture(scope="module")
def served(warm_server, tmp_path_factory) -> Iterator[tuple[Saturn, dict[str, str]]]:
    saturn = Saturn(tmp_path_factory.mktemp("saturn"))
    with serve(saturn) as url:
        yield saturn, {"SATURN_BASE_URL": url, "SATURN_TOKEN": TOKEN}


@pytest.fixture
def saturn(served) -> Iterator[Saturn]:
    served[0].asked.clear()
    yield served[0]
    served[0].close()


@pytest.fixture(scope="module")
def login(served) -> dict[str, str]:
    return served[1]


@pytest.mark.slow
def test_the_main_job_with_sizes(cli, saturn, login):
    sizes = ("cluster.worker_size=g4dnxlarge", "cluster.scheduler_size=medium", "cluster.worker_is_spot=true")
    ended = cli.done(*TINY, *sizes, "hydra.run.dir=run", **login)
    assert summary_of(cli.folder / "run")["status"] == "done"
    (created,) = [given for what, given in saturn.asked if what == "POST"]
    assert created == {
        "n_workers": 2, "worker_size": "g4dnxlarge", "scheduler_size": "medium", "worker_is_spot": True, "nprocs": 1,
        "nthreads": 1,
    }  # fmt: skip
    assert "POST close" in [what for what, _ in saturn.asked]
    assert not saturn.is_running
    for folder, _, names in os.walk(cli.folder):
        for name in names:
            assert TOKEN.encode() not in Path(folder, name).read_bytes()
    assert TOKEN not in ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_cluster_that_is_kept_serves_the_next_job_with_more_workers(cli, saturn, login):
    ended = cli.done(*TINY, "cluster.keep=true", "cluster.n_workers=1", "hydra.run.dir=one", **login)
    assert "left running: the next job uses it with cluster=saturn" in ended.stderr
    assert saturn.is_running
    cli.done(*TINY, "hydra.run.dir=two", **login)
    assert ("POST scale", {"n": 2}) in saturn.asked
    assert summary_of(cli.folder / "two")["world_size"] == 2
    assert not saturn.is_running


@pytest.mark.slow
def test_a_sweep_has_one_cluster_and_may_leave_it_running(cli, saturn, login):
    sweep = ("dispatch.ranks=1", "seed=1,2", "hydra.sweep.dir=sweep", "cluster.keep=true")
    ended = cli.done("-m", *TINY, *sweep, **login)
    assert [summary_of(cli.folder / "sweep" / number)["status"] for number in "01"] == ["done"] * 2
    assert [what for what, _ in saturn.asked].count("POST") == 1
    assert "left running: the next job uses it with cluster=saturn" in ended.stderr + ended.stdout
    assert saturn.is_running


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_no_processes(cli, saturn, login, wait_for):
    with killed_at_work(cli, *TINY, "cluster.client_timeout_s=1", "cluster.n_workers=1", **login):
        pass

    def still_there() -> list[str]:
        mine = [" ".join(child.cmdline()) for child in psutil.Process().children() if child.status() != "zombie"]
        return [line for line in mine if str(saturn.folder) in line]

    wait_for(lambda: not still_there(), "the end of scheduler and worker")


@pytest.mark.slow
def test_fewer_workers_than_were_asked_for(cli, saturn, login):
    ended = cli.run(*TINY, "cluster.n_workers=5", "cluster.wait_timeout_s=1", **login)
    assert re.search(r"\d of 5 workers came in \d+ s: Saturn Cloud says .* is running", ended.stderr)
    assert not saturn.is_running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "variables", "said"),
    [
        ((), {"SATURN_TOKEN": ""}, "set SATURN_TOKEN, as"),
        pytest.param((), {"SATURN_TOKEN": "wrong"}, "Invalid token", marks=pytest.mark.slow),
        (("cluster.worker_size=huge",), {}, "worker_size: huge is not a valid option. Options are: ['medium'"),
        pytest.param((), {"SATURN_BASE_URL": "http://127.0.0.1:1/"}, "could not be started", marks=pytest.mark.slow),
    ],
)
def test_what_can_be_wrong(cli, saturn, login, changed, variables, said):
    ended = cli.run(*TINY, *changed, **login | variables)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
