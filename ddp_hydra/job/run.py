"""One config -> one finished run directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ddp_hydra.cluster import connect
from ddp_hydra.config import checkpoint_config
from ddp_hydra.config import schema as configs
from ddp_hydra.console.signals import held_back
from ddp_hydra.dispatch import inline, torchrun
from ddp_hydra.errors import Interrupted
from ddp_hydra.job import run_dir as run_dirs
from ddp_hydra.job.checks import check, packed_project
from ddp_hydra.job.local import Job, RemoteContext
from ddp_hydra.job.resume import find_resume, find_weights
from ddp_hydra.job.summary import closing_lines, read_value, shown_path, summarised, why_stopped
from ddp_hydra.results import Record, finite


def run(
    cfg: DictConfig, run_dir: Path, overrides: Sequence[str] = (), remote: RemoteContext | None = None
) -> float | None:
    """Train one job.

    Args:
        cfg: the composed config.
        run_dir: where its results go.
        overrides: what it was composed with, for TensorBoard's HParams tab.
        remote: where it was typed elsewhere.

    Returns:
        The objective's last value, for sweepers.

    Raises:
        DdpHydraError: the config can't be a job, no cluster came up, or the gang failed.
        Interrupted: the job was asked to end, or its time was up; its state is saved.
    """
    if cfg.dry_run:
        check(cfg)
        plain = configs.plain(cfg)
        packed_project(cfg, plain)
        _dry_run(plain)
        return None
    with run_dirs.locked(run_dir):
        if remote is None:
            run_dirs.refuse_another(run_dir, cfg.resume)
        print(f"ddp_hydra  ->  {remote.url if remote else shown_path(run_dir)}", flush=True)  # noqa: T201
        if cfg.results.handler is configs.Handler.cluster:
            connect.load()
            from ddp_hydra.job.remote import client

            return client.run(cfg, run_dir, overrides)
        return train(cfg, run_dir, overrides, remote)


def train(cfg: DictConfig, run_dir: Path, overrides: Sequence[str], remote: RemoteContext | None) -> float | None:
    """Train a job whose results are written by this process; see `run`."""
    where = remote.url if remote else shown_path(run_dir)
    with summarised(run_dir, cfg, where) as summary, ExitStack() as stack:
        check(cfg)
        with held_back():
            from ddp_hydra.writers import hparams  # a config that is refused need not wait for TensorBoard

        stack.enter_context(hparams.session(run_dir, overrides))
        plain = remote.plain if remote else configs.plain(cfg)
        kept = remote.kept if remote else checkpoint_config.of(cfg)
        files = {"resume": find_resume(cfg, run_dir)} if cfg.resume else {}
        if (weights := find_weights(cfg)) is not None:
            files["weights"], plain["model"]["weights"], kept["model"]["weights"] = weights, None, None
        packed = remote.project if remote else packed_project(cfg, plain)
        summary["project"] = packed.sha256
        if cfg.trainer.profile_steps:
            summary["profile"] = "profile/table.md"
        job = Job(run_dir, cfg, plain, files, summary, remote, kept)
        spec = torchrun.place(cfg.cluster)
        here = spec is not None or connect.is_inline(cfg.cluster)
        value = read_value(job.run_here(spec or inline.ALONE) if here else job.run_on_dask(packed))
        summary |= {**value, "metrics": finite(value["metrics"])}
        if value["interrupted"]:
            raise Interrupted(f"{why_stopped(value['interrupted'], value['steps'])}: go on with resume={where}")
        summary["status"] = "done"
    print(closing_lines(summary, where))  # noqa: T201
    return value["metrics"].get(plain["objective"]["metric"])


def _dry_run(plain: dict[str, Any]) -> None:
    """Build model and data and make one step, in this process."""

    def show(record: Record) -> None:
        for line in record.data.get("lines", ()):
            print(line)  # noqa: T201

    inline.run("ddp_hydra.training.dry_run:dry_run", plain, on_record=show)
