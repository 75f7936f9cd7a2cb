"""Jobs whose data comes over a store that misbehaves: they end with the right numbers, or say why not."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_hydra.data.shards.write import write_shards
from ddp_hydra.errors import RankFailed
from tests.integration.support import training
from tests.integration.support.training import Trained
from tests.support.fault_server import FaultServer, serving

pytestmark = pytest.mark.integration

IMAGES = (
    "data=s3_photos", "model=pixels", "optimizer.lr=0.1", "data.image_size=16", "data.center_crop=1.0",
    "data.bucket=photos", "data.anon=true", "data.timeout_s=0.5", "data.cache_mb=0",
    "trainer.log_every_steps=1", "trainer.epochs=2", "results.keep_checkpoints=null",
)  # fmt: skip


def photo(number: int) -> bytes:
    pixels = np.random.RandomState(number).randint(0, 255, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((120, 100), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


TRAIN = {f"photos/train/{'abc'[number % 3]}/{number:03}.jpg": photo(number) for number in range(96)}
VAL = {f"photos/val/{'abc'[number % 3]}/{number:03}.jpg": photo(number + 500) for number in range(20)}


@pytest.fixture
def store() -> Iterator[FaultServer]:
    with serving({**TRAIN, **VAL}) as server:
        yield server


@pytest.fixture
def train(project, tmp_path, store) -> Callable[..., Trained]:
    """Train on the photos of the store."""

    def run(client: Any, name: str, *overrides: str, ranks: int = 2, resume: Path | None = None) -> Trained:
        each = f"data.batch_size={24 // ranks}"
        settings = (*IMAGES, f"data.endpoint_url={store.url}", each, *overrides)
        return training.train(client, project, tmp_path / name, *settings, ranks=ranks, resume=resume)

    return run


def test_a_job_through_all_faults_has_the_same_numbers_as_one_without(client2, train, store):
    calm = train(client2, "calm")
    kinds = ["503", "reset", "half", "stall", "slow", "500", "short", "error", "html", "blank", "301"]
    pages = iter(
        ["error", None, "without token", "cut", "html", None, "blank", None, "hollow", None, "301", None, "503"]
    )
    store.page = 20

    def fault(number: int, path: str) -> str | None:
        if path == "photos":
            return next(pages, None)
        return kinds[number // 7 % len(kinds)] if number % 7 == 3 else None

    store.objects["photos/train/a/notes.txt"] = b"no image"
    store.fault = fault
    rough = train(client2, "rough")
    assert rough.metrics("data/retries") == calm.metrics("data/retries")
    assert rough.value["data"]["retries"] > 20
    assert rough.value["bad_samples"] == 0
    assert next(pages, "none") == "none"
    header = next(record.data.lines for record in rough.records if record.kind == "start")
    assert "skipped   1 files that are not images: 1 .txt" in header


@pytest.mark.slow
def test_bad_images_are_replaced_alike_on_any_number_of_ranks(client4, train, store):
    paths = sorted(TRAIN)
    store.objects[paths[10]] = b"a text"
    store.objects[paths[11]] = store.objects[paths[11]][:500]
    store.fault = lambda number, path: "404" if path == paths[40] else "403" if path == paths[70] else None
    settings = ("data.max_bad_fraction=0.05",)
    one, four = (train(client4, f"{ranks}", *settings, ranks=ranks) for ranks in (1, 4))
    assert one.value["bad_samples"] == four.value["bad_samples"] == 4
    counts = ("data/bad_samples", "data/retries")  # hang on who read what, and on how busy the machine is
    for line, expected in zip(four.metrics(*counts), one.metrics(*counts), strict=True):
        assert line == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_bad_images_that_no_rank_finds_too_many_fail_together(client4, train, store):
    for path in sorted(TRAIN)[::16]:
        store.objects[path] = b"a text"  # 6 of 96; a rank sees 1 or 2 of them in an epoch
    # How many are found before the first interval ends depends on how far the ranks have read ahead.
    words = r"all ranks together found [2-6] bad samples of 96, and data\.max_bad_fraction=0\.02 allows 1"
    with pytest.raises(RankFailed, match=words) as failed:
        train(client4, "bad", "data.max_bad_fraction=0.02", ranks=4)
    assert "Traceback" not in str(failed.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    [
        ("distributed",),
        ("chunked", "sampler.chunk_samples=7", "sampler.interleave=3"),
        ("sharded", "sampler.interleave=4"),
        ("weighted", "sampler.balance=0.5"),
    ],
    ids=lambda sampler: sampler[0],
)
def test_amid_an_epoch_other_ranks_and_threads_go_on_with_the_same_samples(client4, train, sampler):
    settings = (f"sampler={sampler[0]}", *sampler[1:], "trainer.checkpoint_every_steps=1", "data.hue=0.1")
    whole = train(client4, "whole", *settings)
    steps = whole.folder / "checkpoints"
    resumed = train(client4, "resumed", *settings, "data.threads=3", ranks=4, resume=steps / "step-000002.pt")
    rest = [line for line in whole.metrics("data/retries") if line["step"] > 2]
    assert len(rest) == 6  # steps; the validations are in the lines of two of them
    found = [line for line in resumed.metrics("data/retries") if line["step"] > 2]
    for line, expected in zip(found, rest, strict=True):
        assert line == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_credentials_that_expire_amid_a_job_are_read_anew(client2, train, store, monkeypatch, tmp_path):
    file = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = secret\n"
    file.write_text(text.format("old"))
    seen = []

    def expire(number: int, path: str) -> None:
        if number == 80:
            store.access_keys = {"new"}
            file.write_text(text.format("new"))
        seen.append(number)

    calm = train(client2, "calm")
    store.access_keys, store.fault = {"old"}, lambda number, path: expire(number - first, path)
    first = len(store.requests)
    client2.run(lambda: __import__("os").environ.update(AWS_SHARED_CREDENTIALS_FILE=str(file)))
    try:
        rough = train(client2, "rough", "data.anon=false")
    finally:
        client2.run(lambda: __import__("os").environ.pop("AWS_SHARED_CREDENTIALS_FILE"))
    assert rough.metrics("data/retries") == calm.metrics("data/retries")
    assert store.access_keys == {"new"}
    assert rough.value["data"]["retries"] > 0


@pytest.fixture
def shards(store, tmp_path) -> tuple[str, ...]:
    """The photos as shards in the store, and the settings of a job that reads them from there."""
    for part, photos in (("train", TRAIN), ("val", VAL)):
        for path, content in photos.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        write_shards(str(tmp_path / "photos" / part), str(tmp_path / "shards" / part), shard_mb=0.03)
        for file in (tmp_path / "shards" / part).iterdir():
            store.objects[f"shards/{part}/{file.name}"] = file.read_bytes()
    where = {"index": f"{store.url}/shards/train/index.json", "val_index": f"{store.url}/shards/val/index.json"}
    return (
        "data=wids", "model=pixels", "optimizer.lr=0.1", "sampler=chunked", "sampler.interleave=3",
        "data.image_size=16",
        "data.center_crop=1.0", f"data.index={where['index']}", f"data.val_index={where['val_index']}",
        f"data.cache_dir={tmp_path / 'cache'}", "trainer.log_every_steps=1", "trainer.epochs=2",
        "results.keep_checkpoints=null", "trainer.checkpoint_every_steps=1",
    )  # fmt: skip


def downloads(store) -> dict[str, int]:
    """How often each training shard was begun."""
    paths = [path for method, path, _ in store.requests if method == "GET" and path.startswith("shards/train/")]
    return {path: paths.count(path) for path in paths if path.endswith(".tar")}


def test_shards_are_downloaded_once_for_all_ranks_and_epochs(client4, project, tmp_path, store, shards):
    store.ranges = False
    whole = training.train(client4, project, tmp_path / "whole", *shards, "data.batch_size=12")
    assert len(downloads(store)) > 5
    assert set(downloads(store).values()) == {1}
    assert whole.value["data"]["bytes"] >= sum(len(store.objects[path]) for path in downloads(store))
    losses = [line["train/loss"] for line in whole.metrics() if "train/loss" in line]
    assert losses[-1] < losses[0]
    # Other ranks, amid the first epoch, from the shards that are there.
    first = whole.folder / "checkpoints" / "step-000002.pt"
    settings = (*shards, "data.batch_size=6")
    resumed = training.train(client4, project, tmp_path / "resumed", *settings, ranks=4, resume=first)
    rest = [line for line in whole.metrics("data/retries") if line["step"] > 2]
    found = [line for line in resumed.metrics("data/retries") if line["step"] > 2]
    assert len(found) == len(rest) == 6
    for line, expected in zip(found, rest, strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
    assert set(downloads(store).values()) == {1}
    # Workers of the ranks make the same batches.
    settings = (*shards, "data.batch_size=12", f"data.cache_dir={tmp_path / 'theirs'}", "data.workers=2")
    apart = training.train(client4, project, tmp_path / "apart", *settings)
    assert set(downloads(store).values()) == {2}
    assert apart.metrics("data/retries") == whole.metrics("data/retries")
    for name, values in whole.checkpoint("last.pt")["model"].items():
        assert values.equal(apart.checkpoint("last.pt")["model"][name])
    (header,) = [record.data.lines for record in apart.records if record.kind == "start"]
    assert "reading   2 workers for each rank" in header
    assert apart.value["data"]["samples"] == whole.value["data"]["samples"] == 2 * len(TRAIN)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_lost_shard_is_replaced_and_named(client2, project, tmp_path, store, shards, workers):
    shards = (*shards, f"data.workers={workers}")
    path = sorted(path for path in store.objects if path.startswith("shards/train/") and path.endswith(".tar"))[2]
    store.objects[path] = store.objects[path][:3000]
    settings = (*shards, "data.batch_size=12", "data.max_bad_fraction=0.3")
    trained = training.train(client2, project, tmp_path / "lost", *settings)
    lost = trained.value["bad_samples"]
    assert 3 <= lost <= 20
    with pytest.raises(RankFailed, match=rf"bad.*{Path(path).name}.*data\.max_bad_fraction="):
        training.train(client2, project, tmp_path / "few", *shards, "data.batch_size=12")


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_an_attempt_and_changes_nothing(cli):
    settings = (
        "data=tiny", "data.train._target_=data.tiny.Announced", "model=tiny", "optimizer.lr=0.1",
        "trainer.epochs=2", "trainer.threads=1", "trainer.checkpoint_every_steps=1", "data.val=null",
    )  # fmt: skip
    (cli.folder / "there").touch()
    cli.done(*settings, "+data.train.mark=there", "hydra.run.dir=calm")
    ended = cli.done(*settings, "+data.train.mark=mark", "data.workers=2", "hydra.run.dir=killed")
    assert (cli.folder / "mark").exists()
    assert (
        "a worker that makes batches for this rank (data.workers) has ended by signal 9" in ended.stdout + ended.stderr
    )
    calm, killed = (
        torch.load(cli.folder / name / "checkpoints" / "last.pt", weights_only=True)["model"]
        for name in ("calm", "killed")
    )
    for name, values in calm.items():
        assert values.equal(killed[name])
    summary = json.loads((cli.folder / "killed" / "summary.json").read_text())
    assert summary["restarts"] == 1
