"""`ddp-hydra predict run=<run> out=predictions.csv`: predict a data set with a trained model, each sample once."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from ddp_hydra.cli import overrides, run_config
from ddp_hydra.cli.key_value import parse
from ddp_hydra.errors import ConfigError, Interrupted
from ddp_hydra.job import predictions
from ddp_hydra.job.inference import PREDICT, Inference
from ddp_hydra.job.predictions import PLAN, Parts
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.writers.run_dir import locked

USAGE = """ddp-hydra predict run=<run directory, its URL, or checkpoint> [out=predictions.csv|.parquet|.npz|<folder>/]
    [which=best|last] [split=val|train] [targets=false] [overwrite=true]
    [data=<group> and other groups and keys of the run's config …] [cluster=… cluster.n_workers=… dispatch.…=…]"""


@dataclass
class Options:
    """The options of this command; see `predict`."""

    run: str = MISSING
    out: str = "predictions.csv"
    which: str = "best"
    split: str = "val"
    overwrite: bool = False
    targets: bool = True


def main(words: Sequence[str]) -> None:
    """Predict, and print where the predictions are."""
    options, changes = parse(Options, overrides.with_faults(list(words)), USAGE, run_config.GROUPS)
    found = predict(**vars(options), changes=changes)
    print(f"{found['out']}: {found['samples']:,} samples, {', '.join(found['columns'])}")  # noqa: T201


def predict(
    run: str,
    out: str | Path = "predictions.csv",
    which: str = "best",
    split: str = "val",
    overwrite: bool = False,
    changes: Sequence[str] = (),
    targets: bool = True,
) -> dict[str, Any]:
    """Predict a data set, and return the file, the number of samples, and the columns.

    What arrives is kept in `<out>.parts` until all is there, so that the same call goes on after an interrupt.

    Args:
        run: run directory or checkpoint file, or the URL of a run.
        out: a .csv, .parquet or .npz file, or a folder of PNGs.
        which: the checkpoint of a run directory, "best" or "last".
        split: the data set of the config, "val" or "train".
        overwrite: replace `out`, and what an interrupted prediction with another config has left.
        changes: groups and keys of the run's config: "data=wids", "cluster.n_workers=4".
        targets: add what is true of samples that have labels, as `target`.

    Raises:
        Interrupted: it was interrupted; the same call goes on.
        DdpHydraError: there is no such run, a change does not fit, or it failed.
    """
    target = Path(out).expanduser().absolute()
    kind = predictions.kind_of(target)
    is_empty = target.is_dir() and kind == "pictures" and not any(target.iterdir())
    if target.exists() and not is_empty and (target.is_dir() or not overwrite):
        instead = "another folder" if target.is_dir() else "overwrite=true, or another file"
        raise ConfigError(f"out={out} exists: give {instead}")
    folder = target.with_name(f"{target.name}.parts")
    with (
        tempfile.TemporaryDirectory(prefix="ddp_hydra-") as download,
        locked(folder, "wait for it, or give another out="),
        parts_kept(folder),
    ):
        checkpoint = RunRef.of(run).checkpoint(which, Path(download))
        inference = run_config.inference(run, checkpoint, split, changes)
        parts = Parts(folder, {**plan(inference, kind), "targets": targets}, overwrite)
        try:
            found = inference.run(
                PREDICT, lambda: {"kind": kind, "done": parts.done(), "targets": targets}, parts.receive
            )
        except KeyboardInterrupt as error:
            done = sum(map(parts.rows_of, parts.done()))
            of = f" of {parts.samples:,}" if parts.samples else ""
            so_far = f"{done:,}{of} samples are predicted: " if done or of else ""
            raise Interrupted(f"{error or 'interrupted'}; {so_far}the same command goes on") from None
        columns = merge(parts, target)
        return {**found, "out": str(out), "columns": columns}


@contextmanager
def parts_kept(folder: Path) -> Iterator[None]:
    """Remove the folder of parts after the block if it holds none."""
    try:
        yield
    finally:
        if folder.is_dir() and not (folder / PLAN).exists():
            shutil.rmtree(folder)


def merge(parts: Parts, target: Path) -> list[str]:
    """Write the file from its parts, remove them, and return the columns."""
    columns: list[str] = []

    def chunks() -> Any:
        for chunk in parts.merged():
            columns[:] = columns or chunk
            yield chunk

    assert parts.samples is not None
    predictions.write(target, chunks(), parts.samples)
    parts.remove()
    return columns


def plan(inference: Inference, kind: str) -> dict[str, Any]:
    """Return what a prediction depends on; parts of others are not mixed with its own."""
    with inference.checkpoint.open("rb") as file:
        checkpoint = hashlib.file_digest(file, "sha256").hexdigest()
    changes = [inference.overrides, inference.groups, inference.split]
    return {
        "checkpoint": checkpoint,
        "changes": hashlib.sha256(json.dumps(changes, default=str).encode()).hexdigest(),
        "code": inference.check().sha256,
        "kind": kind,
    }
