"""Jobs that log to MLflow, W&B, Aim and ClearML, by their own clients; those that are not installed are skipped.

MLflow runs against its own server, too. The server has an environment of its own, which is built once, in the user's
cache, because it does not resolve beside ddp_hydra's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_loggers import HERE
from tests.support.ports import free_port

pytestmark = pytest.mark.integration

RUN = (*HERE, "results.loggers_timeout_s=200")
OFFLINE = {
    "WANDB_MODE": "offline", "CLEARML_OFFLINE_MODE": "1", "MLFLOW_TRACKING_URI": "sqlite:///runs.db",
}  # fmt: skip


def needs(package: str) -> None:
    try:
        version("mlflow-skinny" if package == "mlflow" else package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install 'ddp-hydra[{package}]'")


def ran(cli, package: str, name: str, *more: str) -> dict[str, str]:
    """Run a job with a logger; return its run at the service."""
    needs(package)
    cli.done(
        *RUN,
        f"results.loggers=[{package}]",
        "tags=[mine]",
        f"hydra.run.dir=outputs/{name}",
        *more,
        timeout_s=300,
        **OFFLINE,
    )
    return json.loads((cli.folder / "outputs" / name / "loggers.json").read_text())[package]


def rows(database: Path, query: str) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


@pytest.mark.slow
def test_jobs_of_a_sweep_that_begin_at_once_make_one_local_store(cli):
    needs("mlflow")
    on_workers = [word for word in RUN if word != "cluster=inline"]
    swept = ("-m", "seed=1,2,3,4", "hydra.sweep.dir=sweep", "cluster.n_workers=4", "dispatch.ranks=1")
    cli.done(*on_workers, *swept, "results.loggers=[mlflow]", timeout_s=300, **OFFLINE)
    assert rows(cli.folder / "runs.db", "SELECT status FROM runs") == [("FINISHED",)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2], ids=["run", "resume"])
def test_mlflow_with_its_local_store(cli, epochs):
    first = ran(cli, "mlflow", "a")
    if epochs == 2:
        second = ran(cli, "mlflow", "b", "resume=outputs/a", "trainer.epochs=2", "optimizer.lr=0.05")
        assert first["id"] == second["id"]
    database = cli.folder / "runs.db"
    assert rows(database, "SELECT run_uuid, name, status FROM runs") == [(first["id"], "a", "FINISHED")]
    steps = [step for (step,) in rows(database, "SELECT step FROM metrics WHERE key='train/loss' ORDER BY step")]
    assert steps == list(range(1, 12 * epochs + 1))
    assert rows(database, "SELECT value FROM params WHERE key='optimizer.lr'") == [("0.1",)]
    tags = dict(rows(database, "SELECT key, value FROM tags"))
    changed = {name: value for name, value in tags.items() if name.startswith("changed.")}
    assert tags["tags"] == "mine"
    assert changed == ({"changed.optimizer.lr": "0.05", "changed.trainer.epochs": "2"} if epochs == 2 else {})


READ_WANDB = """
import json, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

content, place, part, found = Path(sys.argv[1]).read_bytes(), 7, b"", {"steps": []}
while place + 7 <= len(content):  # LevelDB's log format, behind a header of 7 bytes
    if (left := 32768 - place % 32768) < 7:
        place += left
        continue
    size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
    part += content[place + 7 : place + 7 + size]
    place += 7 + size
    if kind not in (1, 4):  # neither whole nor the last part
        continue
    record, part = Record.FromString(part), b""
    items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
    if "train/loss" in items:
        found["steps"].append(int(items["trainer/global_step"]))
    if record.HasField("run"):
        found |= {"id": record.run.run_id, "name": record.run.display_name, "tags": list(record.run.tags)}
    if record.HasField("exit"):
        found["exit_code"] = record.exit.exit_code
