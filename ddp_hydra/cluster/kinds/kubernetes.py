"""Clusters of pods, which the Dask operator makes."""

from __future__ import annotations

import getpass
import re
import secrets
from typing import Any

from ddp_hydra.cluster.kinds.base import Manager

WORKER = ["dask", "worker", "--nthreads", "1", "--memory-limit", "0"]
SPEC = ("name", "image", "resources", "env", "worker_command", "idle_timeout", "jupyter", "scheduler_service_type")
"""Arguments of KubeCluster that go into the resource."""


class Kubernetes(Manager):
    """`dask_kubernetes.operator.KubeCluster`: with `name`, one that runs already is used.

    Its templates start `dask-worker` and `dask-scheduler`, which distributed has no more since 2026.6; so the resource
    is made here, from the same template, with `dask worker` and `dask scheduler`.
    """

    is_watched = False  # a scheduler that ends is started again; cluster.idle_timeout has the operator delete it all
    look_at = "is the Dask operator installed there, and does `kubectl get daskclusters` work from here?"

    def open(self) -> Any:
        """Create the resource, or connect to the one of this name."""
        given = {"n_workers": self.expected, **self.arguments}
        given["name"] = given.get("name") or _unique()
        given.setdefault("quiet", True)
        given.setdefault("shutdown_on_close", None)  # true where it is created, false where it is found
        if given.get("custom_cluster_spec") is None:
            given["custom_cluster_spec"] = cluster_spec(n_workers=self.expected, **_of_spec(given))
        return self.call(self.target, given)

    def size(self, cluster: Any, workers: int) -> None:
        """Ask for more workers where it was found with fewer."""
        if self.n_workers is not None and self.n_workers > (cluster.n_workers or 0):
            cluster.scale(self.n_workers)

    def ask(self, cluster: Any) -> str:
        """Say in which phase the pods are, and what their containers wait for."""
        return f"its pods: {cluster.sync(_pods, cluster.name, cluster.namespace)}"


def cluster_spec(name: str, n_workers: int, worker_command: Any = None, **native: Any) -> dict[str, Any]:
    """Make the `DaskCluster` resource that KubeCluster would make, with commands that there are.

    Args:
        name: of the cluster.
        n_workers: pods with a worker each.
        worker_command: a list of words, or one string.
        native: image, resources, env, idle_timeout, jupyter, scheduler_service_type, as KubeCluster has them.
    """
    from dask_kubernetes.operator import make_cluster_spec

    spec = make_cluster_spec(name, n_workers=n_workers, worker_command=worker_command or WORKER, **native)
    for container in spec["spec"]["scheduler"]["spec"]["containers"]:
        if container["args"][:1] == ["dask-scheduler"]:
            container["args"][:1] = ["dask", "scheduler"]
    return _without_nulls(spec)


def _without_nulls(value: Any) -> Any:
    """Leave out what is not given: the operator's schema knows no null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _of_spec(given: dict[str, Any]) -> dict[str, Any]:
    chosen = {key: given[key] for key in SPEC if given.get(key) is not None}
    # `nvidia.com/gpu: 1` and `DEBUG: 1` are what one writes, and text is what the operator takes.
    if isinstance(chosen.get("env"), dict):
        chosen["env"] = _as_text(chosen["env"])
    if "resources" in chosen:
        chosen["resources"] = {kind: _as_text(amounts) for kind, amounts in chosen["resources"].items()}
    return chosen


def _as_text(values: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _unique() -> str:
    user = re.sub(r"[^a-z0-9]+", "-", getpass.getuser().lower()).strip("-") or "nobody"
    return f"ddp-hydra-{user[:20]}-{secrets.token_hex(4)}"


async def _pods(cluster: str, namespace: str) -> str:
    import kr8s

    said = []
    async for pod in kr8s.asyncio.get("pods", namespace=namespace, label_selector=f"dask.org/cluster-name={cluster}"):
        states = [status.get("state", {}) for status in pod.status.get("containerStatuses", [])]
        reasons = [state["waiting"].get("reason", "") for state in states if "waiting" in state]
        conditions = pod.status.get("conditions", [])
        reasons += [one.get("message", "") for one in conditions if one.get("reason") == "Unschedulable"]
        said.append(f"{pod.name} {pod.status.phase}{''.join(f' ({reason})' for reason in reasons if reason)}")
    return ", ".join(said) or "none"
