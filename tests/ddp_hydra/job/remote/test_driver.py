from __future__ import annotations

import hashlib
import io
import os
import pickle
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed import Security
from distributed.scheduler import KilledWorker
from omegaconf import OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.config.project import Project
from ddp_hydra.config.schema import Config
from ddp_hydra.errors import CheckpointError, ClusterError, SchedulerLost
from ddp_hydra.job.job_config import find_resume
from ddp_hydra.job.loggers import LoggedJob
from ddp_hydra.job.remote import driver, uploader
from ddp_hydra.job.remote.driver import SCRATCH, RemoteJobRunner, _client_security
from ddp_hydra.job.remote.start_driver import DriverSpec
from ddp_hydra.job.remote.status import DriverStatus, FencedStore
from ddp_hydra.job.remote.uploader import AlreadyEnded, acquire_run, is_lost, resume_run
from ddp_hydra.job.run import Job, RemoteContext
from ddp_hydra.job.run_dir import add_saved
from ddp_hydra.rank import outbox
from ddp_hydra.record import Checkpoint, File, Metrics, Record, Start
from ddp_hydra.run_state import AttemptEntry, Best, FailureEntry, Objective, Summary, encode
from ddp_hydra.storage import LocalFolder, urls
from ddp_hydra.storage.files import scratch_folder
from ddp_hydra.storage.manifest import CheckpointEntry, CheckpointPart, encode_manifest, name_in_store, read_manifest
from ddp_hydra.writers.run_dir import encode_status, read_summary

PLAIN = {"results": {"handler": "cluster", "root": "s3://bucket/runs", "mirror": None, "retry_s": 1.0}, "detach": True}


def owned(url: str) -> FencedStore:
    store = FencedStore(urls.open_folder(url))
    store.acquire(None)
    return store


@pytest.fixture
def spec(tmp_path) -> DriverSpec:
    url = f"{tmp_path}/store/a"
    return DriverSpec(
        "driver-abc", url, PLAIN, {}, (), Project("abc", b""), {}, "/", None, "", LoggedJob("run"), resume=""
    )


@pytest.fixture
def runner(spec, tmp_path):
    with scratch_folder(SCRATCH, str(tmp_path)) as scratch:
        yield RemoteJobRunner(spec, scratch, owned(spec.url), DriverStatus("tcp://scheduler:8786", "abc"), None)


def test_its_config_is_that_of_a_job_that_is_typed_there(runner, spec):
    cfg = runner.config()
    assert cfg.results == {"handler": "client", "root": None, "mirror": None, "retry_s": 1.0}
    assert (cfg.detach, cfg.resume) == (False, None)
    assert spec.config == PLAIN


def test_a_checkpoint_that_was_sent_moves_in(runner, spec, tmp_path):
    sent = outbox.path(str(tmp_path / "worker"), spec.name, 0, "in") / "step-000005.pt"
    sent.parent.mkdir(parents=True)
    sent.write_bytes(b"weights")
    runner.spec = replace(spec, resume=str(sent))
    found = Path(runner.resume_from())
    assert found.read_bytes() == b"weights"
    assert found.is_relative_to(runner.run_dir)
    assert not list((tmp_path / "worker" / "ddp_hydra").iterdir())


@pytest.mark.parametrize("resume", ["s3://bucket/runs/a", "/shared/runs/a/checkpoints/last.pt"])
def test_one_that_is_there_stays(runner, spec, resume):
    runner.spec = replace(spec, resume=resume)
    assert runner.resume_from() == resume


def test_what_was_brought_before_comes_back_to_go_on_with(runner, spec):
    store = urls.open_folder(spec.url)
    store.put("metrics.jsonl", b'{"step":1}\n')
    store.put("logs/rank-0.log", b"hello\n")
    before = DriverStatus("tcp://scheduler:8786", "abc")
    before.now.files = ["logs/rank-0.log", "metrics.jsonl"]
    store.put("status.json", encode_status(before.content()))
    runner.take_over()
    assert (runner.run_dir / "metrics.jsonl").read_bytes() == b'{"step":1}\n'
    assert (runner.run_dir / "logs" / "rank-0.log").read_bytes() == b"hello\n"
    assert runner.spec.resume == ""  # it had no checkpoint yet
    store.put(
        "checkpoints/manifest.json",
        encode_manifest(
            {"step-000001-0123456789ab.pt": CheckpointEntry(parts=[CheckpointPart(name="a.pt", size=1, sha256="")])}
        ),
    )
    runner.take_over()
    assert runner.spec.resume == spec.url


