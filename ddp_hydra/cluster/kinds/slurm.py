"""Clusters of batch jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import dask
from hydra.utils import get_object

from ddp_hydra.cluster.kinds.base import Manager, signals_kept
from ddp_hydra.errors import ClusterError

ASK_S = 4.0
OUTPUT = re.compile(r"(-o|--output)\b")


class Slurm(Manager):
    """`dask_jobqueue.SLURMCluster`: a scheduler in this process, and batch jobs with `processes` workers each."""

    is_watched = False
    look_at = "the queue's limits may say no (cluster.queue, account, walltime, cores, memory)"

    def check(self) -> None:
        """Look for SLURM."""
        super().check()
        if shutil.which("sbatch") is None:
            raise ClusterError(
                "cluster=slurm: there is no sbatch here: type it on a login node of the cluster, or use cluster=remote "
                "with a scheduler that runs there"
            )

    def open(self) -> Any:
        """Start it, with batch jobs that remember what sbatch said."""
        self.refusals: list[str] = []
        directives = list(self.arguments.get("job_extra_directives") or [])
        own_folder = self.arguments.get("log_directory") or dask.config.get("jobqueue.slurm.log-directory", None)
        own_output = own_folder or any(map(OUTPUT.match, directives))
        self.output = "" if own_output or self.logs is None else f"{self.logs.absolute()}/slurm-%j.out"
        if self.logs is not None and self.output:
            self.logs.mkdir(parents=True, exist_ok=True)  # SLURM makes none, and ends the job
            quoted = str(self.logs.absolute()).replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
            self.arguments["job_extra_directives"] = [*directives, f'--output="{quoted}/slurm-%j.out"']
        return super().open()

    def call(self, target: str, arguments: Mapping[str, Any]) -> Any:
        """Call the class, with a class of batch jobs that note what sbatch said."""
        make = super().call(target, {**arguments, "_partial_": True})
        with signals_kept():
            return make(job_cls=noting_refusals(get_object(target).job_cls, self.refusals))

    def refused(self, cluster: Any) -> str:
        """Say what sbatch said, once it has answered for all batch jobs."""
        if not self.refusals or len(cluster.workers) < len(cluster.worker_spec):
            return ""
        said = " / ".join(dict.fromkeys(self.refusals))
        return (
            f"sbatch refused {len(self.refusals)} batch job{'s' * (len(self.refusals) > 1)}: {said}. Each is asked for "
            "with cluster.queue, account, walltime, cores, memory and job_extra_directives; `sinfo` shows what there is"
        )

    def ask(self, cluster: Any) -> str:
        """Say where the batch jobs are in the queue."""
        jobs = [str(job.job_id) for job in cluster.workers.values() if getattr(job, "job_id", None)]
        if not jobs:
            return "sbatch has not taken any job yet"
        squeue = shutil.which("squeue") or "squeue"
        command = [squeue, "--noheader", f"--jobs={','.join(jobs)}", "--format=%i %T %R"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
        lines = [line.strip() for line in told.stdout.splitlines() if line.strip()]
        ended = sorted(set(jobs) - {line.split()[0] for line in lines})
        lines += [f"{job} is no more in the queue" for job in ended]
        see = self.output.replace("%j", ended[0]) if ended and self.output else "the logs of these jobs"
        return f"squeue says: {', '.join(lines)}" + (f" (see {see})" if ended else "")


def noting_refusals(kind: Any, refusals: list[str]) -> Any:
    """Make a class of batch jobs of which one that sbatch refuses is noted, and not raised.

    Dask would print the error once for each job and each look at it, and wait on.

    Args:
        kind: of batch jobs; a `dask_jobqueue.core.Job`.
        refusals: gets what sbatch said.
    """
    from distributed.deploy.spec import ProcessInterface

    class BatchJob(kind):
        async def start(self) -> None:
            try:
                await super().start()
            except (OSError, RuntimeError, ValueError) as error:
                refusals.append(words(str(error)))
                await ProcessInterface.start(self)

    return BatchJob


def words(error: str) -> str:
    """Take out what sbatch said from dask-jobqueue's report of it."""
    lines = error.rpartition("stderr:\n")[2].splitlines()
    said = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in lines]
    return "; ".join(filter(None, said)) or " ".join(error.split())
