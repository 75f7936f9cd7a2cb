"""Which jobs a sweep has: composed, with their folders and needs, and told apart from those of an earlier start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_hydra import cluster
from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep.rows import Row, State


@dataclass(frozen=True)
class Need:
    """What a job takes of a cluster.

    Args:
        cluster: its config, as canonical YAML; "" for none: the job is one process on this machine.
        ranks: how many workers; None for all.
    """

    cluster: str = ""
    ranks: int | None = None


@dataclass
class Planned:
    """A job that is to be run.

    Args:
        row: what is known of it.
        config: as Hydra composed it, with its own part.
        need: what it takes.
        folder: its run directory.
        is_ours: its config is one of ours, so the task dispatches a gang itself.
    """

    row: Row
    config: DictConfig
    need: Need
    folder: Path
    is_ours: bool

    @property
    def is_dry(self) -> bool:
        """Whether it is only checked."""
        return self.is_ours and bool(self.config.get("dry_run"))

    @property
    def task_config(self) -> DictConfig:
        """The config without Hydra's part."""
        return OmegaConf.masked_copy(self.config, [str(key) for key in self.config if key != "hydra"])


def compose(
    context: HydraContext, config: DictConfig, overrides: Sequence[str], own_need: Need, sweep_dir: Path, number: int
) -> Planned:
    """Compose one job.

    Args:
        context: Hydra's.
        config: of the sweep.
        overrides: of the job.
        own_need: of a task that is not one of ours.
        sweep_dir: where the sweep's folders are.
        number: of the job.
    """
    composed = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id, composed.hydra.job.num = str(number), number
        composed.hydra.sweep.dir = str(sweep_dir)
    with hydra_config_of(composed):
        subdir = str(composed.hydra.sweep.subdir)
        ours = is_ours(composed)
        need = _need(composed) if ours else own_need
    task_overrides = [str(override) for override in composed.hydra.overrides.task]
    return Planned(Row(number, task_overrides, subdir), composed, need, sweep_dir / subdir, ours)


@contextmanager
def hydra_config_of(config: DictConfig) -> Iterator[None]:
    """Let `${hydra:…}` mean a job's config inside the block."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


def is_ours(config: DictConfig) -> bool:
    """Whether a config is one of ours, so that its task dispatches a gang itself."""
    target = OmegaConf.select(config, "cluster._target_", throw_on_missing=False)
    return target is not None and "dispatch" in config and "trainer" in config


def _need(config: DictConfig) -> Need:
    if config.get("dry_run") or cluster.is_inline(config.cluster):
        return Need()
    return Need(OmegaConf.to_yaml(config.cluster, resolve=True, sort_keys=True), config.dispatch.ranks)


class Numbers:
    """Gives each job its number: the one that it had when the sweep was started before, else a new one.

    Args:
        earlier: the rows of the earlier start.
    """

    def __init__(self, earlier: Sequence[Row]) -> None:
        self.earlier = list(earlier)
        self.next = max((row.number for row in earlier), default=-1) + 1

    def of(self, overrides: Sequence[str], wanted: int) -> tuple[int, Row | None]:
        """Return a job's number and what is known of it.

        Args:
            overrides: of the task, which tell whether it is the same job.
            wanted: the number that Hydra would give it.
        """
        for row in self.earlier:
            if row.overrides == list(overrides):
                self.earlier.remove(row)
                return row.number, row
        number = max(wanted, self.next)
        self.next = number + 1
        return number, None


def refuse_foreign_folder(planned: Planned) -> None:
    """Don't write over what another job has left.

    Raises:
        ConfigError: the folder of a new job is not new.
    """
    saved = planned.folder / ".hydra" / "overrides.yaml"
    if saved.is_file():
        raise ConfigError(
            f"{planned.folder} holds the results of another job ({' '.join(map(str, OmegaConf.load(saved)))}), which "
            "would be written over: give another hydra.sweep.dir, or leave it out"
        )


def go_on(planned: Planned, earlier: Row) -> None:
    """Have an interrupted job of ours go on from its last checkpoint; one without begins again."""
    checkpoints = planned.folder / "checkpoints" / "manifest.json"
    if planned.is_ours and earlier.state != State.done and checkpoints.is_file():
        with open_dict(planned.config):
            planned.config.resume = str(planned.folder)


def groups(jobs: Sequence[Planned]) -> list[list[Planned]]:
    """Split jobs by the cluster they need, in the order in which the clusters are first needed."""
    by_cluster: dict[str, list[Planned]] = {}
    for job in jobs:
        by_cluster.setdefault(job.need.cluster, []).append(job)
    return list(by_cluster.values())


def own_need(ranks: int | None, config: Any) -> Need:
    """What the launcher's own settings ask for tasks of other apps: `hydra.launcher.ranks` and `.cluster`."""
    if ranks is None:
        return Need()
    settings = {"_target_": "distributed.LocalCluster", **(config or {})}
    settings.setdefault("n_workers", ranks)
    if settings["_target_"] == "distributed.LocalCluster":
        settings = {
            "threads_per_worker": 1,
            "host": "127.0.0.1",
            "dashboard_address": "127.0.0.1:0",
            "preload": "ddp_hydra.rank_host.preload",
            **settings,
        }
    return Need(OmegaConf.to_yaml(OmegaConf.create(settings), sort_keys=True), ranks)
