"""Samples/s of a whole job with all records on, against the loop by hand, Lightning Fabric and Ray Train."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import commands, data_sides, environments, overhead, report
from benchmarks.object_store import corpus, server
from benchmarks.overhead import RANKS, WORK, Work
from benchmarks.peers.loop_photos import SIDE
from benchmarks.report import Figure, Goal
from ddp_hydra.rank.environment import ALLOCATOR

PEERS = ("lightning-fabric>=2.5", "ray[train]>=2.50", "boto3>=1.35")
RAY = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
PHOTOS = Work("resnet18", "photos", 32, 30, 10)

Side = Callable[[Work, Path], float]


def measure(repeats: int) -> Iterator[Figure]:
    """Train by each side in turn, with data in memory and from the store."""
    peers = Peers(environments.python("train", *PEERS))
    for work in (work for work in WORK if work.script == PHOTOS.script):  # the peers have no other loops
        yield from compare(work, {"ddp_hydra": overhead.job, **peers.sides()}, repeats)
    root = corpus.make(corpus.FOLDER)
    with server.serve(root, corpus.FOLDER / "server-train") as store:
        url = store.url(server.LATE_MS)
        yield from compare(PHOTOS, {"ddp_hydra": from_store(url), **peers.sides(f"--endpoint={url}")}, repeats)


def compare(work: Work, sides: dict[str, Side], repeats: int) -> Iterator[Figure]:
    """Measure one work by all sides: the speed of each, and ours divided by each peer's."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    name = f"{work.model} x {work.batch_size}, {work.data}"
    for turn in range(repeats):
        for side, train in list(sides.items())[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                speeds[side].append(train(work, Path(folder)))
            report.progress(f"{name}, {side}: {speeds[side][-1]:,.1f} samples/s")
    found = {side: report.speeds(f"{name}, {side}", runs) for side, runs in speeds.items()}
    yield from found.values()
    for peer in list(found)[1:]:
        goal = Goal(0.99 if peer == "by hand" else 1.0)
        yield report.paired(f"{name}: ddp_hydra / {peer}", speeds["ddp_hydra"], speeds[peer], goal)


def from_store(url: str) -> Side:
    """Our job with the photos of a store."""
    data = ("data=s3_photos", "data.bucket=photos", "data.val=null", "data.anon=true")
    sizes = (f"data.endpoint_url={url}", f"data.image_size={SIDE}")
    return lambda work, folder: overhead.job(work, folder, (*data, *sizes))


class Peers:
    """Runs the loops in `peers/`.

    Args:
        python: the interpreter that has Fabric, Ray and boto3.
    """

    def __init__(self, python: str) -> None:
        self.python = python

    def sides(self, *options: str) -> dict[str, Side]:
        """Each loop, with options of its command line."""

        def torchrun(script: str) -> Side:
            def train(work: Work, folder: Path) -> float:
                _, *command = commands.by_hand(script, *sizes(work, folder), *options, ranks=RANKS)
                return run([self.python, *command], work, folder)

            return train

        def ray(work: Work, folder: Path) -> float:
            script = str(commands.ROOT / "benchmarks" / "peers" / "ray_loop.py")
            return run([self.python, script, *sizes(work, folder), *options], work, folder)

        return {
            "by hand": torchrun("ddp_loop.py"),
            "Lightning Fabric": torchrun("fabric_loop.py"),
            "Ray Train": ray,
        }


def sizes(work: Work, folder: Path) -> tuple[str, ...]:
    """Return the arguments of all scripts."""
    metrics = f"--metrics={folder / 'metrics.jsonl'}"
    return f"--model={work.model}", f"--batch-size={work.batch_size}", f"--steps={work.steps}", metrics


def run(command: list[str], work: Work, folder: Path) -> float:
    """Samples/s of a command."""
    commands.run(command, {**commands.ONE_THREAD, **ALLOCATOR, **RAY, **data_sides.ACCOUNT})
    return overhead.speed(folder / "metrics.jsonl", work.skip)


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=3)
