"""One config -> one finished run directory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import ddp_hydra
from ddp_hydra import cluster, project
from ddp_hydra import config as configs
from ddp_hydra.errors import ConfigError, JobFailed
from ddp_hydra.manifest import find_checkpoint
from ddp_hydra.results import Record, finite
from ddp_hydra.writers import ResultsHandler, default_writers

TRAIN = "ddp_hydra.train:train"
"""By name: importing it here would import torch."""


def run(cfg: DictConfig, run_dir: Path) -> float | None:
    """Train one job.

    Args:
        cfg: the composed config.
        run_dir: where its results go.

    Returns:
        The objective's last value, for sweepers.

    Raises:
        DdpHydraError: the config can't be a job, no cluster came up, or the gang failed.
    """
    if cfg.dry_run:
        configs.check(cfg)
        _dry_run(configs.plain(cfg))
        return None
    with summarised(run_dir, cfg) as summary:
        configs.check(cfg)
        plain = configs.plain(cfg)
        files = {"resume": find_checkpoint(cfg.resume).absolute()} if cfg.resume else {}
        packed = project.pack(project.find())
        summary["project"] = packed.sha256
        job = Job(run_dir, cfg, summary)
        value = (
            job.run_inline(plain, files) if cluster.is_inline(cfg.cluster) else job.run_on_dask(plain, files, packed)
        )
        summary |= {"status": "done", **value, "metrics": finite(value["metrics"])}
    print(_closing_line(summary, run_dir))  # noqa: T201
    return value["metrics"].get(cfg.objective.metric)


class Job:
    """A job on its way: its writers, and the two ways to run it.

    Args:
        run_dir: where its results go.
        cfg: the composed config.
        summary: filled while it runs.
    """

    def __init__(self, run_dir: Path, cfg: DictConfig, summary: dict[str, Any]) -> None:
        self.run_dir, self.cfg, self.summary = run_dir, cfg, summary

    def handler(self, fetch: Any) -> ResultsHandler:
        """The consumer of this job's records."""
        return ResultsHandler(default_writers(self.run_dir, fetch, keep=self.cfg.results.keep_checkpoints))

    def run_inline(self, plain: dict[str, Any], files: dict[str, Path]) -> dict[str, Any]:
        """Run as one rank in this process."""
        from ddp_hydra import inline

        self.summary["world_size"] = 1
        with self.handler(lambda record, target: inline.fetch(record.data, target)) as handler:
            paths = {name: str(path) for name, path in files.items()}
            try:
                threads = self.cfg.trainer.threads
                return inline.run(TRAIN, plain, on_record=handler.handle, threads=threads, files=paths)[0]
            finally:
                self.note(handler)

    def run_on_dask(self, plain: dict[str, Any], files: dict[str, Path], packed: project.Project) -> dict[str, Any]:
        """Run as a gang on a Dask cluster."""
        with cluster.connect(self.cfg.cluster) as client:
            from ddp_hydra.dispatch import Gang

            gang = Gang(
                client,
                ranks=self.cfg.dispatch.ranks,
                name="job",
                backend=self.cfg.dispatch.backend.value,
                project=packed,
                threads=self.cfg.trainer.threads,
                timeout_s=self.cfg.dispatch.timeout_s,
                queue_timeout_s=self.cfg.dispatch.queue_timeout_s,
                start_timeout_s=self.cfg.dispatch.start_timeout_s,
                port_range=tuple(self.cfg.dispatch.port_range) if self.cfg.dispatch.port_range else None,
                files=files,
            )
            with self.handler(gang.fetch) as handler:
                gang.on_record = handler.handle
                try:
                    values = gang.run(TRAIN, plain)
                finally:
                    self.note(handler)
                    self.summary["world_size"] = gang.world_size
            return values[0]

    def note(self, handler: ResultsHandler) -> None:
        """Keep what is known so far, for the summary of a job that fails."""
        self.summary |= {
            "steps": handler.step,
            "samples": handler.samples,
            "metrics": finite(handler.metrics),
        }


@contextmanager
def summarised(run_dir: Path, cfg: DictConfig) -> Iterator[dict[str, Any]]:
    """Write summary.json at the end, however it comes."""
    begin = time.time()
    summary: dict[str, Any] = {"status": "failed", "tags": list(cfg.tags), "restarts": 0, "failure": None}
    try:
        yield summary
    except KeyboardInterrupt:
        summary["status"] = "interrupted"
        raise
    except JobFailed as error:
        summary["failure"] = error.failure.as_dict()
        raise
    except Exception as error:
        summary["failure"] = {"kind": type(error).__name__, "message": str(error)}
        raise
    finally:
        summary |= {"started": begin, "wall_s": time.time() - begin, "ddp_hydra": ddp_hydra.__version__}
        write_summary(run_dir, summary)


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write summary.json, whole or not at all."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        draft = run_dir / ".summary.json"
        draft.write_text(json.dumps(summary, indent=2, allow_nan=False, default=str) + "\n")
        draft.replace(run_dir / "summary.json")
    except OSError as error:
        raise ConfigError(
            f"the run directory {run_dir} can't be written ({error.strerror}): give another with hydra.run.dir=<folder>"
        ) from error


def _closing_line(summary: dict[str, Any], run_dir: Path) -> str:
    metrics = summary["metrics"]
    shown = [f"{name} {metrics[name]:.4g}" for name in ("train/loss", "val/loss", "val/accuracy") if name in metrics]
    speed = f"{summary['samples_per_s']:,.0f} samples/s"
    steps = f"{summary['steps']} steps in {summary['train_s']:.1f} s"
    return f"done: {steps}, {speed}, {', '.join(shown)}  ->  {_short(run_dir)}"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _dry_run(plain: dict[str, Any]) -> None:
    """Build model and data and read one batch, in this process."""
    from ddp_hydra import inline

    def show(record: Record) -> None:
        for line in record.data.get("lines", ()):
            print(line)  # noqa: T201

    inline.run("ddp_hydra.dry_run:dry_run", plain, on_record=show)
