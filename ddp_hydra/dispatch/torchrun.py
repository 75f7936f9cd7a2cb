"""Runs as one of several ranks that torchrun, or another launcher with the same variables, has started.

Each process composes the same command line. Rank 0 runs the job and makes its run directory. The others make no folder,
and run the config that they have composed themselves, which has to be the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig

from ddp_hydra.config.schema import DispatchConfig, Handler
from ddp_hydra.errors import CheckpointError, ClusterError, ConfigError
from ddp_hydra.rank.spec import RankSpec
from ddp_hydra.storage.manifest import find_checkpoint

log = logging.getLogger(__name__)

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NO_FOLDER = ("hydra.run.dir=.", "hydra.output_subdir=null")
"""Overrides with which Hydra writes no files."""
KEYS = ("_target_", "n_workers", "wait_timeout_s", "keep", "pip")
INSTEAD = {
    "max_restarts": "torchrun starts the ranks again: give it --max-restarts",
    "min_ranks": "torchrun decides how many ranks there are: give it --nnodes 1:4",
    "ranks_per_worker": "torchrun decides how many ranks a host has: give it --nproc-per-node",
    "restart_wait_s": "torchrun waits for hosts: give it --rdzv-conf last_call_timeout=30",
    "queue_timeout_s": "there is no queue for workers",
    "start_timeout_s": "how long ranks wait for each other is cluster.wait_timeout_s",
    "port_range": "the ranks meet at MASTER_PORT: give torchrun --rdzv-endpoint",
    "keep_warm_s": "no process stays after torchrun",
}
"""Keys of `dispatch` that torchrun's jobs ignore, and what to use instead."""
MEMORY = "ddp_hydra-run_dir"


class Torchrun:
    """`cluster=torchrun`: no cluster; this process is one of the ranks."""


def is_wanted(cfg: DictConfig) -> bool:
    return bool(cfg.get("_target_") == f"{Torchrun.__module__}.{Torchrun.__qualname__}")


def is_here() -> bool:
    return all(name in os.environ for name in NEEDED)


def arguments(given: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra in this process.

    Raises:
        ConfigError: it is a sweep.
    """
    if not is_here():
        return list(given)
    if {"-m", "--multirun"} & set(given):
        raise ConfigError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} that torchrun has started, but a sweep "
            "starts its jobs itself: type ddp-hydra -m …, with cluster=local or another Dask cluster"
        )
    if os.environ["RANK"] != "0":
        return [*given, *NO_FOLDER]
    run_dir = remembered()
    if run_dir is None:
        return list(given)
    kept = [word for word in given if not word.startswith("hydra.run.dir=")]
    with contextlib.suppress(CheckpointError):
        find_checkpoint(run_dir)
        kept = [*(word for word in kept if not word.startswith("resume=")), f"resume={quoted(run_dir)}"]
    return [*kept, f"hydra.run.dir={quoted(run_dir)}"]


def quoted(path: Path) -> str:
    return QuotedString(str(path), Quote.single).with_quotes()


def restart_count() -> int:
    given = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(given) if given.isdecimal() else 0


def remember(run_dir: str) -> None:
    folder = memory()
    if folder is not None and run_dir and os.environ.get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError):  # then a restart begins anew
            folder.write_text(run_dir)


def remembered() -> Path | None:
    """Return the run directory of the ranks that torchrun had started before; None if these are the first."""
    file = memory()
    with contextlib.suppress(OSError, UnicodeError):
        if file is not None and (text := file.read_text()):
            return Path(text)
    return None


def memory() -> Path | None:
    """Return the file in which the run directory is noted; None without torchrun's agent."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # <folder of this torchrun>/attempt_<n>/<local rank>/error.json
    return Path(error_file).absolute().parents[2] / MEMORY if error_file and is_here() else None


def place(cfg: DictConfig) -> RankSpec | None:
    """Return this process's place among the started ranks; None if the job starts its ranks itself.

    Raises:
        ConfigError: config and environment do not fit together.
        ClusterError: this rank lacks something of `cluster.pip`.
    """
    typed = " ".join(word for word in sys.argv[1:] if word not in NO_FOLDER)
    if not is_wanted(cfg):
        if is_here():
            raise ConfigError(
                f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} that torchrun has started, but "
                f"cluster {cfg.get('_target_')} starts ranks itself: give cluster=torchrun, or type python -m "
                f"ddp_hydra {typed}"
            )
        return None
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"cluster=torchrun makes a rank of each process that torchrun starts, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set here: type torchrun --standalone --nproc-per-node 2 -m "
            f"ddp_hydra {typed}"
        )
    try:
        rank, world_size, local_rank = (int(os.environ[name]) for name in NEEDED[:3])
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        node_rank = int(os.environ.get("GROUP_RANK", 0))
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", -(-world_size // max(1, local_world_size))))
    except ValueError as error:
        raise ConfigError(f"{', '.join(NEEDED[:3])} in the environment must be whole numbers: {error}") from None
    check(cfg, world_size)
    host = socket.gethostname()
    return RankSpec(rank, world_size, local_rank, local_world_size, node_rank, f"rank {rank}", host, nodes)