print(json.dumps(found))
"""


@pytest.mark.slow
def test_wandb_offline(cli):
    first = ran(cli, "wandb", "a", "results.wandb.checkpoints=best")
    second = ran(cli, "wandb", "b", "resume=outputs/a", "trainer.epochs=2")
    assert first["id"] == second["id"]
    for name, steps in (("a", range(1, 13)), ("b", range(13, 25))):
        (file,) = (cli.folder / "outputs" / name / "wandb").glob(f"offline-run-*/run-{first['id']}.wandb")
        command = [sys.executable, "-c", READ_WANDB, file]
        read = subprocess.run(command, cwd=cli.folder, capture_output=True, text=True, check=True)
        expected = {"id": first["id"], "name": name, "tags": ["mine"], "exit_code": 0}
        assert json.loads(read.stdout.splitlines()[-1]) == {"steps": list(steps), **expected}


READ_AIM = """
import json, sys
import aim
run = aim.Repo(".").get_run(sys.argv[1])
losses = next(one for one in run.metrics() if one.name == "loss" and one.context.to_dict() == {"subset": "train"})
found = {"name": run.name, "tags": sorted(run.tags), "status": run["status"], "lr": run["hparams"]["optimizer.lr"]}
print(json.dumps({**found, "steps": sorted(map(int, losses.dataframe()["step"]))}))
"""


@pytest.mark.slow
def test_aim_in_its_folder(cli):
    first = ran(cli, "aim", "a", "results.aim.tags=[more]")
    second = ran(cli, "aim", "b", "resume=outputs/a", "trainer.epochs=2")
    assert first["id"] == second["id"]
    program = Path(sys.executable).with_name("aim")  # its page indexes what is new; here nobody opens it
    subprocess.run([program, "storage", "reindex"], cwd=cli.folder, input="y", text=True, check=True)
    command = [sys.executable, "-c", READ_AIM, first["id"]]
    read = subprocess.run(command, cwd=cli.folder, capture_output=True, text=True, check=True)
    found = json.loads(read.stdout.splitlines()[-1])
    assert found.pop("lr") > 0
    assert found == {"steps": [*range(1, 25)], "name": "b", "tags": ["mine", "more"], "status": "finished"}


@pytest.mark.slow
def test_clearml_offline(cli):
    run = ran(cli, "clearml", "a")
    (archive,) = (cli.folder / "home" / ".clearml" / "cache" / "offline").glob(f"{run['id']}.zip")
    with zipfile.ZipFile(archive) as file:
        events = [json.loads(line) for line in file.read("metrics.jsonl").splitlines()]
        task = json.loads(file.read("task.json"))
    points = [point for group in events for point in (group if isinstance(group, list) else [group])]
    losses = [point["iter"] for point in points if (point.get("metric"), point.get("variant")) == ("train", "loss")]
    assert sorted(losses) == list(range(1, 13))
    assert (task["name"], task["tags"]) == ("a", ["mine"])


@pytest.mark.slow
def test_a_server_that_was_never_there(cli):
    needs("mlflow")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"http://me:secret99@127.0.0.1:{taken.getsockname()[1]}"
        ended = cli.done(
            *HERE, "results.loggers=[mlflow]", "hydra.run.dir=outputs/a",
            timeout_s=300, MLFLOW_TRACKING_URI=address,
        )  # fmt: skip
    assert ended.stderr.count("mlflow does not answer (") <= 1
    assert "mlflow lacks records of this job" in ended.stderr
    said = (
        ended.stderr
        + ended.stdout
        + "".join(path.read_text() for path in (cli.folder / "outputs" / "a" / "logs").iterdir())
    )
    assert "secret99" not in said


# -- MLflow's own server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mlflow_program() -> Path:
    """MLflow's command, in an environment of its own with the version of the client."""
    needs("mlflow")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "ddp_hydra-tests" / f"mlflow-{version('mlflow-skinny')}"
    program = folder / "bin" / "mlflow"
    if not program.exists():
        install = [folder / "bin" / "python", "-m", "pip", "install", "-q", f"mlflow=={version('mlflow-skinny')}"]
        for command in ([sys.executable, "-m", "venv", folder], install):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"MLflow's server cannot be installed: {done.stderr[-300:]}")
    return program


