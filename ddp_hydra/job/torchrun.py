"""Runs a job on the ranks that torchrun has started; each of their processes runs the same command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from ddp_hydra.config import schema
from ddp_hydra.dispatch import torchrun
from ddp_hydra.dispatch.restarts import repeated
from ddp_hydra.errors import ConfigError, DdpHydraError, Interrupted
from ddp_hydra.job.job_config import check, gang_settings, weights_path
from ddp_hydra.job.local import TRAIN
from ddp_hydra.job.summary import why_stopped
from ddp_hydra.rank import return_values
from ddp_hydra.rank.spec import GangSettings, RankSpec
from ddp_hydra.run_state import Summary
from ddp_hydra.writers.run_dir import read_summary

if TYPE_CHECKING:  # it imports Dask
    from ddp_hydra.dispatch.torchrun_gang import TorchrunGang


def torchrun_settings(cfg: DictConfig) -> GangSettings:
    """Return how the ranks work, and for how long they wait for each other."""
    wait_s = cfg.cluster.get("wait_timeout_s") or cfg.dispatch.timeout_s
    return gang_settings(cfg, name="job", start_timeout_s=wait_s)


@contextmanager
def started(cfg: DictConfig, run_dir: Path) -> Iterator[TorchrunGang | None]:
    """Start rank 0 below this process, if torchrun has started this; it imports torch while the job is prepared."""
    spec = torchrun.place(cfg.cluster)
    if spec is None:
        yield None
        return
    if spec.rank:
        raise ConfigError(
            f"this is rank {spec.rank} of {spec.world_size} that torchrun has started: from Python, cluster=torchrun "
            "runs nothing but rank 0; type torchrun ... -m ddp_hydra cluster=torchrun"
        )
    torchrun.check_job(cfg, spec)
    if torchrun.restart_count():
        refuse_restart(read_summary(run_dir) or Summary(), torchrun.restart_count())
    from ddp_hydra.dispatch.torchrun_gang import rank_0

    folder = str(run_dir.absolute())
    torchrun.remember(folder)
    with rank_0(spec, torchrun_settings(cfg), folder) as gang:
        yield gang


def refuse_restart(summary: Summary, restarts: int) -> None:
    """Refuse a job that torchrun has started again for nothing; it knows only that a process has failed."""
    if (reason := summary.interrupted) in ("time_limit", "callback"):
        raise Interrupted(f"{why_stopped(reason, summary.steps or 0)}: torchrun has started it again, but it is over")
    attempts = summary.attempts[-restarts:]
    if (why_not := repeated(attempts)) and (failure := attempts[-1].failure):
        raise DdpHydraError(f"rank {failure.rank} on {failure.host}: {failure.message}: {why_not}")


def run_other_rank(cfg: DictConfig, spec: RankSpec) -> None:
    """Run a rank other than 0; the process of rank 0 runs the job, and says why it failed."""
    if cfg.dry_run:
        return
    torchrun.check_job(cfg, spec)

    def call() -> bytes:
        check(cfg)
        config = schema.resolved(cfg)
        if weights_path(cfg) is not None:  # rank 0 reads them
            config["model"]["weights"] = None
        return return_values.encode([TRAIN, [config], {}])

    from ddp_hydra.dispatch.torchrun_gang import run_other_rank

    try:
        outcome = run_other_rank(spec, call, torchrun_settings(cfg))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
