"""Many jobs: what our Hydra launcher does for a sweep.

The jobs run one after the other on one warm cluster: it is brought up by the first job that wants it, and each
later gang starts in a fraction of a second. A sweep over `cluster.*` gets a cluster for each distinct value.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.utils import JobReturn


class SharedClusterLauncher(BasicLauncher):
    """Run a sweep's jobs in order, on clusters that stay up until its end."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run one batch of jobs.

        Args:
            job_overrides: the overrides of each job.
            initial_job_idx: number of the first.

        Returns:
            One result per job, in order; a failed one raises when its value is read.
        """
        from ddp_hydra import cluster

        with cluster.kept():
            return super().launch(job_overrides, initial_job_idx)