class Server:
    """MLflow's server on loopback, with a SQLite store."""

    def __init__(self, program: Path, folder: Path) -> None:
        port = free_port()
        self.address, self.database = f"http://127.0.0.1:{port}", folder / "store.db"
        self.command = [
            program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.database}", "--artifacts-destination", folder / "artifacts",
        ]  # fmt: skip
        self.folder = folder
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["TMPDIR"] = str(self.folder)  # a lock of its database stays there
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 200
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=5):
                return
            is_late = self.process.poll() is not None or time.monotonic() > deadline
            assert not is_late, (self.folder / "server.log").read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def server(mlflow_program, tmp_path) -> Iterator[Server]:
    (tmp_path / "server").mkdir()
    server = Server(mlflow_program, tmp_path / "server")
    yield server
    server.stop()


def arguments(server: Server, *more: str) -> tuple[Any, ...]:
    return (*RUN, "results.loggers=[mlflow]", f"results.mlflow.tracking_uri={server.address}", *more)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mlflows_server_has_a_run_its_resume_and_a_sweep(server, cli):
    ended = cli.done(*arguments(server, "hydra.run.dir=outputs/a", "results.mlflow.checkpoints=all"))
    (run,) = rows(server.database, "SELECT run_uuid FROM runs")[0]
    assert ended.stderr.count(f"mlflow: {server.address}/#/experiments/1/runs/{run}") == 1
    cli.done(*arguments(server, "hydra.run.dir=outputs/b", "resume=outputs/a", "trainer.epochs=2"))
    assert rows(server.database, "SELECT run_uuid, status FROM runs") == [(run, "FINISHED")]
    steps = [step for (step,) in rows(server.database, "SELECT step FROM metrics WHERE key='train/loss' ORDER BY step")]
    assert steps == list(range(1, 25))
    assert sorted(path.name for path in server.folder.rglob("*.pt")) == ["step-000012.pt", "step-000024.pt"]
    cli.done("-m", *arguments(server, "optimizer.lr=0.1,0.2", "hydra.sweep.dir=multirun/many"), timeout_s=400)
    grouped = rows(
        server.database,
        "SELECT name, value, status FROM tags JOIN runs USING (run_uuid) WHERE key='sweep' ORDER BY name",
    )
    assert grouped == [("many/0", "many", "FINISHED"), ("many/1", "many", "FINISHED")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mlflows_server_is_killed_and_comes_back(server, cli, wait_for):
    """Its run gets all steps, also those of the time when it was away."""
    process = cli.start(*arguments(server, "hydra.run.dir=outputs/a", "trainer.epochs=100000", "data.delay_s=0.05"))
    log = cli.folder / "outputs" / "a" / "metrics.jsonl"

    def logged() -> int:
        with contextlib.suppress(sqlite3.Error):
            return rows(server.database, "SELECT count(*) FROM metrics WHERE key='train/loss'")[0][0]
        return 0

    try:
        wait_for(logged, "metrics at the server")
        server.stop()
        before, size = logged(), log.stat().st_size
        wait_for(lambda: log.stat().st_size > size + 20_000, "the job goes on")
        server.start()
        wait_for(lambda: logged() > before + 50, "metrics at the server again")
        wait_for(lambda: logged() > len(log.read_text().splitlines()) - 100, "the server has nearly all of them")
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    assert "mlflow does not answer (" in err
    assert "mlflow answers again" in err
    assert rows(server.database, "SELECT status FROM runs") == [("KILLED",)]
    steps = [step for (step,) in rows(server.database, "SELECT step FROM metrics WHERE key='train/loss' ORDER BY step")]
    assert steps == list(range(1, len(steps) + 1))
