from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed import Security
from omegaconf import OmegaConf

from ddp_hydra.config.project import Project
from ddp_hydra.config.schema import Config
from ddp_hydra.errors import ClusterError, SchedulerLost
from ddp_hydra.job.local import Job
from ddp_hydra.job.remote.driver import Driver, _of_client
from ddp_hydra.job.remote.fence import Fenced
from ddp_hydra.job.remote.job_spec import JobSpec
from ddp_hydra.job.remote.scratch import Scratch
from ddp_hydra.job.remote.status import Status, encoded
from ddp_hydra.job.remote.supervisor import is_over
from ddp_hydra.rank import outbox
from ddp_hydra.results import Record
from ddp_hydra.storage import results_root

PLAIN = {"results": {"handler": "cluster", "root": "s3://bucket/runs", "mirror": None, "retry_s": 1.0}, "detach": True}


def owned(url: str) -> Fenced:
    there = Fenced(results_root.folder(url))
    there.take(None)
    return there


@pytest.fixture
def order(tmp_path) -> JobSpec:
    url = f"{tmp_path}/store/a"
    return JobSpec("driver-abc", url, PLAIN, {}, (), Project("abc", b""), {}, "/", None, "", resume="")


@pytest.fixture
def driver(order, tmp_path):
    scratch = Scratch(str(tmp_path))
    yield Driver(order, scratch, owned(order.url), Status("tcp://scheduler:8786", "abc"), None)
    scratch.remove()


def test_its_config_is_that_of_a_job_that_is_typed_there(driver, order):
    cfg = driver.cfg()
    assert cfg.results == {"handler": "client", "root": None, "mirror": order.url, "retry_s": 1.0}
    assert (cfg.detach, cfg.resume) == (False, None)
    assert order.plain == PLAIN


def test_a_checkpoint_that_was_sent_moves_in(driver, order, tmp_path):
    sent = outbox.path(str(tmp_path / "worker"), order.name, 0, "in") / "step-000005.pt"
    sent.parent.mkdir(parents=True)
    sent.write_bytes(b"weights")
    driver.order = replace(order, resume=str(sent))
    found = Path(driver.resume())
    assert found.read_bytes() == b"weights"
    assert found.is_relative_to(driver.run_dir)
    assert not list((tmp_path / "worker" / "ddp_hydra").iterdir())


@pytest.mark.parametrize("resume", ["s3://bucket/runs/a", "/shared/runs/a/checkpoints/last.pt"])
def test_one_that_is_there_stays(driver, order, resume):
    driver.order = replace(order, resume=resume)
    assert driver.resume() == resume


def test_what_was_brought_before_comes_back_to_go_on_with(driver, order):
    there = results_root.folder(order.url)
    there.put("metrics.jsonl", b'{"step":1}\n')
    there.put("logs/rank-0.log", b"hello\n")
    before = Status("tcp://scheduler:8786", "abc")
    before.files = ["logs/rank-0.log", "metrics.jsonl"]
    there.put("status.json", encoded(before.content()))
    driver.take_over()
    assert (driver.run_dir / "metrics.jsonl").read_bytes() == b'{"step":1}\n'
    assert (driver.run_dir / "logs" / "rank-0.log").read_bytes() == b"hello\n"
    assert driver.order.resume == ""  # it had no checkpoint yet
    there.put("checkpoints/manifest.json", b'{"version": 1, "files": {"step-000001-0123456789ab.pt": {}}}')
    driver.take_over()
    assert driver.order.resume == order.url


def test_a_run_that_has_ended_needs_no_other_driver(order):
    there = results_root.folder(order.url)
    status = Status("tcp://scheduler:8786", "abc")
    status.state = "done"
    there.put("status.json", encoded(status.content()))
    assert is_over(there, 100)


@pytest.mark.parametrize(
    ("error", "lives", "state"),
    [
        (SchedulerLost("the scheduler is lost"), 2, "lost"),
        (SchedulerLost("the scheduler is lost"), 0, "failed"),
        (ClusterError("too few workers"), 2, "failed"),
    ],
)
def test_a_cut_link_is_not_the_end_of_a_run_that_another_driver_may_go_on_with(
    driver, order, monkeypatch, error, lives, state
):
    def cut(*_):
        (driver.run_dir / "summary.json").write_text('{"status": "failed"}')
        raise error

    monkeypatch.setattr("ddp_hydra.job.run.run", cut)
    driver.order, driver.client = replace(order, lives=lives), SimpleNamespace(status="running")
    found, said = driver.job(driver.cfg())
    assert (found, said) == (state, str(error))
    driver.uploader.start()
    assert driver.uploader.finish(0, found, said) == ""
    there = results_root.folder(order.url)
    assert is_over(there, 100) is (state == "failed")
    assert (there.size("summary.json") is None) is (state == "lost")


def test_the_attempts_of_a_lost_driver_are_not_forgotten(driver, order):
    there = results_root.folder(order.url)
    before = Status("tcp://scheduler:8786", "abc")
    before.note_attempts([{"attempt": 0, "failure": {"message": "a rank was killed"}}])
    before.write(Record("start", {"world_size": 2, "total_steps": 20}, step=4, attempt=1))
    before.write(Record("metrics", {"metrics": {"train/loss": 1.0}}, step=9, attempt=1))
    there.put("status.json", encoded(before.content()))
    driver.take_over()
    job = Job(driver.run_dir, OmegaConf.structured(Config), {}, {}, {}, None, {})
    assert job.first_attempt == 2
    first, lost = job.earlier_attempts
    assert first["failure"]["message"] == "a rank was killed"
    assert (lost["attempt"], lost["world_size"], lost["steps_done"], lost["failure"]["kind"]) == (1, 2, 9, "lost")
    assert f"its driver, process {os.getpid()} on " in lost["failure"]["message"]
    assert driver.status.content()["attempts"] == [first, lost]  # for the next driver


def test_a_client_shows_the_certificate_of_its_worker():
    worker = Security(
        tls_ca_file="ca.pem", tls_worker_cert="cert.pem", tls_worker_key="key.pem", require_encryption=True
    )
    client = _of_client(worker)
    assert (client.tls_ca_file, client.tls_client_cert, client.tls_client_key) == ("ca.pem", "cert.pem", "key.pem")
    assert client.require_encryption
    assert _of_client(None) is None
