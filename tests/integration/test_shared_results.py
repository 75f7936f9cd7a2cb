"""Results on shared storage: written from the cluster's side, by runs that may outlive the command."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_hydra.storage import urls
from ddp_hydra.storage.manifest import decode_manifest
from tests.integration.conftest import ROOT, CommandLine, alive, wait_for
from tests.integration.support.chaos import Dask
from tests.integration.support.training import CLOCKS
from tests.support.s3_server import KEYS, S3Server, s3_server

pytestmark = pytest.mark.integration

TINY = ("data=tiny", "model=tiny", "optimizer.lr=0.1", "trainer.log_every_steps=1", "dispatch.ranks=2")
SHORT = (*TINY, "trainer.epochs=2")
SLOW = (*TINY, "trainer.epochs=100000", "data.delay_s=0.002", "trainer.checkpoint_every_steps=5")
SECURITY = "+cluster.security._target_=distributed.Security.temporary"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        server.fill({})
        yield server


@pytest.fixture(scope="module")
def access(server) -> dict[str, str]:
    """What leads to the store; the command that begins a run does not have it."""
    return {**KEYS, "AWS_ENDPOINT_URL": server.endpoint_url}


@pytest.fixture(scope="module")
def root() -> str:
    return "s3://bucket-0/runs"


@pytest.fixture(scope="module")
def dask(tmp_path_factory, access, warm_server) -> Iterator[Dask]:
    """A scheduler and two workers, started by hand where the store can be reached."""
    folder = tmp_path_factory.mktemp("dask")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in access.items():
            patch.setenv(name, value)
        dask = Dask(folder, programs=2)
    try:
        with dask.client():
            pass
        yield dask
    finally:
        dask.close()


@pytest.fixture(scope="module")
def remote(dask) -> tuple[str, ...]:
    address = json.loads(dask.file.read_text())["address"]
    return "cluster=remote", f"cluster.address={address}", "cluster.n_workers=2", "results.handler=cluster"


OWN_FOLDERS: list[Path] = []
"""Below which the workers are that start the drivers of these tests."""


@pytest.fixture(autouse=True)
def nothing_left(dask, tmp_path_factory) -> Iterator[None]:
    """No driver is left behind, no folder of one, and nothing on the scheduler."""
    OWN_FOLDERS[:] = [tmp_path_factory.getbasetemp()]
    yield
    wait_for(lambda: not drivers(), "no driver left running")
    wait_for(lambda: not folders(dask), "no folder of a driver left")


def folders(dask) -> list[Path]:
    while True:
        with contextlib.suppress(FileNotFoundError):  # a task that ends removes its folder meanwhile
            return list(dask.folder.rglob("ddp_hydra-run-*"))


def drivers() -> list[psutil.Process]:
    """The drivers of these tests, and not those of others on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())  # a title, in one word or several
        if command.startswith("ddp_hydra driver") and alive(process.pid):
            with contextlib.suppress(psutil.Error):
                # Its folder is the worker's. A process that has a title shows no variables.
                if any(Path(process.cwd()).is_relative_to(folder) for folder in OWN_FOLDERS):
                    found.append(process)
    return found


