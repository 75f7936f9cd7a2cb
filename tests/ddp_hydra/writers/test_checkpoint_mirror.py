"""Checkpoints in a bucket: a real S3 server, behind a front that fails when it is told to."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.record import Record, Start
from ddp_hydra.storage.base import PIECE_BYTES
from ddp_hydra.storage.manifest import find_checkpoint, read_manifest
from ddp_hydra.storage.run_ref import fetch_checkpoint, remove_checkpoints
from ddp_hydra.storage.urls import open_folder
from ddp_hydra.writers.checkpoint_mirror import Mirror, start_mirror
from ddp_hydra.writers.files import CheckpointWriter
from ddp_hydra.writers.handler import ResultsHandler, default_writers
from tests.support.s3_front import Answer, Front
from tests.support.s3_front import front as front
from tests.support.s3_server import credentials as credentials
from tests.support.s3_server import plain_environment as plain_environment
from tests.support.s3_server import s3 as s3

pytestmark = pytest.mark.integration


class Run:
    """A run directory with its two writers of checkpoints."""

    def __init__(self, run_dir: Path, make, keep: int = 2, retry_s: float = 30.0, **more) -> None:
        run_dir.mkdir(exist_ok=True)
        self.run_dir, self.make = run_dir, make
        self.give_up = threading.Event()
        self.checkpoints = CheckpointWriter(run_dir, keep=keep)
        self.mirror = start_mirror(run_dir, "s3://runs/a", retry_s, self.give_up, **more)

    def write(self, step: int, content: bytes | None = None, best: bool = False) -> None:
        record = self.make(step, content, best)
        self.checkpoints.write(record)
        self.mirror.write(record)

    def settle(self) -> None:
        """Wait until all is there, or it was said that it is not."""
        wait_for(lambda: self.failed() or not self.mirror.is_behind())

    def failed(self) -> bool:
        return self.mirror._is_reported


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def failing(times: int, how: str, method: str = "", key: str = "") -> Answer:
    left = [times]

    def answer(asked_method, asked_key):
        if left[0] and method in asked_method and key in asked_key:
            left[0] -= 1
            return how
        return None

    return answer


def test_the_run_directory_is_no_mirror_of_itself(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for place in (tmp_path / "run", tmp_path / "link", f"file://{tmp_path}/run/"):
        with pytest.raises(ConfigError, match=r"results\.mirror=.* is the run directory itself: give another folder"):
            start_mirror(tmp_path / "run", str(place))


def test_every_checkpoint_arrives_the_manifest_goes_last_and_old_ones_go(front, tmp_path, checkpoint_record, caplog):
    run = Run(tmp_path / "run", checkpoint_record)
    for step in (1, 2, 3, 4):
        run.write(step, best=step == 1)
        run.settle()
        front.check()
    run.mirror.close()
    objects = {key.removeprefix("a/checkpoints/"): content for key, content in front.objects().items()}
    steps = sorted(name for name in objects if name.startswith("step-"))
    assert [re.sub(r"-[0-9a-f]{12}\.pt", "", name) for name in steps] == ["step-000001", "step-000003", "step-000004"]
    assert objects[steps[-1]] == b"weights 4"
    assert objects.keys() - set(steps) == {"manifest.json"}
    assert front.manifest()["last.pt"] == front.manifest()[steps[-1]]
    assert front.manifest()["best.pt"] == front.manifest()[steps[0]]
    changes = [(method, key) for method, key, _ in front.seen if method in ("PUT", "DELETE")]
    of_step_4 = changes.index(("PUT", f"a/checkpoints/{steps[-1]}"))
    assert list(dict.fromkeys(key.rpartition("/")[2][:12] for _, key in changes[of_step_4:])) == [
        "step-000004-", "manifest.jso", "step-000002-",
    ]  # fmt: skip
    assert not caplog.records
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"weights 4"
    assert fetch_checkpoint("s3://runs/a/checkpoints/", tmp_path / "back", "best").read_bytes() == b"weights 1"
    assert {path.name for path in (tmp_path / "back").iterdir()} == {steps[0], steps[-1]}


def test_a_copy_of_the_folder_is_a_run_directory(front, tmp_path, checkpoint_record):
    run = Run(tmp_path / "run", checkpoint_record)
    for step in (1, 2, 3):
        run.write(step, best=step == 2)
    run.mirror.close()
    copy = tmp_path / "copy" / "checkpoints"
    copy.mkdir(parents=True)
    for key, content in front.objects().items():
        (copy / Path(key).name).write_bytes(content)
    assert find_checkpoint(tmp_path / "copy").read_bytes() == b"weights 3"
    assert find_checkpoint(tmp_path / "copy", "best").read_bytes() == b"weights 2"
    CheckpointWriter(tmp_path / "copy", keep=1).write(checkpoint_record(4, best=True))
    assert len(list(copy.glob("step-*"))) == 1


@pytest.mark.parametrize("how", ["503", *(pytest.param(how, marks=pytest.mark.slow) for how in ("reset", "hang"))])
@pytest.mark.parametrize("where", [("PUT", "step-"), ("PUT", "manifest"), ("GET", ""), ("HEAD", ""), ("DELETE", "")])
def test_a_bucket_that_fails_for_a_while_gets_everything_in_the_end(
    front, tmp_path, checkpoint_record, caplog, how, where
):
    run = Run(tmp_path / "run", checkpoint_record, timeout_s=1.0 if how == "hang" else 10.0)
    run.write(1)
    run.settle()
    front.answer = failing(4, how, *where)  # the client itself tries three times
    for step in (2, 3, 4):
        run.write(step)
        front.check()
    run.mirror.close()
    front.check()
    assert [name[:11] for name in front.manifest() if name.startswith("step-")] == ["step-000003", "step-000004"]
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"weights 4"
    assert not caplog.records


def test_a_bucket_that_goes_on_failing_is_reported_and_the_next_checkpoint_brings_all(
    front, tmp_path, checkpoint_record, caplog
):
    run = Run(tmp_path / "run", checkpoint_record, retry_s=0.0)
    run.write(1)
    run.settle()
    before = front.objects()
    front.answer = lambda method, key: "503"
    run.write(2)
    run.settle()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert re.search(
        r"cannot be uploaded to s3://runs/a/checkpoints: s3://\S+: the store at http://127.* answered .*SlowDown",
        caplog.text,
    )
    assert front.objects() == before
    front.answer = lambda method, key: None
    run.write(3)
    wait_for(lambda: not run.failed())
    run.mirror.close()
    assert [name[:11] for name in front.manifest() if name.startswith("step-")] == ["step-000002", "step-000003"]
    assert "uploaded to s3://runs/a/checkpoints again" in caplog.text
    assert "testing-secret" not in caplog.text


def test_a_bucket_that_is_gone_damages_no_run_and_the_end_says_what_is_missing(
    front, tmp_path, checkpoint_record, caplog
):
    run = Run(tmp_path / "run", checkpoint_record, retry_s=0.3)
    run.write(1)
    run.settle()
    front.server.drop("runs")
    run.write(2)
    run.mirror.close()
    said = r"newest checkpoint, step-000002.pt, is not in s3://runs/a.*there is no bucket 'runs'.*it is in .*run/check"
    assert re.search(said, caplog.messages[-1])
    assert find_checkpoint(run.run_dir).read_bytes() == b"weights 2"


def test_a_bucket_that_is_made_anew_gets_all(front, tmp_path, checkpoint_record):
    run = Run(tmp_path / "run", checkpoint_record)
    run.write(1)
    run.settle()
    front.server.drop("runs")
    front.server.client.create_bucket(Bucket="runs")
    run.write(2)
    run.mirror.close()
    front.check()
    assert [name[:11] for name in front.manifest() if name.startswith("step-")] == ["step-000001", "step-000002"]


def test_giving_up_ends_the_waiting_at_once(front, tmp_path, checkpoint_record, caplog):
    run = Run(tmp_path / "run", checkpoint_record, retry_s=3600)
    front.answer = lambda method, key: "close"
    run.write(1)
    threading.Timer(0.3, run.give_up.set).start()
    run.mirror.close()
    assert "newest checkpoint, step-000001.pt, is not in" in caplog.messages[-1]


def test_large_files_go_in_pieces_and_half_of_one_is_nothing(front, tmp_path, checkpoint_record):
    content = os.urandom(2 * PIECE_BYTES + 17)
    run = Run(tmp_path / "run", checkpoint_record, retry_s=0.0)
    run.write(1, b"small")
    run.settle()
    before = front.objects()
    pieces = []

    def answer(method, key):
        if method == "PUT" and "step-" in key:
            pieces.append(key)
        return "503" if len(pieces) > 2 else None

    front.answer = answer
    run.write(2, content)
    run.settle()
    assert run.failed()
    assert front.objects() == before
    front.answer = lambda method, key: None
    run.write(3, content)
    run.mirror.close()
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == content


def test_the_same_step_again_leaves_the_older_content_until_the_manifest_is_changed(front, tmp_path, checkpoint_record):
    run = Run(tmp_path / "run", checkpoint_record, retry_s=0.0)
    run.write(1)
    run.write(2)
    run.settle()
    front.answer = lambda method, key: "503" if "manifest" in key and method == "PUT" else None
    run.write(2, b"weights 2 after a rollback")
    run.settle()
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"weights 2"
    front.answer = lambda method, key: None
    run.write(1, b"weights 1 after a rollback")
    run.mirror.close()
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"weights 1 after a rollback"
    kept = {content for key, content in front.objects().items() if "step-" in key}
    assert kept == {b"weights 1 after a rollback"}


def test_a_run_that_goes_back_does_so_in_the_bucket(front, tmp_path, checkpoint_record):
    run = Run(tmp_path / "run", checkpoint_record, keep=3)
    for step in (1, 2, 3):
        run.write(step, best=True)
    run.settle()
    run.checkpoints.write(Record(Start(best={"val/loss": 1.0}), step=1))
    run.settle()
    for which in ("last", "best"):
        assert fetch_checkpoint("s3://runs/a", tmp_path / which, which).read_bytes() == b"weights 1"
    run.write(3, b"weights 3 of the new branch")
    run.mirror.close()
    assert {content for key, content in front.objects().items() if "step-" in key} == {
        b"weights 1",
        b"weights 3 of the new branch",
    }


def test_what_another_run_put_there_stays_and_comes_before_ours(front, tmp_path, checkpoint_record):
    first = Run(tmp_path / "first", checkpoint_record)
    for step in (1, 2):
        first.write(step, b"first %d" % step, best=step == 1)
    first.mirror.close()
    before = front.objects()
    second = Run(tmp_path / "second", checkpoint_record, keep=1)
    for step in (2, 3):
        second.write(step, b"second %d" % step)
    second.mirror.close()
    assert before.items() - front.objects().items() == {
        item for item in before.items() if item[0].endswith("manifest.json")
    }
    names = [name[:11] for name in front.manifest() if name.startswith("step-")]
    assert names == ["step-000001", "step-000002", "step-000003"]
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"second 3"
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back", "best").read_bytes() == b"first 1"


def test_a_run_directory_that_is_gone_on_with_prunes_what_it_had_put_there(front, tmp_path, checkpoint_record):
    for step in (1, 2, 3, 4):
        run = Run(tmp_path / "run", checkpoint_record)
        run.write(step)
        run.mirror.close()
    assert sorted(key[14:25] for key in front.objects()) == ["manifest.js", "step-000003", "step-000004"]


def test_a_damaged_local_file_is_not_put_there(front, tmp_path, checkpoint_record, caplog):
    checkpoints = CheckpointWriter(tmp_path)
    for step in (1, 2):
        checkpoints.write(checkpoint_record(step))
    (tmp_path / "checkpoints/step-000002.pt").write_bytes(b"broken")
    start_mirror(tmp_path, "s3://runs/a").close()
    assert b"broken" not in front.objects().values()
    assert "step-000002.pt is damaged: it has 6 bytes" in caplog.messages[0]
    assert "newest checkpoint, step-000002.pt, is not in s3://runs/a/checkpoints (it has 6 bytes" in caplog.messages[1]
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"weights 1"


def test_nothing_goes_before_the_newest_is_there(front, tmp_path, checkpoint_record):
    writer = CheckpointWriter(tmp_path, keep=1)
    mirror = Mirror(tmp_path, open_folder("s3://runs/a"))
    writer.write(checkpoint_record(1))
    mirror.copy()
    before = front.objects()
    writer.write(checkpoint_record(2))
    (tmp_path / "checkpoints/step-000002.pt").write_bytes(b"broken")
    mirror.copy()
    assert front.objects() == before
    front.answer = lambda method, key: "503" if method == "PUT" else None
    writer.write(checkpoint_record(3))
    with pytest.raises(ConnectionError):
        mirror.copy()
    assert front.objects() == before
    front.answer = lambda method, key: None
    mirror.copy()
    assert sorted(key[14:25] for key in front.objects()) == ["manifest.js", "step-000003"]


def test_one_failure_takes_no_name_away(front, tmp_path, checkpoint_record):
    run = Run(tmp_path / "run", checkpoint_record, keep=3, retry_s=0.0)
    for step in (1, 2):
        run.write(step)
        run.settle()
    front.answer = lambda method, key: "503"
    run.write(3)
    run.settle()
    front.answer = lambda method, key: "503" if method == "HEAD" and "step-000002" in key else None
    run.write(4)
    wait_for(lambda: [name[:11] for name in front.manifest()][:3] == ["step-000002", "step-000003", "step-000004"])
    front.check()
    run.mirror.close()


def test_what_a_sweep_does_not_keep_goes_from_the_bucket_the_manifest_first(front, tmp_path, checkpoint_record):
    for name in ("first", "second"):
        run = Run(tmp_path / name, checkpoint_record)
        for step in (1, 2):
            run.write(step, content=f"{name} {step}".encode(), best=True)
        run.settle()
        run.mirror.close()
    own = read_manifest(tmp_path / "second" / "checkpoints")
    front.answer = failing(2, "503", "PUT", "manifest")
    remove_checkpoints("s3://runs/a", "hydra.launcher.keep=best:1", own)
    front.check()
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"first 2", "that of another run stays"
    changes = [(method, key.rpartition("/")[2][:11]) for method, key, done in front.seen if done == "passed"]
    changes = [change for change in changes if change[0] in ("PUT", "DELETE")]
    assert changes[-3:] == [("PUT", "manifest.js"), ("DELETE", "step-000001"), ("DELETE", "step-000002")]
    remove_checkpoints("s3://runs/a", "hydra.launcher.keep=best:1")
    assert list(front.objects()) == ["a/checkpoints/manifest.json"]
    with pytest.raises(CheckpointError, match=r"a/checkpoints were removed: hydra\.launcher\.keep=best:1"):
        fetch_checkpoint("s3://runs/a", tmp_path / "back", "best")


def test_checkpoints_of_a_store_that_does_not_answer_stay(front, tmp_path, checkpoint_record):
    run = Run(tmp_path / "run", checkpoint_record)
    run.write(1)
    run.settle()
    run.mirror.close()
    before = front.objects()
    front.answer = failing(99, "503")
    with pytest.raises(CheckpointError, match="try again later"):
        remove_checkpoints("s3://runs/a", "a reason", retry_s=0.3)
    front.answer = lambda method, key: None
    assert front.objects() == before


def spoil(front: Front, step: int, content: bytes | None) -> None:
    key = next(key for key in front.objects() if f"step-{step:06d}" in key)
    if content is None:
        front.server.delete("runs", key)
    else:
        front.server.add("runs", {key: content})


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "it is missing"), (b"wei", "it has 3 bytes, the manifest says 9"), (b"weights X", "its sha256 is")],
)
def test_fetching_falls_back_to_the_one_before(front, tmp_path, checkpoint_record, caplog, content, said):
    run = Run(tmp_path / "run", checkpoint_record)
    for step in (1, 2):
        run.write(step)
    run.mirror.close()
    spoil(front, 2, content)
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"weights 1"
    assert re.search(rf"s3://runs/a/checkpoints/step-000002-\w+.pt is damaged: {said}", caplog.text)
    assert len(caplog.records) == 1
    spoil(front, 1, content)
    shutil.rmtree(tmp_path / "back")
    with pytest.raises(CheckpointError, match=rf"step-000002.*is damaged: {said}.*no whole checkpoint"):
        fetch_checkpoint("s3://runs/a", tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []


def test_fetching_waits_for_a_store_that_is_away_and_never_takes_that_for_damage(front, tmp_path, checkpoint_record):
    run = Run(tmp_path / "run", checkpoint_record)
    for step in (1, 2):
        run.write(step)
    run.mirror.close()
    front.answer = failing(7, "close")
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"weights 2"
    shutil.rmtree(tmp_path / "back")
    front.answer = lambda method, key: "503" if "step-000002" in key else None
    with pytest.raises(CheckpointError, match=r"the store at .* tried for 0 s: try again later"):
        fetch_checkpoint("s3://runs/a", tmp_path / "back", retry_s=0)


def test_fetching_what_is_not_there_is_a_sentence(front, tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no run in s3://runs/a: it has no checkpoints/manifest.json"):
        fetch_checkpoint("s3://runs/a", tmp_path)
    front.server.add("runs", {"new/.hydra/config.yaml": b""})
    with pytest.raises(CheckpointError, match=r"the run in s3://runs/new has no checkpoint yet"):
        fetch_checkpoint("s3://runs/new", tmp_path)
    with pytest.raises(ConfigError, match="there is no bucket 'nowhere' at http"):
        fetch_checkpoint("s3://nowhere/a", tmp_path)
    front.server.add("runs", {"a/checkpoints/manifest.json": b"[]"})
    with pytest.raises(CheckpointError, match="is not the manifest of checkpoints"):
        fetch_checkpoint("s3://runs/a", tmp_path)
    evil = b'{"checkpoints": {"step-1/../../x.pt": {"parts": [{"name": "x", "size": 1, "sha256": ""}]}, "step-1": {}}}'
    front.server.add("runs", {"a/checkpoints/manifest.json": evil})
    with pytest.raises(CheckpointError, match="missing required field `parts`"):
        fetch_checkpoint("s3://runs/a", tmp_path)


def test_a_bucket_that_can_never_work_is_refused_before_training(front, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="there is no bucket 'nowhere'"):
        default_writers(tmp_path, mirror="s3://nowhere/a")
    front.server.add("runs", {"a/checkpoints/manifest.json": b"a list of ships"})
    with pytest.raises(ConfigError, match=r"is no manifest .*results.mirror"):
        default_writers(tmp_path, mirror="s3://runs/a")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'ddp-hydra\[s3\]'"):
        default_writers(tmp_path, mirror="s3://runs/a")


def test_a_store_that_is_away_at_first_is_no_reason_not_to_begin(front, tmp_path, checkpoint_record, caplog):
    front.answer = failing(3, "close")
    run = Run(tmp_path / "run", checkpoint_record)
    assert "it is asked again when there is a checkpoint" in caplog.text
    run.write(1)
    run.mirror.close()
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"weights 1"


def test_the_handler_of_a_job_fills_the_bucket(front, tmp_path, checkpoint_record):
    writers = default_writers(tmp_path / "run", mirror="s3://runs/a", retry_s=5.0, progress=False, tensorboard=False)
    with ResultsHandler(writers, retry_s=5.0) as handler:
        for step in (1, 2):
            handler.handle(checkpoint_record(step))
    assert fetch_checkpoint("s3://runs/a", tmp_path / "back").read_bytes() == b"weights 2"