def test_a_run_whose_sent_checkpoint_was_lost_with_its_host_fails_for_want_of_it(runner, spec, tmp_path, caplog):
    sent = outbox.path(str(tmp_path / "worker"), spec.name, 0, "in") / "step-000005.pt"
    runner.spec = replace(spec, resume=str(sent), is_restart=True)
    runner.store.put("status.json", encode_status(runner.status.content()))
    runner.take_over()
    assert runner.resume_from() == str(sent)
    assert "was on the host of the first driver" in caplog.text
    with pytest.raises(CheckpointError, match="step-000005"):
        find_resume(OmegaConf.create({"resume": str(sent), "results": {"retry_s": 0}}), tmp_path)


def test_a_run_that_has_ended_or_was_removed_needs_no_other_driver(runner, spec):
    store = urls.open_folder(spec.url)
    with pytest.raises(AlreadyEnded):
        runner.take_over()
    assert not is_lost(store, lambda: False)
    status = DriverStatus("tcp://scheduler:8786", "abc")
    status.now.state = "done"
    store.put("status.json", encode_status(status.content()))
    with pytest.raises(AlreadyEnded):
        runner.take_over()
    assert not is_lost(store, lambda: False)


@pytest.mark.medium
def test_a_driver_is_lost_if_neither_store_nor_scheduler_hears_of_it(spec, monkeypatch):
    monkeypatch.setattr(uploader, "WATCH_S", 0.05)
    monkeypatch.setattr(uploader, "POLL_S", 0.01)
    store, status = urls.open_folder(spec.url), DriverStatus("tcp://scheduler:8786", "abc")
    status.now.state = "running"
    asked, updates, failures = [], 20, [ConnectionError("away")] * 5

    def get(key):
        nonlocal updates
        if failures:
            raise failures.pop()
        updates -= 1
        if updates > 0:
            store.put("status.json", encode_status(status.content()))
        return LocalFolder.get(store, key)

    def is_connected():
        asked.append(updates)
        return len(asked) < 3

    store.put("status.json", encode_status(status.content()))
    monkeypatch.setattr(store, "get", get)
    assert is_lost(store, is_connected)
    assert len(asked) == 3
    assert max(asked) < 1  # a driver that writes is not asked for


def test_a_guard_that_dask_has_dropped_is_replaced(runner, spec, monkeypatch, caplog):
    submitted = []
    future = SimpleNamespace(add_done_callback=lambda call: None)
    monkeypatch.setattr(driver, "submit_guard", lambda client, spec: submitted.append(spec) or future)
    runner.client = SimpleNamespace(status="running")

    def ended(error=None, cancelled=False):
        runner.guard_again(SimpleNamespace(cancelled=lambda: cancelled, exception=lambda: error))
        return len(submitted)

    assert ended(KilledWorker("guard", None, 3)) == 1
    assert ended(cancelled=True) == 2
    assert ended() == 2
    assert not caplog.text
    assert ended(ImportError("no obstore")) == 2
    assert "no other driver will follow if this one is lost: no obstore" in caplog.text
    runner.state = "done"
    assert ended(cancelled=True) == 2


@pytest.mark.parametrize(
    ("error", "max_restarts", "state"),
    [
        (SchedulerLost("the scheduler is lost"), 2, "lost"),
        (SchedulerLost("the scheduler is lost"), 0, "failed"),
        (ClusterError("too few workers"), 2, "failed"),
    ],
)
def test_a_cut_link_is_not_the_end_of_a_run_that_another_driver_may_go_on_with(
    runner, spec, monkeypatch, error, max_restarts, state
):
    def cut(*_):
        (runner.run_dir / "summary.json").write_text('{"status": "failed"}')
        raise error

    monkeypatch.setattr("ddp_hydra.job.run.run_job", cut)
    runner.spec, runner.client = replace(spec, max_restarts=max_restarts), SimpleNamespace(status="running")
    found, message = runner.run_job(runner.config())
    assert (found, message) == (state, str(error))
    runner.uploader.start()
    assert runner.uploader.finish_run(0, found, message) == ""
    store = urls.open_folder(spec.url)
    assert is_lost(store, lambda: True) is (state == "lost")
    assert (store.size_or_none("summary.json") is None) is (state == "lost")