class Results:
    """What lies in the store of one run."""

    def __init__(self, url: str, access: dict[str, str]) -> None:
        self.url = url
        with environment(access):
            self.store = urls.open_folder(url)
            self.store.size_or_none("x")

    def get(self, name: str) -> bytes:
        return self.store.get(name)

    def json(self, name: str) -> dict:
        return json.loads(self.get(name))

    def status(self) -> dict:
        with contextlib.suppress(FileNotFoundError):
            return self.json("status.json")
        return {}

    def step(self) -> int:
        return self.status().get("step") or 0

    def metrics(self) -> list[dict]:
        lines = map(json.loads, self.get("metrics.jsonl").splitlines())
        return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def names(server: S3Server, url: str) -> set[str]:
    prefix = url.removeprefix("s3://bucket-0/") + "/"
    return {key.removeprefix(prefix) for key in server.sizes("bucket-0") if key.startswith(prefix)}


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def attach(cli: CommandLine, access: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return cli.run("attach", *words, **access)


# -- a run whose command stays -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(module_cli, remote, root) -> tuple[Path, str, subprocess.CompletedProcess[str]]:
    """One job, once with its results here, once in the bucket: the run directory, the URL, and what was said."""
    secret = "+mix.password=top-secret"
    module_cli.done(*SHORT, *remote[:-1], "hydra.run.dir=outputs/day/here")
    said = module_cli.done(*SHORT, *remote, f"results.root={root}", secret, "hydra.run.dir=outputs/day/there")
    return module_cli.folder / "outputs/day/here", f"{root}/day/there", said


@pytest.mark.slow
def test_the_bucket_has_what_a_run_directory_has(both, server, access):
    here, url, _ = both
    found, files = names(server, url), {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()}
    kind = "tensorboard/events"
    assert sum(name.startswith(kind) for name in found) == sum(name.startswith(kind) for name in files) == 3
    more = {name for name in found - files if not name.startswith((kind, "checkpoints/step-"))}
    assert more == {"status.json", "logs/driver.log", "owner"}
    less = {name for name in files - found if not name.startswith((kind, "checkpoints/step-"))}
    assert less == {"checkpoints/last.pt", "checkpoints/best.pt"}  # names in the manifest


def test_metrics_events_and_checkpoints_are_those_of_a_run_here(both, server, access, tmp_path):
    here, url, _ = both
    results = Results(url, access)
    lines = map(json.loads, (here / "metrics.jsonl").read_text().splitlines())
    expected = [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]
    assert results.metrics() == expected

    for name in names(server, url):
        if name.startswith("tensorboard/"):
            (tmp_path / name.rpartition("/")[2]).write_bytes(results.get(name))
    curves = [EventAccumulator(str(folder)).Reload() for folder in (tmp_path, here / "tensorboard")]
    loss = [[(event.step, event.value) for event in curve.Scalars("train/loss")] for curve in curves]
    assert len(loss[0]) == 12
    assert loss[0] == loss[1]

    there = decode_manifest(results.get("checkpoints/manifest.json")).checkpoints
    local = decode_manifest((here / "checkpoints/manifest.json").read_bytes()).checkpoints
    assert [entry.step for entry in there.values()] == [entry.step for entry in local.values()]
    assert {"last.pt", "best.pt"} < set(there)
    for name, entry in there.items():
        if name.startswith("step-"):
            assert results.store.size(f"checkpoints/{name}") == entry.size


def test_the_summary_is_complete_and_the_status_says_the_end(both, access):
    here, url, said = both
    results = Results(url, access)
    summary, local = results.json("summary.json"), json.loads((here / "summary.json").read_text())
    assert summary.keys() == local.keys()
    for name in ("status", "steps", "samples", "project", "world_size", "restarts"):
        assert summary[name] == local[name]
    status = results.status()
    assert (status["state"], status["step"], status["total_steps"]) == ("done", 12, 12)
    assert status["project"] == summary["project"]
    closing = said.stdout[said.stdout.index("done: 12 steps") :].splitlines()
    assert closing[0].endswith(f"->  {url}")
    assert status["message"].splitlines() == closing


def test_the_command_shows_progress_and_keeps_a_pointer(both, module_cli):
    _, url, said = both
    assert "epoch 2/2" in said.stdout
    assert f"results: {url}" in said.stdout
    folder = module_cli.folder / "outputs/day/there"
    assert {path.name for path in folder.iterdir()} == {".hydra", "results.url", "summary.json"}
    assert json.loads((folder / "summary.json").read_text())["results"] == url


def test_no_secret_is_in_the_bucket(both, server, access):
    _, url, _ = both
    results = Results(url, access)
    config = OmegaConf.create(results.get(".hydra/config.yaml").decode())
    assert config.mix.password == "***"
    assert config.data.n == 96
    secrets = ("top-secret", *KEYS.values())[:3]
    for name in names(server, url):
        if not name.startswith("checkpoints/step-"):
            assert not [secret for secret in secrets if secret.encode() in results.get(name)], name


def test_attach_shows_a_run_that_has_ended(both, module_cli, access):
    shown = attach(module_cli, access, "run=outputs/day/there")  # which points to the bucket
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-2:] == both[2].stdout.splitlines()[-2:]
    assert "epoch 2/2" in shown.stdout


def test_a_trained_model_is_evaluated_from_the_bucket(both, module_cli, access):
    here, url, _ = both
    first, *rest = module_cli.done("evaluate", f"run={url}", "which=last", **access).stdout.splitlines()
    assert first.startswith(url), "not the download"
    metrics = json.loads((here / "summary.json").read_text())["metrics"]
    numbers = {name: float(value) for name, value in map(str.split, rest)}
    assert numbers == pytest.approx({name: metrics[name] for name in numbers}, rel=1e-5)


# -- a run that goes on by itself --------------------------------------------------------------------------


