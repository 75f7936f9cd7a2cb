"""Clusters of SLURM's batch jobs."""

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

SQUEUE_S = 4.0
"""Seconds that squeue may take."""
OUTPUT_OPTION = re.compile(r"(-o|--output)\b")


class Slurm(Manager):
    """`dask_jobqueue.SLURMCluster`: a scheduler in this process, and batch jobs with `processes` workers each."""

    needs_idle_shutdown = False
    hint = "the queue's limits may say no (cluster.queue, account, walltime, cores, memory)"

    def check(self) -> None:
        """Check that SLURM is installed here."""
        super().check()
        if shutil.which("sbatch") is None:
            raise ClusterError(
                "cluster=slurm: there is no sbatch here: type it on a login node of the cluster, or use cluster=remote "
                "with a scheduler that runs there"
            )

    def open(self) -> Any:
        """Start the cluster; have its batch jobs keep the messages of sbatch."""
        self.refusals: list[str] = []
        directives = list(self.arguments.get("job_extra_directives") or [])
        own_folder = self.arguments.get("log_directory") or dask.config.get("jobqueue.slurm.log-directory", None)
        own_output = own_folder or any(map(OUTPUT_OPTION.match, directives))
        self.output = "" if own_output or self.logs is None else f"{self.logs.absolute()}/slurm-%j.out"
        if self.logs is not None and self.output:
            self.logs.mkdir(parents=True, exist_ok=True)  # SLURM does not make it, and ends the job
            quoted = str(self.logs.absolute()).replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
            self.arguments["job_extra_directives"] = [*directives, f'--output="{quoted}/slurm-%j.out"']
        return super().open()

    def instantiate(self, target: str, arguments: Mapping[str, Any]) -> Any:
        """Call the class, with a class of batch jobs that keeps the messages of sbatch."""
        make = super().instantiate(target, {**arguments, "_partial_": True})
        with signals_kept():
            return make(job_cls=job_class_that_notes_refusals(get_object(target).job_cls, self.refusals))

    def refusal(self, cluster: Any) -> str:
        """Say why sbatch refused, once it has answered for all batch jobs."""
        if not self.refusals or len(cluster.workers) < len(cluster.worker_spec):
            return ""
        reasons = " / ".join(dict.fromkeys(self.refusals))
        return (
            f"sbatch refused {len(self.refusals)} batch job{'s' * (len(self.refusals) > 1)}: {reasons}. Each is asked "
            "for with cluster.queue, account, walltime, cores, memory and job_extra_directives; `sinfo` "
            "shows what there is"
        )

    def status(self, cluster: Any) -> str:
        """Say which state each batch job has in the queue."""
        jobs = [str(job.job_id) for job in cluster.workers.values() if getattr(job, "job_id", None)]
        if not jobs:
            return "sbatch has not taken any job yet"
        squeue = shutil.which("squeue") or "squeue"
        command = [squeue, "--noheader", f"--jobs={','.join(jobs)}", "--format=%i %T %R"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_S, check=False)
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        ended = sorted(set(jobs) - {line.split()[0] for line in lines})
        lines += [f"{job} is no longer in the queue" for job in ended]
        see = self.output.replace("%j", ended[0]) if ended and self.output else "the logs of these jobs"
        return f"squeue says: {', '.join(lines)}" + (f" (see {see})" if ended else "")


def job_class_that_notes_refusals(kind: Any, refusals: list[str]) -> Any:
    """Make a class of batch jobs that notes when sbatch refuses a job, and does not raise the error.

    Dask would print the error for each job, again and again, and go on waiting.

    Args:
        kind: class of batch jobs, a `dask_jobqueue.core.Job`.
        refusals: list to which the messages of sbatch are added.
    """
    from distributed.deploy.spec import ProcessInterface

    class BatchJob(kind):
        async def start(self) -> None:
            try:
                await super().start()
            except (OSError, RuntimeError, ValueError) as error:
                refusals.append(sbatch_message(str(error)))
                await ProcessInterface.start(self)

    return BatchJob


def sbatch_message(error: str) -> str:
    """Extract the message of sbatch from dask-jobqueue's error."""
    lines = error.rpartition("stderr:\n")[2].splitlines()
    messages = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in lines]
    return "; ".join(filter(None, messages)) or " ".join(error.split())
