"""Clusters of batch jobs."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from ddp_hydra.clusters.manager import Manager
from ddp_hydra.errors import ClusterError

ASK_S = 4.0


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
        return f"squeue says: {', '.join(lines)}" + (" (see the logs of these jobs)" if ended else "")