def test_the_attempts_of_a_lost_driver_are_not_forgotten(runner, spec):
    store = urls.open_folder(spec.url)
    before = DriverStatus("tcp://scheduler:8786", "abc")
    before.now.attempts = [AttemptEntry(attempt=0, failure=FailureEntry(message="a rank was killed"))]
    before.now.steps_lost = 3
    before.write(Record(Start(world_size=2, total_steps=20), step=4, attempt=1))
    before.write(Record(Metrics({"train/loss": 1.0}), step=9, attempt=1))
    store.put("status.json", encode_status(before.content()))
    runner.take_over()
    job = Job(runner.run_dir, OmegaConf.structured(Config), {}, {}, Summary(status="failed"), None, {})
    assert job.first_attempt == 2
    first, lost = job.earlier_attempts
    found = read_summary(runner.run_dir)
    assert (found.restarts, found.steps_lost, job.steps_before) == (1, 3, 9)
    assert first.failure.message == "a rank was killed"
    assert (lost.attempt, lost.world_size, lost.steps_done, lost.failure.kind) == (1, 2, 9, "lost")
    assert f"its driver, process {os.getpid()} on " in lost.failure.message
    assert runner.status.content().attempts == [first, lost]  # for the next driver


def test_a_driver_that_is_lost_before_it_trains_hides_no_steps(runner, spec, tmp_path):
    store = urls.open_folder(spec.url)
    before = DriverStatus("tcp://scheduler:8786", "abc")
    before.now.steps_lost = 3
    before.write(Record(Start(world_size=2, total_steps=20), step=4))
    before.write(Record(Metrics({"train/loss": 1.0}), step=9))
    store.put("status.json", encode_status(before.content()))
    for name in ("second", "third"):  # each reads what the one before has written
        status = DriverStatus("tcp://scheduler:8786", "abc")
        (tmp_path / name).mkdir()
        resume_run(FencedStore(store), status, tmp_path / name)
        found = read_summary(tmp_path / name)
        assert (found.restarts, found.steps_lost, found.last_step) == (0, 3, 9)
        assert [one.steps_done for one in found.attempts] == [9]
        assert found.metrics == {"train/loss": 1.0}
        assert status.content().steps_lost == 3


def test_a_driver_that_is_lost_before_it_trains_keeps_what_the_run_before_it_says(runner, spec, tmp_path):
    store = urls.open_folder(spec.url)
    before = DriverStatus("tcp://scheduler:8786", "abc")
    before.now.state = "interrupted"
    store.put("status.json", encode_status(before.content()))
    failed = AttemptEntry(attempt=0, steps_done=12, failure=FailureEntry(message="a rank was killed"))
    said = {"steps": 10, "restarts": 1, "steps_lost": 4, "attempts": [failed]}
    store.put("summary.json", encode(Summary(status="interrupted", **said)))
    first = DriverStatus("tcp://scheduler:8786", "abc")
    acquire_run(FencedStore(store), first, {}, goes_on=True, own_dir=tmp_path)
    assert store.size_or_none("summary.json") is None
    for name in ("second", "third"):  # the one before each is lost while it waits for workers
        (tmp_path / name).mkdir()
        resume_run(FencedStore(store), DriverStatus("tcp://scheduler:8786", "abc"), tmp_path / name)
        found = read_summary(tmp_path / name)
        assert (found.restarts, found.steps, found.steps_lost, found.last_step) == (1, 10, 4, 10)


