"""The launcher that Hydra calls to run the jobs of a sweep. Every Hydra app imports it, so it imports little."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ddp_hydra.console import signals
from ddp_hydra.errors import SweepFailed
from ddp_hydra.storage.files import new_folder, write_atomic

if TYPE_CHECKING:
    from ddp_hydra.sweep.sweep import Sweep


_open: list[GangLauncher] = []


def close_all() -> None:
    """Close all sweeps: Hydra does not tell a launcher when its sweep is over."""
    for launcher in list(_open):
        launcher.close()


def end_without_values(error: ValueError) -> None:
    """Say how the jobs of a search of Optuna have ended of which none has a value; in a dry run, none has to."""
    for launcher in _open:
        if not launcher.config.get("dry_run"):
            assert launcher.sweep is not None
            raise SweepFailed(f"no job has a finite value for Optuna: {launcher.sweep.closing_line}") from None
    if not _open:
        raise error


class GangLauncher(Launcher):
    """Runs each composed config as a job on Dask.

    Args:
        resume: folder of an earlier sweep to resume; None for `hydra.sweep.dir`.
        settings: see `settings.SweepSettings`.

    Attributes:
        labels: what a sweeper of ours says of each job of the next batch; the tables show it.
    """

    def __init__(self, resume: str | None = None, **settings: Any) -> None:
        self.resume, self.settings = resume, settings
        self.sweep: Sweep | None = None
        self.labels: list[dict[str, str]] = []
        self.is_kept = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Start the sweep, or resume an earlier one. Called by Hydra before the first batch."""
        from ddp_hydra.config.limits import check_known
        from ddp_hydra.sweep import search_space
        from ddp_hydra.sweep.planned_job import is_ours
        from ddp_hydra.sweep.queue import CachingConfigLoader
        from ddp_hydra.sweep.settings import SweepSettings, check_storage
        from ddp_hydra.sweep.sweep import Sweep

        check_known("hydra.launcher", self.settings, ["resume", *SweepSettings.__annotations__])
        signals.leave_tidily()
        loader = CachingConfigLoader(hydra_context.config_loader)
        hydra_context.config_loader = loader  # type: ignore[assignment]
        self.config = config
        setup_globals()
        ours, settings = is_ours(config), SweepSettings(**self.settings)
        settings.check(ours)
        check_storage(config)
        if ours:  # a sweep of another app may have no jobs, as in Hydra
            search_space.check(config, hydra_context.config_loader)
        dry = ours and config.get("dry_run")
        folder = Path(str(self.resume or config.hydra.sweep.dir)).absolute() / ("dry_run" if dry else "")
        # As usual with Hydra, other apps overwrite what is in the folder, unless they are told to resume.
        is_resumed = not dry and (self.resume is not None or ours)
        with new_folder(folder):  # before Hydra writes its multirun.yaml, and tells no name if that fails
            self.sweep = Sweep(folder, settings, hydra_context, loader, task_function, config, is_resumed)
        _open.append(self)
        atexit.unregister(close_all)
        atexit.register(close_all)  # registered last, so that it runs before multiprocessing waits for its children

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Return one result per job, in order; reading the value of a failed one raises its error. Called by Hydra."""
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        assert self.sweep is not None, "setup comes first"
        try:
            self._keep_words()
            labels, self.labels = self.labels, []
            return self.sweep.run(job_overrides, initial_job_idx, labels)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        sweep, self.sweep = self.sweep, None
        if sweep is not None:
            _open.remove(self)
            sweep.close()
            self._hide_secrets()  # a batch that Hydra refuses is never launched

    def _keep_words(self) -> None:
        """Write multirun.yaml, by which the sweep goes on, for sweepers that do not, such as Optuna's."""
        from ddp_hydra.config.references import saved_text
        from ddp_hydra.sweep.planned_job import is_ours

        self._hide_secrets()
        if self.is_kept or not is_ours(self.config) or self.config.get("dry_run"):
            return
        assert self.sweep is not None
        self.is_kept = True
        write_atomic(self.sweep.folder / "multirun.yaml", saved_text(self.config).encode(), durable=False)

    def _hide_secrets(self) -> None:
        from ddp_hydra.config.redact import rewrite
        from ddp_hydra.sweep.planned_job import is_ours

        if is_ours(self.config):
            rewrite(Path(str(self.config.hydra.sweep.dir)) / "multirun.yaml")