def test_a_detached_run_is_shown_stopped_and_gone_on_with(cli, remote, root, access, both):
    """Its numbers are those of a run that was not interrupted."""
    job = (*SHORT, "data.delay_s=0.4", f"results.root={root}", "trainer.checkpoint_every_steps=3")
    said = cli.done(*job, *remote, "detach=true", "hydra.run.dir=outputs/day/first")
    url = f"{root}/day/first"
    assert f"ddp-hydra attach run={url}\n" in said.stdout
    results = Results(url, access)
    wait_for(lambda: results.step() >= 2, "some steps")

    stopped = attach(cli, access, f"run={url}", "stop=true")
    assert stopped.returncode == 130
    assert f"go on with resume={url}" in stopped.stderr
    steps = results.json("summary.json")["steps"]
    assert results.json("summary.json")["status"] == "interrupted"
    assert 2 <= steps < 12
    assert (
        max(entry.step for entry in decode_manifest(results.get("checkpoints/manifest.json")).checkpoints.values())
        == steps
    )

    cli.done(
        f"resume={url}", *remote[:-1], "detach=false", "data.delay_s=0", "hydra.run.dir=outputs/day/second", **access
    )
    second = Results(f"{root}/day/second", access)
    whole = Results(both[1], access).metrics()
    assert [*results.metrics(), *second.metrics()] == whole


# -- what goes wrong, and where else results go -------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("results.root=s3://nowhere/runs",), "there is no bucket 'nowhere'"),
        pytest.param(("results.root=/proc/runs",), "may its user write it?", marks=pytest.mark.slow),
        pytest.param(
            ("results.root=runs",),
            "or the whole path of a folder that all hosts share",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_work_is_a_sentence_before_anything_is_trained(cli, remote, words, said):
    refused = cli.run(*SHORT, *remote, *words)
    assert refused.returncode == 1
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_folder_of_a_shared_disk(cli, remote, tmp_path):
    shared = tmp_path / "shared"
    cli.done(*SHORT, *remote, f"results.root=file://{shared}", "hydra.run.dir=outputs/a/b")
    run = shared / "a" / "b"
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    shown = attach(cli, {}, f"run=file://{run}")
    assert shown.returncode == 0
    assert not list(run.rglob(".part-*"))
    done = cli.done(*remote[:-1], f"resume={run}", "trainer.epochs=3", "hydra.run.dir=outputs/a/c")
    assert str(shared / "a" / "c") in done.stdout
    assert json.loads((shared / "a" / "c" / "summary.json").read_text())["steps"] == 18


@pytest.mark.slow
def test_a_cluster_of_the_command_itself(cli, tmp_path):
    """Its workers start drivers, too, also by TLS; but it ends with the command."""
    security = ("+cluster.protocol=tls", SECURITY)
    elsewhere = (*SHORT, "results.handler=cluster", f"results.root={tmp_path}/shared", *security)
    done = cli.done(*elsewhere, "hydra.run.dir=outputs/a/b")
    assert "Scheduler at" not in done.stderr
    assert json.loads((tmp_path / "shared/a/b/summary.json").read_text())["steps"] == 12
    refused = cli.run(*elsewhere, "detach=true")
    assert refused.returncode == 1
    assert "detach=true needs a cluster that stays" in refused.stderr


@pytest.mark.slow
def test_what_a_worker_lacks_is_said(cli, server, tmp_path):
    """Its environment decides, and here it is that of the command."""
    job = (
        *SHORT,
        "cluster.n_workers=1",
        "dispatch.ranks=1",
        "results.handler=cluster",
        "results.root=s3://bucket-0/runs",
    )
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "obstore.py").write_text("raise ImportError('none here')\n")
    for variables, said in (
        (
            {"AWS_ENDPOINT_URL": server.endpoint_url, "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"},
            "no credentials were found for bucket 'bucket-0'",
        ),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the store at http://127.0.0.1:9 is not reachable"),
        (
            {**KEYS, "PYTHONPATH": f"{tmp_path}/path:{ROOT}"},
            "buckets need the package obstore: pip install 'ddp-hydra[s3]'",
        ),
    ):
        refused = cli.run(*job, **variables)
        assert refused.returncode == 1
        pattern = rf"on worker tcp://127\.0\.0\.1:\d+: (s3:\S+: )?{re.escape(said)}"
        assert re.search(pattern, refused.stderr), refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_each_job_of_a_sweep_has_its_own_folder(cli, remote, tmp_path):
    sweep = (*TINY, "trainer.epochs=1", *remote, f"results.root={tmp_path}/shared", "hydra.sweep.dir=multirun/a/b")
    cli.done("-m", *sweep, "seed=1,2")
    for number in "01":
        assert json.loads((tmp_path / "shared/a/b" / number / "summary.json").read_text())["status"] == "done"
    refused = cli.run("-m", *sweep[:-1], "detach=true", "seed=1,2")
    assert refused.returncode == 1
    assert "detach=true: a sweep has to know how its jobs end" in refused.stderr
