"""The commands evaluate and predict: a trained model on its own data, or on other data.

`ddp-hydra evaluate run=<run>` counts each sample once; `ddp-hydra predict run=<run>` writes what the model says.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from ddp_hydra.cli.commands import parse
from ddp_hydra.cli.compose import compose, with_faults
from ddp_hydra.cli.resumed import (
    environment_of,
    hydra_of,
    saved_config,
    tell_environment,
    with_sources,
    without_variables,
)
from ddp_hydra.cli.words import key_of
from ddp_hydra.config import checkpoint_config, redact
from ddp_hydra.config.schema import SCHEMAS
from ddp_hydra.console.text import expanded
from ddp_hydra.errors import ConfigError, Interrupted
from ddp_hydra.job import predictions
from ddp_hydra.job.inference import EVALUATE, PREDICT, InferenceJob, on_ranks
from ddp_hydra.job.predictions import PLAN, Parts
from ddp_hydra.storage.files import new_folder
from ddp_hydra.storage.manifest import state_file
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.writers.run_dir import locked

EVALUATE_USAGE = """ddp-hydra evaluate run=<run directory, its URL, or checkpoint> [which=best|last] [split=val|train]
    [trust=true] [data=<group> and other groups and keys of the run's config …]
    [cluster=… cluster.n_workers=… dispatch.…=…] [hydra.job.env_set.<name>=<value>]"""


@dataclass
class EvaluateOptions:
    """The options of this command; see `evaluate`."""

    run: str = MISSING
    which: str = "best"
    split: str = "val"
    trust: bool = False


def evaluate_and_print(words: Sequence[str]) -> None:
    options, changes = parse(EvaluateOptions, with_faults(list(words)), EVALUATE_USAGE, GROUPS)
    found = evaluate(**vars(options), changes=changes)
    samples = "" if found["samples"] is None else f", {found['samples']:,} samples"
    print(f"{found['checkpoint']} (step {found['step']}){samples}")  # noqa: T201
    for name, value in found["metrics"].items():
        print(f"{name} {value:.6f}")  # noqa: T201
    for name, rows in found["matrices"].items():
        print(f"{name} {rows}")  # noqa: T201


def evaluate(
    run: str, which: str = "best", split: str = "val", changes: Sequence[str] = (), trust: bool = False
) -> dict[str, Any]:
    changes, typed = without_variables(changes)
    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder, environment_of(run, trust, typed) as environment:
        checkpoint = RunRef.named(run).checkpoint(which, Path(folder))
        found = prepared_inference(run, checkpoint, split, changes, trust, environment).run(EVALUATE)
        if RunRef.named(run).is_stored:  # the file is a download, which is removed
            return {**found, "checkpoint": f"{run.rstrip('/')}, {checkpoint.name}"}
        place = expanded(run)
        is_run = place.is_dir() and place.name != checkpoint.name
        shown = place / "checkpoints" / checkpoint.name if is_run else checkpoint
        return {**found, "checkpoint": str(shown)}


PREDICT_USAGE = """ddp-hydra predict run=<run directory, its URL, or checkpoint>
    [out=predictions.csv|.parquet|.npz|<folder>/] [which=best|last] [split=val|train] [targets=false] [overwrite=true]
    [trust=true] [data=<group> and other groups and keys of the run's config …]
    [cluster=… cluster.n_workers=… dispatch.…=…] [hydra.job.env_set.<name>=<value>]"""


@dataclass
class PredictOptions:
    """The options of this command; see `predict`."""

    run: str = MISSING
    out: str = "predictions.csv"
    which: str = "best"
    split: str = "val"
    overwrite: bool = False
    targets: bool = True
    trust: bool = False


def predict_and_print(words: Sequence[str]) -> None:
    options, changes = parse(PredictOptions, with_faults(list(words)), PREDICT_USAGE, GROUPS)
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
    trust: bool = False,
) -> dict[str, Any]:
    changes, typed = without_variables(changes)
    target = expanded(out).absolute()
    kind = predictions.kind_of(target)
    is_empty = target.is_dir() and kind == "pictures" and not any(target.iterdir())
    if target.exists() and not is_empty and (target.is_dir() or not overwrite):
        instead = "another folder" if target.is_dir() else "overwrite=true, or another file"
        raise ConfigError(f"out={out} exists: give {instead}")
    folder = target.with_name(f"{target.name}.parts")
    predictions.check_folder(folder, out)
    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as download, environment_of(run, trust, typed) as environment:
        checkpoint = RunRef.named(run).checkpoint(which, Path(download))
        with new_folder(target.parent), locked(folder, "wait for it, or give another out="), parts_kept(folder):
            inference = prepared_inference(run, checkpoint, split, changes, trust, environment)
            parts = Parts(folder, {**plan(inference, kind), "targets": targets}, overwrite)
            try:
                found = inference.run(
                    PREDICT, lambda: {"kind": kind, "done": parts.done(), "targets": targets}, parts.receive
                )
            except KeyboardInterrupt as error:
                done = sum(map(parts.rows_of, parts.done()))
                of = f" of {parts.samples:,}" if parts.samples else ""
                so_far = f"{done:,}{of} samples are predicted: " if done or of else ""
                raise Interrupted(f"{str(error) or 'interrupted'}; {so_far}the same command goes on") from None
            assert parts.samples is not None
            columns = list(next(parts.merged(), {}))
            predictions.write(target, parts.merged, parts.samples)
            predictions.remove_parts_in(folder)
            return {**found, "out": str(out), "columns": columns}


@contextmanager
def parts_kept(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        if folder.is_dir() and not (folder / PLAN).exists():
            predictions.remove_parts_in(folder)


def plan(inference: InferenceJob, kind: str) -> dict[str, Any]:
    """Return what a prediction depends on; parts of others are not mixed with its own."""
    with state_file(inference.checkpoint).open("rb") as file:
        checkpoint = hashlib.file_digest(file, "sha256").hexdigest()
    changes = [inference.overrides, inference.groups, inference.split, inference.environment]
    return {
        "checkpoint": checkpoint,
        "changes": hashlib.sha256(json.dumps(changes, default=str).encode()).hexdigest(),
        "code": inference.check().sha256,
        "kind": kind,
    }


OF_THE_COMMAND = ("cluster", "dispatch", "results")
"""Groups that choose where the command computes; the others are for the ranks."""
GROUPS = ("data", "metrics", "task", "loss", "model", "trainer", "cluster", "dispatch", "faults")
"""Groups that the command line may replace."""


def prepared_inference(
    run: str,
    checkpoint: Path,
    split: str,
    words: Sequence[str],
    trust: bool = False,
    environment: Mapping[str, str] | None = None,
) -> InferenceJob:
    """Return what is to be computed, and where.

    The ranks change the config that is in the checkpoint. The run's cluster is used, which only its run directory
    tells; a checkpoint alone, or a run from a URL that is not trusted, gets the cluster of the project's config.

    Args:
        split: "val" or "train".
        words: groups and keys that are typed. Words of a group that is chosen anew belong to the new one.
        trust: use whatever the run's config names, also if it is a lone file or a URL.
        environment: variables that `environment_of` has set, for ranks elsewhere.
    """
    words = with_faults(list(words))
    faults = [word for word in words if key_of(word) == "faults"]
    words = [word for word in words if word not in faults]
    if of_hydra := [word for word in words if key_of(word).startswith(("hydra.", "hydra/"))]:
        raise ConfigError(f"{of_hydra[0]}: only a training has a folder and settings of Hydra: leave it out")
    trust = trust or RunRef.own(run).is_own
    saved = saved_config(run) if trust else None
    target = str((saved.get("cluster") or {}).get("_target_") if saved else "")
    typed = {key_of(word) for word in words if group_of(word) == "cluster"}
    if typed and "cluster" not in typed and target.endswith((".Inline", ".Torchrun")):
        words = ["cluster=local", *words]  # the keys that are typed belong to a cluster, and the run had none
    chosen = [group_of(word) for word in words if "." not in key_of(word)]
    composed = [word for word in words if group_of(word) in {*chosen, *(() if saved else (*OF_THE_COMMAND, "trainer"))}]
    if chosen and saved is not None:  # a group may be of a folder of configs that the run was given
        sources = {**hydra_of(run), "overrides": {}}  # `environment_of` has set its variables
        composed = with_sources(composed, sources, f"run={run}: the run")
    fresh = compose(composed) if chosen or saved is None else None
    changes = [word for word in words if word not in composed or group_of(word) not in chosen]
    groups = {name: OmegaConf.to_container(fresh[name], enum_to_str=True) for name in chosen} if fresh else {}
    if saved is None:
        assert fresh is not None
        cfg = fresh
    else:
        cfg = checkpoint_config.changed(saved, changes, groups)
        tell_environment(run, cfg)
    for name, schema in SCHEMAS.items():
        cfg = checkpoint_config.changed(cfg, groups={name: OmegaConf.merge(OmegaConf.structured(schema), cfg[name])})
    for secret in redact.hidden({"cluster": OmegaConf.to_container(cfg.cluster)}):
        raise ConfigError(f"{secret} looks like a secret, so the run does not keep it: give {secret}=<value>")
    return InferenceJob(
        on_ranks(cfg, any(group_of(word) in ("cluster", "dispatch") for word in words)),
        checkpoint,
        [word for word in changes if group_of(word) not in OF_THE_COMMAND],
        {name: node for name, node in groups.items() if name not in OF_THE_COMMAND},
        split,
        tuple(OmegaConf.from_dotlist(faults).faults) if faults else (),
        trust,
        dict(environment or {}),
    )


def group_of(word: str) -> str:
    return key_of(word).partition(".")[0]
