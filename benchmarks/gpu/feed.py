"""How fast the GPU is fed from a store: by torch's DataLoader in a loop by hand, and by jobs of this project."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks import report
from benchmarks.gpu.bench import Bench, Missing
from benchmarks.gpu.store import LARGE, SMALL, Sizes, of_store, upload
from benchmarks.object_store import corpus
from benchmarks.report import Figure
from ddp_hydra.data import demo_server

SHARE = 0.97
"""The least share of the speed by hand."""
SCRIPT = "benchmarks.peers.feed_loop"
THREADS = 16
"""Fetches at a time of each process by hand."""


@dataclass(frozen=True)
class Store:
    """A store of photos, and how it is read by hand.

    Args:
        url: of the store.
        access: variables with its keys.
        sizes: of the work.
        cores: of this host.
    """

    url: str
    access: Mapping[str, str]
    sizes: Sizes
    cores: int

    @property
    def workers(self) -> int:
        """Processes of the loader by hand: a quarter of the cores, measured to be the best on 16."""
        return max(1, self.cores // 4)


def feed(bench: Bench) -> Iterator[Figure]:
    """Read photos from a store on loopback: a DataLoader by hand without and with the device, and jobs by workers."""
    if missing := demo_server.missing():
        raise Missing(f"needs {missing}")
    sizes, cores = (LARGE if bench.on_gpu else SMALL), len(os.sched_getaffinity(0))
    photos = bench.new_folder("photos")
    corpus.write_photos(photos, sizes.photos, sizes.fields)
    with demo_server.Seaweed(corpus.BUCKET) as server:
        upload(server, photos)
        key, secret = server.credentials
        access = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "us-east-1"}
        store = Store(server.endpoint_url, access, sizes, cores)
        alone, hands = [], []
        ours: dict[str, list[float]] = {str(count): [] for count in ("null", store.workers, max(1, cores // 2))}
        for _ in range(bench.repeats):
            alone.append(by_hand(bench, store, "--alone"))
            hands.append(by_hand(bench, store))
            for count, speeds in ours.items():
                speeds.append(job(bench, store, count))
    name = f"{sizes.model} at {sizes.side} from S3 on loopback, batch {sizes.batch_size}"
    yield report.speeds(f"a DataLoader by hand, {store.workers} workers, without the device", alone)
    yield report.speeds(f"{name}, a DataLoader by hand, {store.workers} workers", hands)
    for count, speeds in ours.items():
        yield report.speeds(f"{name}, data.workers={count}", speeds)
    yield report.paired("data.workers=null / by hand", ours["null"], hands, bench.goal(SHARE))


def by_hand(bench: Bench, store: Store, *more: str) -> float:
    """Return the samples/s of the script by hand.

    Raises:
        Broken: it failed.
    """
    sizes = store.sizes
    shape = (f"--model={sizes.model}", f"--side={sizes.side}", f"--batch-size={sizes.batch_size}")
    length = (f"--steps={sizes.steps}", f"--skip={sizes.skip}", *(["--compile"] if bench.on_gpu else []))
    decoders = max(1, store.cores // store.workers - 1)
    loading = (f"--workers={store.workers}", f"--threads={THREADS}", f"--decoders={decoders}")
    device = (f"--device={bench.device}", f"--precision={bench.half}", f"--endpoint={store.url}")
    found = bench.python(SCRIPT, *shape, *length, *loading, *device, *more, variables=store.access)
    report.progress(f"by hand {' '.join(more)}: {found['samples_per_s']:,.1f} samples/s")
    return float(found["samples_per_s"])


def job(bench: Bench, store: Store, workers: str) -> float:
    """Return the samples/s of a job."""
    compiled = ("trainer.compile=default",) if bench.on_gpu else ()
    bare = ("optimizer.lr=0.01", "optimizer.nesterov=false", "optimizer.weight_decay=0", "scheduler=none")
    done = bench.job(
        "feed",
        *of_store(store.sizes, store.url),
        f"data.workers={workers}",
        f"trainer.precision={bench.half}",
        *compiled,
        *bare,
        *bench.ranks(1),
        variables=store.access,
    )
    report.progress(f"data.workers={workers}: {done.speed(store.sizes.skip):,.1f} samples/s")
    return done.speed(store.sizes.skip)