def check(cfg: DictConfig, world_size: int) -> None:
    """Check the keys that every cluster has against what the launcher has started.

    Raises:
        ConfigError: they do not fit.
        ClusterError: this rank lacks something of `cluster.pip`.
    """
    if unknown := [str(key) for key in cfg if key not in KEYS]:
        raise ConfigError(
            f"cluster.{unknown[0]}: cluster=torchrun has no such key, because it starts no cluster; its keys are "
            f"{', '.join(KEYS[1:])}: leave it out"
        )
    if cfg.get("n_workers") not in (None, world_size):
        raise ConfigError(
            f"cluster.n_workers={cfg.n_workers}, but torchrun has started {world_size} ranks: give it "
            f"--nproc-per-node {cfg.n_workers}, or leave cluster.n_workers out"
        )
    if cfg.get("keep"):
        raise ConfigError("cluster.keep=true: cluster=torchrun has no cluster that could be kept: leave it out")
    if cfg.get("pip"):
        from ddp_hydra.cluster import preflight, worker_probe

        lacking = [lack for text in preflight.check_requirements(cfg.pip) for lack in worker_probe.missing(text)]
        if lacking:
            texts = ", ".join(f"{need} ({there})" for need, there in lacking)
            install = " ".join(f"'{need}'" for need, _ in lacking)
            host = socket.gethostname()
            raise ClusterError(
                f"cluster.pip asks for what host {host} lacks: {texts}: type there pip install {install}"
            )


def check_job(cfg: DictConfig, spec: RankSpec) -> None:
    """Refuse what needs a Dask cluster, and warn of keys that have no effect.

    Args:
        cfg: of the job.
        spec: the place of this rank; rank 0 warns.

    Raises:
        ConfigError: the job needs a Dask cluster.
    """
    if cfg.results.handler is Handler.cluster:
        raise ConfigError(
            "results.handler=cluster: with cluster=torchrun, the process of rank 0 writes the results; give "
            "hydra.run.dir=<folder> for a folder that its host reaches, or results.mirror=s3://bucket/folder for copies"
        )
    if cfg.dispatch.ranks not in (None, spec.world_size):
        raise ConfigError(
            f"dispatch.ranks={cfg.dispatch.ranks}, but torchrun has started {spec.world_size} ranks: leave it out"
        )
    usual = DispatchConfig()
    for key, instead in INSTEAD.items():
        value: Any = cfg.dispatch[key]
        if spec.rank == 0 and value != getattr(usual, key):
            log.warning("dispatch.%s=%s has no effect with cluster=torchrun: %s", key, value, instead)
