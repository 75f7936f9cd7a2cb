"""Photos from an S3 store on loopback, through decoding and cropping, into ResNet-50."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.gpu.bench import Bench, Missing
from benchmarks.object_store import corpus
from benchmarks.report import Figure
from ddp_hydra.data import demo_server

START_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """Holds what the GPU's report and its rehearsal on the CPU have of different sizes.

    Args:
        photos: different ones.
        fields: random images that photos are made of.
        model: config of the model.
        side: of the crops, pixels.
        batch_size: of the one rank.
        steps: of the job.
        skip: the first steps, which are not counted.
        decoded: images that tell how fast the host decodes.
    """

    photos: int
    fields: int
    model: str
    side: int
    batch_size: int
    steps: int
    skip: int
    decoded: int


LARGE = Sizes(2000, 24, "resnet50", 224, 128, 150, 40, 8000)
SMALL = Sizes(32, 2, "resnet18", 64, 4, 12, 4, 100)


def store(bench: Bench) -> Iterator[Figure]:
    """Train from the store, and compare with what the host's cores can decode when they do nothing else."""
    if missing := demo_server.missing():
        raise Missing(f"needs {missing}")
    sizes = LARGE if bench.on_gpu else SMALL
    photos = bench.new_folder("photos")
    corpus.write_photos(photos, sizes.photos, sizes.fields)
    cores = len(os.sched_getaffinity(0))
    settings = (f"--threads={cores}", f"--side={sizes.side}", f"--images={sizes.decoded}")
    limit = bench.python("benchmarks.gpu.decode", str(photos), *settings)["images_per_s"]
    with demo_server.Seaweed(corpus.BUCKET) as server:
        upload(server, photos)
        key, secret = server.credentials
        access = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "us-east-1"}
        overrides = (*of_store(sizes, server.endpoint_url), f"trainer.precision={bench.half}", *bench.ranks(1))
        jobs = [bench.job("store", *overrides, variables=access) for _ in range(bench.repeats)]
    speeds = report.speeds(
        f"{sizes.model} at {sizes.side} from S3 on loopback", [job.speed(sizes.skip) for job in jobs]
    )
    yield report.value(f"decoding limit of the host, {cores} cores", limit, unit="samples/s")
    yield speeds
    yield report.value("from S3 / decoding limit", speeds.median / limit, unit="x")
    yield report.value("share of the time that the GPU waits for data", jobs[-1].summary["data"]["wait"])
    yield report.value(
        "samples that could not be read", int(jobs[-1].summary["bad_samples"]), report.Goal(0, at_most=True)
    )


def upload(server: demo_server.Seaweed, photos: Path) -> None:
    """Put the photos into the store."""
    bucket = server.wait_until_ready(START_S)
    files = sorted(photos.rglob("*.jpg"))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda file: bucket.put(f"train/{file.relative_to(photos)}", file.read_bytes()), files))


def of_store(sizes: Sizes, url: str) -> tuple[str, ...]:
    """Return the overrides of the job."""
    data = ("data=s3_photos", f"data.bucket={corpus.BUCKET}", f"data.endpoint_url={url}", "data.val=null")
    shape = (f"data.image_size={sizes.side}", f"data.batch_size={sizes.batch_size}", f"model={sizes.model}")
    length = (f"trainer.max_steps={sizes.steps}", "trainer.epochs=null", "trainer.log_every_steps=4")
    return *data, *shape, *length, "data.cache_mb=0", "trainer.channels_last=true", "trainer.checkpoint_every_epochs=0"
