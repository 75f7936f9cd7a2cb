"""Clusters of this machine's own processes."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from ddp_hydra.cluster.kinds.base import Manager
from ddp_hydra.console.signals import held_back
from ddp_hydra.errors import ClusterError


class Local(Manager):
    """`distributed.LocalCluster`: a scheduler in this process, and worker processes."""

    is_watched = False

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """Start it, so that only this process hears a Ctrl-C: Dask starts its workers from the thread of its loop."""
        from distributed.utils import LoopRunner

        with held_back():  # or the first of Dask's threads would start it, and hear of signals from then on
            resource_tracker.ensure_running()
        runner = LoopRunner()
        with held_back():
            runner.start()
        self.arguments["loop"] = runner.loop
        try:
            try:
                cluster = super().open()
            except KeyboardInterrupt:
                _abandon(runner.loop)
                raise
            with contextlib.ExitStack() as closing, cluster:
                try:
                    yield cluster
                finally:
                    closing.enter_context(_no_word_of_slow_workers())
        finally:
            runner.stop()

    def ask(self, cluster: Any) -> str:
        """Say which worker processes are not there."""
        dead = [name for name, nanny in cluster.workers.items() if getattr(nanny, "pid", 1) is None]
        return f"the processes of workers {', '.join(map(str, dead))} have ended" if dead else ""


class LocalCuda(Local):
    """`dask_cuda.LocalCUDACluster`: a worker for each GPU, which is its rank's cuda:0."""

    def check(self) -> None:
        """Look whether there are as many GPUs as workers."""
        there = len(visible) if (visible := self.visible()) is not None else gpus()
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
        """The GPUs that may be used, as given; None for all."""
        given = self.arguments.get("CUDA_VISIBLE_DEVICES")
        given = os.environ.get("CUDA_VISIBLE_DEVICES") if given is None else given
        if given is None:
            return None
        return [str(part).strip() for part in (given.split(",") if isinstance(given, str) else given) if str(part)]


def gpus() -> int:
    """How many GPUs the driver shows, without importing torch."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value


@contextlib.contextmanager
def _no_word_of_slow_workers() -> Iterator[None]:
    """Let nannies end workers that take long without a warning: the job is over, and nothing is lost."""
    logger = logging.getLogger("distributed.nanny")
    logger.addFilter(_is_news)
    try:
        yield
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Worker process still alive")


def _abandon(loop: Any) -> None:
    """End workers that are just being started; Dask itself, asked to close what is half there, fails at length."""
    from distributed.deploy.spec import SpecCluster

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for cluster in [cluster for cluster in SpecCluster._instances if cluster.loop is loop]:
            SpecCluster._instances.discard(cluster)  # Dask closes those that are in it when Python ends
            cluster._loop_runner.stop()
            for pid in filter(None, (getattr(worker, "pid", None) for worker in cluster._created)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    finally:
        logging.disable(before)
