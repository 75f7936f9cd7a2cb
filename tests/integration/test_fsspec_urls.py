"""Data, results, mirrors and `resume=` on a store that only fsspec knows: an SFTP server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_hydra.data import S3ImageFolder
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage import urls
from tests.integration.conftest import wait_for
from tests.integration.support.by_hand import program
from tests.integration.support.training import CLOCKS

pytestmark = pytest.mark.integration

TINY = ("data=tiny", "model=tiny", "optimizer.lr=0.1", "trainer.log_every_steps=1", "dispatch.ranks=2")
PASSWORD = "top-secret"
ACCESS = {"FSSPEC_SFTP_PASSWORD": PASSWORD}


@dataclass
class Sftp:
    url: str
    files: Path


@pytest.fixture(scope="module")
def sftp(warm_server, tmp_path_factory) -> Iterator[Sftp]:
    folder = tmp_path_factory.mktemp("sftp")
    command = (sys.executable, Path(__file__).with_name("support") / "sftp_server.py", folder, PASSWORD)
    with program(*command, log=folder / "log"):
        wait_for((folder / "port").exists, "an SFTP server that listens")
        yield Sftp(f"sftp://me@127.0.0.1:{(folder / 'port').read_text()}", folder / "files")


def metrics(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


@pytest.mark.slow
def test_results_are_written_there_and_gone_on_with(cli, sftp):
    job = (*TINY, "results.handler=cluster", f"results.root={sftp.url}/runs")
    cli.done(*TINY, "trainer.epochs=2", "hydra.run.dir=here")
    said = cli.done(*job, "trainer.epochs=2", "hydra.run.dir=outputs/day/first", **ACCESS)
    there = sftp.files / "runs" / "day" / "first"
    assert json.loads((there / "status.json").read_text())["state"] == "done"
    assert metrics(there) == metrics(cli.folder / "here")
    assert "takes no conditional writes" in (there / "logs" / "driver.log").read_text()
    assert "takes no conditional writes" in said.stdout + said.stderr
    assert not list(there.rglob("*.part"))
    assert PASSWORD.encode() not in b"".join(path.read_bytes() for path in there.rglob("*.*") if path.is_file())

    url = f"{sftp.url}/runs/day/first"
    assert cli.run("attach", f"run={url}", **ACCESS).returncode == 0
    cli.done(f"resume={url}", "trainer.epochs=3", "hydra.run.dir=outputs/day/second", **ACCESS)
    again = json.loads((sftp.files / "runs" / "day" / "second" / "summary.json").read_text())
    assert (again["status"], again["steps"]) == ("done", 18)


@pytest.mark.slow
def test_checkpoints_are_copied_there_and_gone_on_with(cli, sftp):
    mirror = f"{sftp.url}/copy"
    cli.done(*TINY, "trainer.epochs=2", f"results.mirror={mirror}", "hydra.run.dir=first", **ACCESS)
    cli.done(*TINY, "trainer.epochs=3", f"resume={mirror}", "hydra.run.dir=second", **ACCESS)
    again = json.loads((cli.folder / "second" / "summary.json").read_text())
    assert (again["status"], again["steps"]) == ("done", 18)


def test_images_are_read_from_there_by_many_threads(sftp, png, monkeypatch):
    for number in range(40):
        path = sftp.files / "pictures" / "train" / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(red=number))
    monkeypatch.setenv("FSSPEC_SFTP_PASSWORD", PASSWORD)
    data = S3ImageFolder(bucket=f"{sftp.url}/pictures", prefix="train", threads=4)
    try:
        assert data.classes == ["class 0", "class 1"]
        images = data.__getitems__(list(range(40)))
        found = {int(image[0, 0, 0]): label for image, label in images}
        assert found == {number: number % 2 for number in range(40)}
    finally:
        data.close()


def test_who_has_no_password_is_refused_in_a_sentence(sftp, monkeypatch):
    monkeypatch.setenv("FSSPEC_SFTP_PASSWORD", "guessed")
    with pytest.raises(PermissionError, match=r"was refused.*FSSPEC_SFTP_"):
        S3ImageFolder(bucket=f"{sftp.url}/pictures", prefix="train")
    with pytest.raises(ConfigError, match=r"was refused"):
        urls.open_folder(f"{sftp.url}/runs").get("x")
