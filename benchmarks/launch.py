"""Time to the first optimizer step: from the command, cold and again, and from the dispatch; compared with torchrun."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from benchmarks import commands, report
from benchmarks.report import Figure, Goal
from ddp_hydra.cluster import connect
from ddp_hydra.config import project, schema
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.dispatch import Gang
from ddp_hydra.job.run import TRAIN

RANKS = (2, 4)
SECOND_COMMAND = 2.8
"""Goal of torchrun / second command: 1.2 s on a machine where torchrun with 2 ranks takes 3.4 s."""
WARM = 3
"""Warm launches for each cold one: they take next to no time."""


def measure(repeats: int) -> Iterator[Figure]:
    """Launch ddp_hydra twice and torchrun in turn, then gangs on a cluster that is up."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        torchrun(2, Path(folder) / "stamp")  # brings torch into the page cache
        for ranks in RANKS:
            colds, seconds, theirs = [], [], []
            for turn in range(repeats):
                cold, second = two_commands(ranks, Path(folder) / f"{ranks}-{turn}")
                colds.append(cold)
                seconds.append(second)
                theirs.append(torchrun(ranks, Path(folder) / "stamp"))
                report.progress(
                    f"{ranks} ranks: ddp_hydra cold {cold:.2f} s, second command {second:.2f} s, "
                    f"torchrun {theirs[-1]:.2f} s"
                )
            gangs = list(warm(ranks, repeats * WARM, Path(folder) / "stamp"))
            report.progress(f"{ranks} ranks, warm: {', '.join(f'{one:.3f}' for one in gangs)} s")
            yield from compare(ranks, colds, seconds, theirs, gangs)


def compare(
    ranks: int, colds: list[float], seconds: list[float], theirs: list[float], gangs: list[float]
) -> Iterator[Figure]:
    """Return the figures of one number of ranks."""
    hand = report.times(f"torchrun, {ranks} ranks", theirs)
    cold = report.times(f"ddp_hydra cold, {ranks} ranks", colds)
    second = report.times(f"ddp_hydra second command, {ranks} ranks", seconds)
    warm = report.times(f"ddp_hydra warm, {ranks} ranks", gangs)
    yield from (hand, cold, second, warm)
    yield report.ratio(f"cold / torchrun, {ranks} ranks", cold, hand, Goal(1.3, at_most=True))
    yield report.ratio(f"torchrun / second command, {ranks} ranks", hand, second, Goal(SECOND_COMMAND))
    yield report.ratio(f"torchrun / warm, {ranks} ranks", hand, warm, Goal(40 if ranks == 2 else 25))


def overrides(ranks: int, stamp: Path) -> list[str]:
    """Return the overrides of the job: one step of a tiny model."""
    return [
        f"cluster.n_workers={ranks}",
        "data=bench",
        "model=mlp",
        "optimizer=stamped_sgd",
        f"optimizer.stamp={stamp}",
        "scheduler=none",
        "trainer.max_steps=1",
        "trainer.threads=1",
        "objective.metric=train/loss",
        "objective.direction=minimize",
    ]


def two_commands(ranks: int, run_dir: Path) -> tuple[float, float]:
    """Measure from `python -m ddp_hydra` to the first step: without a warm fork server, and again with it."""
    stamp = run_dir.with_suffix(".stamp")
    with commands.nobody_warm(keep_warm_s=60) as variables:
        took = []
        for name in ("cold", "second"):
            begin = commands.run(commands.job(*overrides(ranks, stamp), run_dir=run_dir / name), variables)
            took.append(since(begin, stamp))
        commands.run([sys.executable, "-m", "ddp_hydra", "warm", "stop"], variables)
    return took[0], took[1]


def torchrun(ranks: int, stamp: Path) -> float:
    """Measure from the command `torchrun` to the first step."""
    return since(commands.torchrun("torchrun_first_step.py", str(stamp), ranks=ranks), stamp)


def warm(ranks: int, n: int, stamp: Path, *more: str) -> Iterator[float]:
    """Measure from a dispatch to the first step, on a cluster that has run one gang before.

    Args:
        ranks: of each gang.
        n: how many gangs to start.
        stamp: a file for the time of the first step.
        more: overrides that come first.
    """
    schema.register()
    with initialize_config_dir(str(commands.ROOT / "conf"), **VERSION_BASE):
        cfg = compose("config", [commands.CONF, *more, *overrides(ranks, stamp)])
    plain: dict[str, Any] = schema.resolved(cfg)
    packed = project.pack(commands.ROOT)
    logging.getLogger(Gang.__module__).setLevel(logging.ERROR)  # it warns that the checkpoint is not fetched
    with connect.connect(cfg.cluster) as client:
        for turn in range(n + 1):
            begin = time.time()
            Gang(client, name="bench", project=packed, threads=1, on_record=lambda record: None).run(TRAIN, plain)
            if turn:
                yield since(begin, stamp)


def since(begin: float, stamp: Path) -> float:
    """Seconds from `begin` to the time in a stamp, which is removed."""
    end = float(stamp.read_text())
    stamp.unlink()
    return end - begin


if __name__ == "__main__":
    report.main(__doc__, measure, repeats=5)
