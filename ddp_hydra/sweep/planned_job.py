"""Which jobs a sweep has: composed, with their folders and needs, and told apart from those of an earlier start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_hydra.cluster import connect as cluster
from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep import job_returns
from ddp_hydra.sweep.rows import Row, State

MOST_REMEMBERED = 256


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
class PlannedJob:
    """A job that is to be run.

    Args:
        row: what is known of it.
        overrides: of the job, those of Hydra's own part included.
        earlier: what was known of it when the sweep was started before.
        config: as Hydra composed it, with its own part; None until then.
        need: what it takes.
        folder: its run directory.
        is_ours: its config is one of ours, so the task dispatches a gang itself.
        result: what Hydra's sweeper gets; None while there is nothing.
        spent_s: how long the earlier parts took that it goes on from.
    """

    row: Row
    overrides: Sequence[str] = ()
    earlier: Row | None = None
    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}))
    need: Need = Need()
    folder: Path = Path()
    is_ours: bool = False
    result: JobReturn | None = None
    spent_s: float = 0.0

    @property
    def is_composed(self) -> bool:
        """Whether its config is there."""
        return "hydra" in self.config

    @property
    def is_dry(self) -> bool:
        """Whether it is only checked."""
        return self.is_ours and bool(self.config.get("dry_run"))

    @property
    def task_config(self) -> DictConfig | None:
        """The config without Hydra's part."""
        if not self.is_composed:
            return None
        return OmegaConf.masked_copy(self.config, [str(key) for key in self.config if key != "hydra"])

    def compose(self, loader: CachingConfigLoader, config: DictConfig, own_need: Need, sweep_dir: Path) -> None:
        """Compose its config, which takes Hydra some 0.2 s.

        Args:
            loader: Hydra's.
            config: of the sweep.
            own_need: of a task that is not one of ours.
            sweep_dir: where the sweep's folders are.
        """
        composed = loader.take(config, self.overrides)
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(self.row.number), self.row.number
            composed.hydra.sweep.dir = str(sweep_dir)
        with hydra_config_of(composed):
            self.row.folder = str(composed.hydra.sweep.subdir)
            self.is_ours = is_ours(composed)
            self.need = need_of(composed) if self.is_ours else own_need
        self.config, self.folder = composed, sweep_dir / self.row.folder

    def fail(self, error: Exception) -> None:
        """It cannot even be started."""
        self.row.state, self.row.message = State.failed, job_returns.first_line(str(error))
        self.result = job_returns.failed(self, error)


class CachingConfigLoader:
    """Hydra's config loader; what it composed for others can be taken.

    Sweepers compose each job to see whether they can, and leave the doing to launchers.

    Args:
        loader: Hydra's.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.composed: dict[tuple[str, ...], DictConfig] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose a job."""
        config = self.loader.load_sweep_config(master_config, sweep_overrides)
        if len(self.composed) < MOST_REMEMBERED:
            self.composed[tuple(sweep_overrides)] = config
        return config

    def take(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """A job's config, for him who asks alone: composed before, or now."""
        config = self.composed.pop(tuple(sweep_overrides), None)
        return config or self.loader.load_sweep_config(master_config, list(sweep_overrides))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def of_task(overrides: Sequence[str]) -> list[str]:
    """The overrides that are not of Hydra's own part: they tell whether two jobs are the same."""
    return [override for override in overrides if not override.lstrip("+~").startswith(("hydra.", "hydra/"))]


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


def need_of(config: DictConfig) -> Need:
    """What a job of ours takes."""
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


def refuse_foreign_folder(planned: PlannedJob) -> None:
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


def go_on(planned: PlannedJob) -> None:
    """Have an interrupted job of ours go on from its last checkpoint; one without begins again."""
    checkpoints = planned.folder / "checkpoints" / "manifest.json"
    if planned.is_ours and planned.earlier is not None and checkpoints.is_file():
        with open_dict(planned.config):
            planned.config.resume = str(planned.folder)
        planned.spent_s = planned.earlier.wall_s


def first_need(config: DictConfig) -> Need:
    """What the first job of a sweep is likely to take, before it is composed.

    Args:
        config: of the sweep, without what is swept.
    """
    with hydra_config_of(config):
        swept = [override for override in config.hydra.overrides.task if override.startswith("cluster")]
        return need_of(config) if is_ours(config) and not any("," in override for override in swept) else Need()


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
            "preload": "ddp_hydra.rank.dask_preload",
            **settings,
        }
    return Need(OmegaConf.to_yaml(OmegaConf.create(settings), sort_keys=True), ranks)