def test_a_driver_goes_on_with_ranks_and_checkpoints_of_the_one_before(runner, spec):
    """As a run does that is resumed in its own directory."""
    status = DriverStatus("tcp://scheduler:8786", "abc")
    status.write(Record(Start(world_size=2, total_steps=90), step=0))
    status.write(Record(Metrics({"train/loss": 1.0}), step=49))
    entries = {}
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.7), (40, 0.6)):
        part = CheckpointPart(name=f"step-{step:06d}.pt", size=1, sha256=f"{step:064d}")
        entry = CheckpointEntry(parts=[part], step=step, metrics={"val/accuracy": accuracy, "val/loss": 1.0})
        entries[name_in_store(f"step-{step:06d}.pt", entry)] = entry
    for name in entries:
        runner.store.put(f"checkpoints/{name}", b"1")
    newest, best = list(entries)[-1], list(entries)[1]
    entries |= {"last.pt": entries[newest], "best.pt": entries[best]}
    runner.store.put("checkpoints/manifest.json", encode_manifest(entries))
    runner.store.put("status.json", encode_status(status.content()))
    runner.spec = replace(spec, is_restart=True)
    runner.take_over()
    summary = Summary(status="failed", objective=Objective("val/accuracy", "maximize"))
    add_saved(summary, runner.run_dir, is_stored=True)
    assert (summary.best, summary.metrics) == (Best(20, 0.9), {"val/accuracy": 0.6, "val/loss": 1.0})
    remote = RemoteContext(runner.spec, [], runner.status.now)
    cfg = OmegaConf.merge(OmegaConf.structured(Config), {"resume": spec.url})
    job = Job(runner.run_dir, cfg, {}, {}, Summary(status="failed"), remote, {})
    assert (job.ranks_before, job.first_world_size) == (2, 2)
    job.write(Record(Start(world_size=1), step=40, attempt=1))
    assert job.summary.steps_lost == 9
    assert job.summary.metrics == runner.status.content().metrics == {"val/accuracy": 0.6, "val/loss": 1.0}

    uploader = runner.uploader
    with job.handler(None) as handler:
        content = b"weights"
        inline, digest = b64encode(content).decode(), hashlib.sha256(content).hexdigest()
        said = Checkpoint(50, metrics={"val/accuracy": 0.8})
        handler.handle(Record(File("checkpoints/step-000050.pt", len(content), digest, inline, checkpoint=said)))
        uploader.copy()
    entries = read_manifest(runner.run_dir / "checkpoints")
    assert ([entry.step for entry in entries.values()][:4], entries["best.pt"].step) == ([20, 30, 40, 50], 20)
    kept = {name for name, _ in runner.store.objects("checkpoints")}
    assert {name.partition("-")[2][:6] for name in kept} == {"", "000020", "000030", "000040", "000050"}


@pytest.mark.parametrize(
    ("changes", "ranks_before"), [({}, None), ({"max_restarts": 3}, 0), ({"max_restarts": 0, "is_restart": True}, 0)]
)
def test_a_driver_that_outlives_its_scheduler_waits_for_workers_as_after_a_loss(runner, spec, changes, ranks_before):
    remote = RemoteContext(replace(spec, **changes), [], runner.status.now)
    job = Job(runner.run_dir, OmegaConf.structured(Config), {}, {}, Summary(status="failed"), remote, {})
    assert job.ranks_before == ranks_before


def test_jobs_of_a_driver_wait_for_as_many_workers_as_its_command_did(runner, spec, monkeypatch):
    class Answered(Exception):
        """The driver has begun."""

    def begin(spec, scheduler, scratch_root):
        connect.use_existing(replace(scheduler, connected=object()))
        raise Answered

    monkeypatch.setattr(driver, "open_runner", begin)
    monkeypatch.setattr(driver.signal, "signal", lambda *_: None)
    sent = pickle.dumps((replace(spec, expected=2), "tcp://s:8786", None, ""))
    monkeypatch.setattr(driver.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(sent)))
    monkeypatch.setattr("setproctitle.setproctitle", lambda title: None)
    monkeypatch.setattr(connect, "_existing", None)
    with pytest.raises(Answered):
        driver.main()
    assert connect.expected_workers(OmegaConf.create({"n_workers": 5})) == 2


def test_a_client_shows_the_certificate_of_its_worker():
    worker = Security(
        tls_ca_file="ca.pem", tls_worker_cert="cert.pem", tls_worker_key="key.pem", require_encryption=True
    )
    client = _client_security(worker)
    assert (client.tls_ca_file, client.tls_client_cert, client.tls_client_key) == ("ca.pem", "cert.pem", "key.pem")
    assert client.require_encryption
    assert _client_security(None) is None
