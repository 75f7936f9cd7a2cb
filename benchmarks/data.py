"""Photos from an object store, and shards of them: ours, five other loaders, the bare client and the bare decoder."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks import report
from benchmarks.data_sides import Result, Sides
from benchmarks.object_store import corpus, link, server
from benchmarks.report import Figure, Goal

LATENCIES_MS = (0, server.LATE_MS)
THREADS = (32, 64)
"""Of raw fetches; the better number counts, on each side."""
DECODING_THREADS = 2
PHOTOS = corpus.FOLDER / "root" / corpus.BUCKET / corpus.PREFIX
REFERENCE = "dask-pytorch-ddp"
WARM = "wids, warm"
OURS = "ddp_hydra"
FLOATS = "ddp_hydra, normalised"
"""Floats made on the CPU, as the peers make them; otherwise bytes, as they go to a GPU, which makes floats of them."""
BARE = "bare obstore"


@dataclass(frozen=True)
class Way:
    """Describes one way to use a peer.

    Args:
        peer: which.
        how: with how many workers or threads.
        script: in `peers/`.
        images: how many it reads without delay, and how many with: slow ones fewer.
        workers: processes of torch's DataLoader.
        threads: that fetch, where the script has them.
    """

    peer: str
    how: str
    script: str
    images: tuple[int, int]
    workers: int = 0
    threads: int = 0

    @property
    def passes(self) -> tuple[str, ...]:
        """Return the names of the script's results at one latency."""
        return (self.peer, WARM) if self.peer.startswith("wids") else (self.peer,)


def both(peer: str, script: str, alone: tuple[int, int], two: tuple[int, int]) -> tuple[Way, Way]:
    """Return a peer with two worker processes, then without: the one that forks should come first."""
    return Way(peer, "2 workers", script, two, workers=2), Way(peer, "no workers", script, alone)


WAYS = (
    *both(REFERENCE, "data_dask_pytorch_ddp.py", (128, 64), (256, 128)),
    *both("boto3 + torchvision", "data_boto3.py", (512, 128), (512, 256)),
    *both("s3torchconnector", "data_s3torchconnector.py", (512, 128), (512, 256)),
    Way("s3torchconnector", "2 x 32 threads", "data_s3torchconnector.py", (768, 768), 2, 32),
    Way("s3torchconnector", "32 threads", "data_s3torchconnector.py", (512, 512), threads=32),
    *both("litdata", "data_litdata.py", (640, 640), (768, 768)),
    *both("wids, cold", "data_wids.py", (600, 600), (1000, 1000)),
)
"""All photos are 2000; what a peer reads is chosen at random, and for wids the first shards."""

Measured = dict[tuple[str, int], dict[str, list[Result]]]
"""By peer and latency, by the way: results of all turns."""


def measure(repeats: int) -> Iterator[Figure]:
    """Measure both sides in turn."""
    root = corpus.make(corpus.FOLDER)
    with (
        Sides() as sides,
        server.serve(root, corpus.FOLDER / "server") as store,
        link.to(store.late) as slow,
    ):
        endpoints = [store.url(latency) for latency in LATENCIES_MS]
        yield from end_to_end(sides, endpoints, repeats)
        yield from raw_fetch(sides, endpoints, repeats)
        yield from decoding(sides, repeats)
        yield from listing(sides, endpoints[0], repeats)
        yield from random_shards(sides, endpoints[0], repeats)
        yield from cold_shards(sides, slow, repeats)


def end_to_end(sides: Sides, endpoints: Sequence[str], repeats: int) -> Iterator[Figure]:
    """Measure from the store to batches of crops: all ways once, then the best ways of each peer."""
    measured: Measured = defaultdict(lambda: defaultdict(list))
    for turn in range(repeats):
        ways = WAYS if turn == 0 else tuple(way for way in WAYS if is_best(way, measured))
        run_ours(sides, endpoints, measured)
        for _, group in itertools.groupby(ways, key=lambda way: (way.script, way.threads)):
            run_peer(sides, endpoints, list(group), turn, measured)
        run_ours(sides, endpoints, measured)
    for latency in LATENCIES_MS:
        yield from of_latency(latency, measured)


