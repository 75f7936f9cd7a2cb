"""Reads the changes of a run's config that are typed behind `evaluate` and `predict`: groups and keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ddp_hydra.cli import overrides
from ddp_hydra.cli.compose import compose
from ddp_hydra.config import checkpoint_config, redact
from ddp_hydra.config.schema import DispatchConfig, ResultsConfig, TrainerConfig
from ddp_hydra.errors import ConfigError
from ddp_hydra.job.inference import Inference, on_ranks
from ddp_hydra.storage.run_ref import RunRef

OF_THE_COMMAND = ("cluster", "dispatch", "results")
"""Groups that choose where the command computes; the others are for the ranks."""
GROUPS = ("data", "metrics", "task", "loss", "model", "trainer", "cluster", "dispatch", "faults")
"""Groups that the command line may replace."""
_SCHEMAS = {"dispatch": DispatchConfig, "results": ResultsConfig, "trainer": TrainerConfig}


def inference(run: str, checkpoint: Path, split: str, words: Sequence[str]) -> Inference:
    """Return what is to be computed, and where.

    The ranks change the config that is in the checkpoint. The cluster is that of the run, which only its run directory
    tells; a checkpoint alone gets that of the project's config.

    Args:
        run: as typed.
        checkpoint: its file, here.
        split: "val" or "train".
        words: groups and keys that are typed. Those of a group that is chosen anew belong to the new one.

    Raises:
        ConfigError: there is no such key, or a value is missing.
    """
    words = overrides.with_faults(list(words))
    faults = [word for word in words if _key(word) == "faults"]
    words = [word for word in words if word not in faults]
    saved = saved_config(run)
    of_cluster = {_key(word) for word in words if _key(word).partition(".")[0] == "cluster"}
    if saved and of_cluster and "cluster" not in of_cluster and is_processless(saved):
        words = ["cluster=local", *words]  # the keys that are typed belong to a cluster
    chosen = [_key(word) for word in words if "." not in _key(word)]
    parts = {} if saved else dict.fromkeys((*OF_THE_COMMAND, "trainer"))
    composed = [word for word in words if _key(word).partition(".")[0] in {*chosen, *parts}]
    fresh = compose(composed) if chosen or saved is None else None
    changes = [word for word in words if word not in composed or _key(word).partition(".")[0] not in chosen]
    groups = {name: OmegaConf.to_container(fresh[name], enum_to_str=True) for name in chosen} if fresh else {}
    if saved is None:
        assert fresh is not None
        cfg = fresh
    else:
        cfg = checkpoint_config.changed(saved, changes, groups)
    for name, schema in _SCHEMAS.items():
        cfg = checkpoint_config.changed(cfg, groups={name: OmegaConf.merge(OmegaConf.structured(schema), cfg[name])})
    for secret in redact.hidden(OmegaConf.to_container(cfg.cluster), "cluster."):
        raise ConfigError(f"{secret} looks like a secret, so the run does not keep it: give {secret}=<value>")
    named = any(_key(word).partition(".")[0] in ("cluster", "dispatch") for word in words)
    return Inference(
        on_ranks(cfg, named),
        checkpoint,
        [word for word in changes if _key(word).partition(".")[0] not in OF_THE_COMMAND],
        {name: node for name, node in groups.items() if name not in OF_THE_COMMAND},
        split,
        tuple(OmegaConf.from_dotlist(faults).faults) if faults else (),
    )


def is_processless(saved: dict[str, Any]) -> bool:
    """Return whether a run had no cluster of its own: it was in one process, or its ranks were started by torchrun."""
    return str((saved.get("cluster") or {}).get("_target_")).rpartition(".")[2] in ("Inline", "Torchrun")


def saved_config(run: str) -> dict[str, Any] | None:
    """Return the config in a run's directory, as composed; None for a checkpoint without one."""
    content = ""
    with suppress(FileNotFoundError, NotADirectoryError, ConnectionError):
        content = RunRef.of(run).read(".hydra/config.yaml").decode()
    found = OmegaConf.to_container(OmegaConf.create(content)) if content else None
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) and found else None


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
