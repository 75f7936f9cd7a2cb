"""A Dask cluster whose scheduler and workers are actors of Ray. Imported only for `cluster=ray`, and on Ray's nodes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import dask
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ddp_hydra.rank.processes import die_with_parent

NAMESPACE = "ddp_hydra"
START_S = 60.0
"""Seconds that the scheduler may take to start."""
STORE_BYTES = 80 * 2**20
"""Ray's object store, where Ray is started here: nothing of ours goes through it."""
LOOPBACK = "127.0.0.1"


class RayCluster:
    """Starts a Dask cluster on Ray, or connects to one that was kept.

    Args:
        n_workers: number of workers.
        address: of Ray: "auto" for the one that this machine belongs to, ray://host:10001; None: start one here.
        name: of a kept cluster to use; None: start one.
        cpus_per_worker: that Ray reserves.
        gpus_per_worker: that Ray reserves; the worker sees only these.
        resources: further resources of Ray for each worker, by name.
        strategy: of Ray's placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.
        runtime_env: of the actors, see Ray.
        keep: the cluster can outlive this process.

    Attributes:
        shutdown_on_close: whether `close` ends it; one that was found is left as it is.
    """

    def __init__(
        self,
        n_workers: int = 2,
        address: str | None = None,
        name: str | None = None,
        cpus_per_worker: float = 1,
        gpus_per_worker: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        runtime_env: Mapping[str, Any] | None = None,
        keep: bool = False,
    ) -> None:
        self.shutdown_on_close = name is None
        self.name = name or f"ddp-hydra-{secrets.token_hex(4)}"
        self.runtime_env = dict(runtime_env or {})
        self.n_workers = n_workers
        self.bundle = {"CPU": cpus_per_worker, "GPU": gpus_per_worker, **(resources or {})}
        self.bundle = {kind: amount for kind, amount in self.bundle.items() if amount}
        self.workers: list[Any] = []
        self.scheduler: Any = None
        self.group: Any = None
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(connected(address, math.ceil(cpus_per_worker * n_workers)))
        try:
            if name is None:
                self._start(strategy, "detached" if keep else None)
            else:
                self._find()
        except BaseException:
            self.close()  # Ray keeps what is detached
            raise

    def _start(self, strategy: str, lifetime: str | None) -> None:
        """Start the scheduler on this node, and ask for the workers, which come when Ray has room for them."""
        common: dict[str, Any] = {"namespace": NAMESPACE, "lifetime": lifetime, "runtime_env": self.runtime_env}
        config = dask.config.serialize(dask.config.global_config)
        actor = ray.remote(DaskProcess)
        self.group = ray.util.placement_group([self.bundle] * self.n_workers, strategy, self.name, lifetime)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        scheduler = actor.options(name=f"{self.name}-scheduler", num_cpus=0, scheduling_strategy=here, **common)
        self.scheduler = scheduler.remote(["scheduler", "--port", "0", "--no-dashboard"], config, self.name)
        self._address()
        amounts = dict(self.bundle)
        common |= {"num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0), "resources": amounts}
        command = ["worker", self.scheduler_address, "--nthreads", "1", "--memory-limit", "0", "--no-dashboard"]
        for number in range(self.n_workers):
            place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)
            name = f"{self.name}-worker-{number}"
            worker = actor.options(name=name, scheduling_strategy=place, max_restarts=-1, **common)
            self.workers.append(worker.remote([*command, "--name", name], config))

    def _find(self) -> None:
        self.scheduler = ray.get_actor(f"{self.name}-scheduler", NAMESPACE)
        self.group = ray.util.get_placement_group(self.name)
        for number in range(len(self.group.bundle_specs)):
            with contextlib.suppress(ValueError):  # it is being started again
                self.workers.append(ray.get_actor(f"{self.name}-worker-{number}", NAMESPACE))
        self._address()

    def _address(self) -> None:
        self.scheduler_address: str = ray.get(self.scheduler.address.remote(START_S), timeout=2 * START_S)

    def get_client(self) -> Any:
        from distributed import Client

        return Client(self.scheduler_address)

    def describe(self) -> str:
        state = ray.util.placement_group_table(self.group)["state"]
        wanted = " ".join(f"{kind}={amount:g}" for kind, amount in self.bundle.items())
        total, free = ray.cluster_resources(), ray.available_resources()
        there = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind} free" for kind in self.bundle)
        return f"Ray's placement group of {self.n_workers} x {{{wanted}}} is {state}; Ray has {there}"

    def close(self) -> None:
        if self.shutdown_on_close:
            for actor in (*self.workers, self.scheduler):
                with contextlib.suppress(Exception):  # it has ended already
                    ray.kill(actor, no_restart=True)
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self.group)
        self.stack.close()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def connected(address: str | None, cpus: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"address": address}
        if address is None:
            # It sends no statistics, and refuses clients that do not know its token: it listens on all interfaces.
            token = secrets.token_hex(32)
            stack.enter_context(environment({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": token}))
            # Paths of sockets must be short, and the folder is of this user alone.
            folder = TemporaryDirectory(prefix="ddp_hydra-ray-", dir="/tmp", ignore_cleanup_errors=True)
            options = {
                "address": "local",
                "num_cpus": max(os.cpu_count() or 1, cpus),
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "_node_ip_address": LOOPBACK,
                "_temp_dir": stack.enter_context(folder),
            }
        stack.callback(ray.shutdown)
        ray.init(**options, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        yield


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the block; at its end, all of Ray's are as they were, for Ray sets some itself."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(before)


POLL_S = 0.02


class DaskProcess:
    """Runs `dask scheduler` or `dask worker` as a child of an actor; each ends with the other.

    If the child is killed or fails, the actor fails, and Ray starts it again, on another node if need be. If the child
    ends by itself, as it does when the scheduler closes the cluster, the actor ends for good.

    Args:
        command: the words after `dask`.
        config: of Dask, serialized.
        group: the placement group that is given back when the child ends; "" for none.
    """

    def __init__(self, command: list[str], config: str, group: str = "") -> None:
        self.group, self.found = group, ""
        words = [*command, "--host", own_address()]
        if command[0] == "scheduler":
            self.folder = Path(mkdtemp(prefix="ddp_hydra-ray-"))
            words += ["--scheduler-file", str(self.folder / "address")]
        parent = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dask", *words],
            env={**os.environ, "DASK_INTERNAL_INHERIT_CONFIG": config},
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
        threading.Thread(target=self._end_with_child, daemon=True).start()

    def address(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while not self.found:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"`dask scheduler` gave no address (exit code {self.process.poll()})")
            with contextlib.suppress(OSError, ValueError):  # not there, or not whole
                self.found = str(json.loads((self.folder / "address").read_text())["address"])
                shutil.rmtree(self.folder)  # at once, because Ray kills actors
            time.sleep(POLL_S)
        return self.found

    def _end_with_child(self) -> None:
        import ray

        code = self.process.wait()
        if self.group:
            with contextlib.suppress(Exception):  # it is gone already
                ray.util.remove_placement_group(ray.util.get_placement_group(self.group))
        if code == 0:
            with contextlib.suppress(Exception):
                itself: Any = ray.get_runtime_context().current_actor
                ray.kill(itself, no_restart=True)
                time.sleep(5)
        os._exit(1)


def own_address() -> str:
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)