def run_ours(sides: Sides, endpoints: Sequence[str], measured: Measured) -> None:
    """Read all photos through our loader."""
    for name, options in ((OURS, ("--bytes",)), (FLOATS, ())):
        results = sides.ours("images", "--endpoints", *endpoints, *options)
        for latency, result in zip(LATENCIES_MS, results, strict=True):
            measured[name, latency]["alone"].append(result)
            shown(f"{name}, {latency} ms", result)


def run_peer(sides: Sides, endpoints: Sequence[str], ways: Sequence[Way], seed: int, measured: Measured) -> None:
    """Read photos with one script in all these ways."""
    results = sides.peer(
        ways[0].script,
        *("--endpoints", *endpoints),
        *("--workers", *(way.workers for way in ways)),
        *("--images", *(images for way in ways for images in way.images)),
        f"--threads={ways[0].threads}",
        f"--seed={seed}",
    )
    names = [(name, latency, way.how) for way in ways for latency in LATENCIES_MS for name in way.passes]
    for (name, latency, how), result in zip(names, results, strict=True):
        measured[name, latency][how].append(result)
        shown(f"{name}, {how}, {latency} ms", result)


def is_best(way: Way, measured: Measured) -> bool:
    """Return whether it was the peer's best way in anything."""
    return any(way.how == best_way(measured[name, latency]) for latency in LATENCIES_MS for name in way.passes)


def best_way(ways: dict[str, list[Result]]) -> str:
    """Return the fastest way to use a peer, of those measured most often."""
    most = max(map(len, ways.values()))
    return max((how for how in ways if len(ways[how]) == most), key=lambda how: images_per_s("", ways[how]).median)


def of_latency(latency: int, measured: Measured) -> Iterator[Figure]:
    """Return the figures of one latency."""
    speeds: dict[str, Figure] = {}
    for name, at in measured:
        if at == latency:
            how = best_way(measured[name, at])
            full = f"{name if name in (OURS, FLOATS) else f'{name} ({how})'}, {latency} ms"
            speeds[name] = images_per_s(full, measured[name, at][how])
            yield speeds[name]
            yield cpu_ms(full, measured[name, at][how])
    ours, floats = speeds.pop(OURS), speeds.pop(FLOATS)
    del speeds[WARM]  # reads no store
    fastest = max(speeds, key=lambda name: speeds[name].median)
    # Without a store's latency no decoder is 30 times as fast.
    goal = Goal(30) if latency else None
    yield report.ratio(f"{OURS} / {REFERENCE}, {latency} ms", ours, speeds[REFERENCE], goal)
    yield report.ratio(f"{FLOATS} / {REFERENCE}, {latency} ms", floats, speeds[REFERENCE])
    yield report.ratio(f"{FLOATS} / best: {fastest}, {latency} ms", floats, speeds[fastest], Goal(1.3))


def raw_fetch(sides: Sides, endpoints: Sequence[str], repeats: int) -> Iterator[Figure]:
    """Objects fetched and thrown away."""
    measured: Measured = defaultdict(lambda: defaultdict(list))
    runs = list(itertools.product(THREADS, LATENCIES_MS))
    for turn in range(6 * repeats):  # it is quick, and hangs on the moment
        options = ("--endpoints", *endpoints, "--threads", *THREADS, "--passes=4", f"--seed={turn}")
        both_said = ((OURS, sides.own("data_fetch", *options)), (BARE, sides.peer("data_obstore.py", *options)))
        for name, results in both_said:
            for (threads, latency), result in zip(runs, results, strict=True):
                how = f"{threads} threads"
                measured[name, latency][how].append(result)
                shown(f"raw fetch, {name}, {how}, {latency} ms", result)
    for latency in LATENCIES_MS:
        speeds = []
        for name in (OURS, BARE):
            ways = measured[name, latency]
            how = best_way(ways)
            full = f"raw fetch, {name} ({how}), {latency} ms"
            speeds.append(images_per_s(full, ways[how]))
            yield speeds[-1]
            yield cpu_ms(full, ways[how])
        yield report.ratio(f"raw fetch, {OURS} / {BARE}, {latency} ms", speeds[0], speeds[1], Goal(0.9))


