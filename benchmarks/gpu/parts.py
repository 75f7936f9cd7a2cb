"""Lists the parts of the report, runs them one after the other, and keeps going when one fails."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks import commands, report
from benchmarks.gpu import failures, feed, first, memory, numbers, parallel, speed, store
from benchmarks.gpu.bench import Bench, Broken, Missing, last_line
from benchmarks.report import Absent, Figure, Goal, Line


@dataclass(frozen=True)
class Part:
    """Names a part.

    Args:
        name: as `--only` takes it.
        run: yields its lines.
        gpus: how many GPUs it needs, because without them there is nothing to measure.
    """

    name: str
    run: Callable[[Bench], Iterator[Line]]
    gpus: int = 0

    @property
    def about(self) -> str:
        """The first line of its docstring."""
        return (self.run.__doc__ or "").strip().splitlines()[0]


def gpu_tests(bench: Bench) -> Iterator[Figure]:
    """Run the tests that carry the marker `gpu`."""
    try:
        import pytest  # noqa: F401
    except ModuleNotFoundError:
        raise Missing("needs pytest: pip install 'ddp-hydra[test]'") from None
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files_with_gpu_tests()]
    done = subprocess.run(
        command, cwd=commands.ROOT, env=commands.with_ours({}), capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise Broken(f"pytest -m gpu ended with code {done.returncode}: {last_line(done.stdout)}")
    found = outcomes(done.stdout)
    yield report.value("tests of the marker gpu that fail", found["failed"] + found["error"], Goal(0, at_most=True))
    yield report.value("tests of the marker gpu that pass", found["passed"], Goal(1))


def files_with_gpu_tests() -> list[str]:
    """Return the files of tests that name the marker; the others may import what is not installed here."""
    files = sorted((commands.ROOT / "tests").rglob("test_*.py"))
    return [str(path) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


def outcomes(output: str) -> dict[str, int]:
    """Read the last line of pytest: "1 failed, 3 passed, 2 deselected in 4.2s"."""
    words = output.strip().splitlines()[-1].replace(",", " ").split() if output.strip() else []
    found = dict.fromkeys(("passed", "failed", "error"), 0)
    for number, word in pairwise(words):
        if number.isdigit() and word.rstrip("s") in found:
            found[word.rstrip("s")] += int(number)
    return found


PARTS = (
    Part("demo", first.demo),
    Part("ranks", first.ranks),
    Part("memory", speed.memory),
    Part("speed", speed.speed),
    Part("store", store.store),
    Part("feed", feed.feed),
    Part("fp16", numbers.fp16),
    Part("resume", numbers.resume),
    Part("graphs", numbers.graphs, gpus=1),
    Part("data-parallel", parallel.data_parallel),
    Part("sync-batchnorm", parallel.sync_batchnorm, gpus=1),
    Part("freeze", parallel.freeze),
    Part("hooks", parallel.hooks),
    Part("dask-cuda", first.dask_cuda),
    Part("full", memory.full),
    Part("given-back", memory.given_back, gpus=1),
    Part("server", memory.server_files),
    Part("waits", memory.waits, gpus=1),
    Part("faults", failures.faults),
    Part("interrupt", failures.interrupt),
    Part("nccl", failures.nccl, gpus=2),
    Part("tests", gpu_tests, gpus=1),
)


def measure(bench: Bench, parts: Sequence[Part]) -> Iterator[tuple[Part, list[Line]]]:
    """Run parts, and yield each with its lines; what fails is a line, too."""
    for part in parts:
        begin = time.monotonic()
        yield part, lines(bench, part)
        report.progress(f"-- {part.name}: {time.monotonic() - begin:.0f} s")


def lines(bench: Bench, part: Part) -> list[Line]:
    """Run one part."""
    if bench.card.gpus < part.gpus:
        return [Absent(part.name, "needs a GPU" if part.gpus == 1 else f"needs {part.gpus} GPUs")]
    found: list[Line] = []
    try:
        for line in part.run(bench):
            found.append(line)
            report.progress(f"{part.name}: {line.name}")
    except Missing as why:
        found.append(Absent(part.name, str(why)))
    except Exception as error:  # the other parts are worth having
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
        found.append(Absent(part.name, f"{kind}{first_line}"[:300], failed=True))
    return found
