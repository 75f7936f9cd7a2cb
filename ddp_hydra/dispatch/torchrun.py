"""Runs as one of several ranks that torchrun, or another launcher with the same variables, has started.

Each process composes the same command line. Rank 0 runs the job and makes its run directory. The others make no folder,
and run the config that they have composed themselves, which has to be the same.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from ddp_hydra.errors import ClusterError, ConfigError
from ddp_hydra.rank.spec import RankSpec

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NO_FOLDER = ("hydra.run.dir=.", "hydra.output_subdir=null")
"""Overrides with which Hydra writes no files."""


class Torchrun:
    """`cluster=torchrun`: no cluster; this process is one of the ranks."""


def is_wanted(cfg: DictConfig) -> bool:
    """Return whether a cluster's config is that of `cluster=torchrun`."""
    return bool(cfg.get("_target_") == f"{Torchrun.__module__}.{Torchrun.__qualname__}")


def is_here() -> bool:
    """Return whether a launcher has started this process as a rank."""
    return all(name in os.environ for name in NEEDED)


def arguments(given: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra in this process.

    Args:
        given: as typed.

    Raises:
        ConfigError: it is a sweep.
    """
    if not is_here():
        return list(given)
    if {"-m", "--multirun"} & set(given):
        raise ConfigError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} that torchrun has started, but a sweep "
            "starts its jobs itself: type python -m ddp_hydra -m …, with cluster=local or another Dask cluster"
        )
    return [*given, *NO_FOLDER] if os.environ["RANK"] != "0" else list(given)


def place(cfg: DictConfig) -> RankSpec | None:
    """Return this process's place among the started ranks; None if the job starts its ranks itself.

    Args:
        cfg: of the cluster.

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
    except ValueError as error:
        raise ConfigError(f"{', '.join(NEEDED[:3])} in the environment must be whole numbers: {error}") from None
    check(cfg, world_size)
    return RankSpec(rank, world_size, local_rank, local_world_size, node_rank, "", socket.gethostname())


def check(cfg: DictConfig, world_size: int) -> None:
    """Check the keys that every cluster has against what the launcher has started.

    Args:
        cfg: of the cluster.
        world_size: number of ranks.

    Raises:
        ConfigError: they do not fit.
        ClusterError: this rank lacks something of `cluster.pip`.
    """
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
