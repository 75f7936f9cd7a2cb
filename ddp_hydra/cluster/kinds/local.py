"""Clusters on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from ddp_hydra.cluster.connection import without_messages
from ddp_hydra.cluster.kinds.base import Manager
from ddp_hydra.console.signals import held_back
from ddp_hydra.errors import ClusterError
from ddp_hydra.rank import gpus


class Local(Manager):
    """`distributed.LocalCluster`: a scheduler in this process, and workers in threads of it or in processes."""

    needs_idle_shutdown = False

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """Start the cluster from a thread in which signals are blocked, so that only this process receives Ctrl-C."""
        from distributed.utils import LoopRunner

        with held_back():  # otherwise one of Dask's threads starts it, and it receives signals
            resource_tracker.ensure_running()
        runner = LoopRunner()
        with held_back():
            runner.start()
        self.arguments["loop"] = runner.loop
        if not self.arguments.get("processes", True):
            # Addresses of workers in one process are made up, unless a protocol is given; ranks need a real host.
            protocol = "tls://" if self.arguments.get("security") else "tcp://"
            self.arguments.setdefault("protocol", protocol)
        try:
            try:
                cluster = super().open()
            except KeyboardInterrupt:
                _kill_starting_workers(runner.loop)
                raise
            with contextlib.ExitStack() as closing, cluster:
                try:
                    yield cluster
                finally:
                    # Nannies kill slow workers without a warning: the job is over, and nothing is lost.
                    closing.enter_context(without_messages("distributed.nanny", "Worker process still alive"))
        finally:
            runner.stop()

    def status(self, cluster: Any) -> str:
        """Say which worker processes have ended."""
        dead = [name for name, nanny in cluster.workers.items() if getattr(nanny, "pid", 1) is None]
        return f"the processes of workers {', '.join(map(str, dead))} have ended" if dead else ""


class LocalCuda(Local):
    """`dask_cuda.LocalCUDACluster`: one worker for each GPU; the GPU is cuda:0 of its rank."""

    def check(self) -> None:
        """Check that there are as many GPUs as workers."""
        if isinstance(given := self.arguments.get("CUDA_VISIBLE_DEVICES"), int):  # Hydra makes a number of 1
            self.arguments["CUDA_VISIBLE_DEVICES"] = [given]
        there = len(visible) if (visible := self.visible()) is not None else gpus.count()
        if not there:
            raise ClusterError(
                "cluster=local_cuda needs a GPU of NVIDIA's, and there is none here that its driver shows: look at "
                "nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the CPU with cluster=local"
            )
        if self.n_workers is not None and self.n_workers > there:
            raise ClusterError(
                f"cluster.n_workers={self.n_workers}, but there are {there} GPUs here, and each worker has one: give "
                f"cluster.n_workers={there} or less, or null for all"
            )
        super().check()
        self.n_workers = self.n_workers or there

    def visible(self) -> list[str] | None:
        """Return the GPUs that may be used, as the user gave them; None for all."""
        given = self.arguments.get("CUDA_VISIBLE_DEVICES")
        given = os.environ.get("CUDA_VISIBLE_DEVICES") if given is None else given
        if given is None:
            return None
        return gpus.visible({"CUDA_VISIBLE_DEVICES": given if isinstance(given, str) else ",".join(map(str, given))})


def _kill_starting_workers(loop: Any) -> None:
    """Kill workers that are just being started. Dask itself fails slowly when it closes a half-started cluster."""
    from distributed.deploy.spec import SpecCluster

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for cluster in [cluster for cluster in SpecCluster._instances if cluster.loop is loop]:
            SpecCluster._instances.discard(cluster)  # Dask closes what is in it when Python ends
            cluster._loop_runner.stop()
            for pid in filter(None, (getattr(worker, "pid", None) for worker in cluster._created)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    finally:
        logging.disable(before)