def decoding(sides: Sides, repeats: int) -> Iterator[Figure]:
    """JPEGs in memory to crops."""
    options = (f"--threads={DECODING_THREADS}", f"--folder={PHOTOS}")
    ours, bare = [], []
    for _ in range(4 * repeats):  # it is quick, and hangs on the moment
        ours += sides.ours("decoding", *options)
        shown(f"decoding, {OURS}", ours[-1])
        bare += sides.peer("data_simplejpeg.py", "--endpoints", "none", *options)
        shown("decoding, bare", bare[-1])
    speeds = []
    for name, results in ((OURS, ours), ("simplejpeg + cv2", bare)):
        speeds.append(images_per_s(f"decoding to crops, {name}", results))
        yield speeds[-1]
        yield cpu_ms(f"decoding to crops, {name}", results)
    yield report.ratio(f"decoding, {OURS} / simplejpeg + cv2", speeds[0], speeds[1], Goal(0.9))


def listing(sides: Sides, endpoint: str, repeats: int) -> Iterator[Figure]:
    """Measure the making of a data set with very many keys."""
    results = [result for _ in range(repeats) for result in sides.ours("listing", "--endpoints", endpoint)]
    assert all(result["keys"] == corpus.MANY_KEYS for result in results)
    name = f"listing {corpus.MANY_KEYS:,} keys, {OURS}"
    yield report.times(name, [result["seconds"] for result in results], Goal(1, at_most=True), unit="s of CPU")


def random_shards(sides: Sides, endpoint: str, repeats: int) -> Iterator[Figure]:
    """Undecoded samples in random order from shards that are all there."""
    ours, at_best, default = [], [], []
    for _ in range(repeats):
        ours += sides.ours("shards-random", "--endpoints", endpoint, "--epochs=10")
        shown(f"random reads, {OURS}", ours[-1])
        at_best += sides.peer("data_wids_raw.py", "random", "--endpoint", endpoint, "--epochs=10", "--shards-open=40")
        shown("random reads, wids at its best", at_best[-1])
        default += sides.peer("data_wids_raw.py", "random", "--endpoint", endpoint)
        shown("random reads, wids by default", default[-1])
    best_speed = images_per_s("random reads of shards, wids, all open", at_best)
    default_speed = images_per_s("random reads of shards, wids by default", default)
    yield from (best_speed, default_speed)
    speed = images_per_s(f"random reads of shards, {OURS}", ours)
    yield speed
    yield report.ratio(f"random reads, {OURS} / wids, all open", speed, best_speed, Goal(2))
    yield report.ratio(f"random reads, {OURS} / wids by default", speed, default_speed, Goal(20))


def cold_shards(sides: Sides, endpoint: str, repeats: int) -> Iterator[Figure]:
    """Measure an epoch of undecoded samples from shards over a slow link, and the download alone."""
    ours, wids = [], []
    alone: dict[int, list[Result]] = {1: [], 4: []}
    for _ in range(repeats):
        for connections, results in alone.items():
            results += sides.peer("data_download.py", "--endpoints", endpoint, f"--threads={connections}")
        wids += sides.peer("data_wids_raw.py", "cold", "--endpoint", endpoint)
        ours += sides.ours("shards-cold", "--endpoints", endpoint)
    downloads = [
        seconds(f"all shards, download alone, {connections} at a time", results)
        for connections, results in alone.items()
    ]
    yield from downloads
    yield seconds("all shards, cold epoch, wids", wids)
    cold = seconds(f"all shards, cold epoch, {OURS}", ours)
    yield cold
    fastest = min(downloads, key=lambda figure: figure.median)
    yield report.ratio(f"cold epoch, {OURS} / download 1 by 1", cold, downloads[0])
    yield report.ratio(f"cold epoch, {OURS} / faster download", cold, fastest, Goal(1.2, at_most=True))


def images_per_s(name: str, results: Sequence[Result]) -> Figure:
    """Speed of some results."""
    return replace(report.speeds(name, [result["images_per_s"] for result in results]), unit="images/s")


def cpu_ms(name: str, results: Sequence[Result]) -> Figure:
    """Return the CPU time per image of the client with all its processes."""
    return report.times(name, [result["cpu_ms_per_image"] for result in results], unit="CPU ms/image")


def seconds(name: str, results: Sequence[Result]) -> Figure:
    """Return how long it took."""
    return report.times(name, [result["seconds"] for result in results])


def shown(name: str, result: Result) -> None:
    """Say what was measured."""
    report.progress(
        f"{name}: {result['images_per_s']:.0f} images/s, {result['cpu_ms_per_image']:.2f} CPU ms/image, "
        f"{result['images']} images"
    )


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=2)
