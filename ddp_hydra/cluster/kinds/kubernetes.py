"""Clusters of pods, made by the Dask operator."""

from __future__ import annotations

import re
import secrets
from typing import Any

from ddp_hydra.cluster.connection import user_name
from ddp_hydra.cluster.kinds.base import Manager

WORKER = ["dask", "worker", "--nthreads", "1", "--memory-limit", "0"]
SPEC = ("name", "image", "resources", "env", "worker_command", "idle_timeout", "jupyter", "scheduler_service_type")
"""Arguments of KubeCluster that belong to the resource."""


class Kubernetes(Manager):
    """`dask_kubernetes.operator.KubeCluster`: with `name`, it uses the running cluster of this name, if there is one.

    Its template starts the commands `dask-worker` and `dask-scheduler`, which distributed removed in 2026.6. So the
    resource is made here, from the same template, with `dask worker` and `dask scheduler`.
    """

    # Kubernetes would start a scheduler that ends again. With cluster.idle_timeout, the operator deletes everything.
    needs_idle_shutdown = False
    hint = "is the Dask operator installed there, and does `kubectl get daskclusters` work from here?"

    def open(self) -> Any:
        """Create the resource, or connect to the existing one of this name."""
        given = {"n_workers": self.expected, **self.arguments}
        given["name"] = given.get("name") or _unique_name()
        given.setdefault("quiet", True)
        given.setdefault("shutdown_on_close", None)  # means: True for a new one, False for an existing one
        if given.get("custom_cluster_spec") is None:
            given["custom_cluster_spec"] = cluster_spec(n_workers=self.expected, **_spec_arguments(given))
        return self.instantiate(self.target, given)

    def scale(self, cluster: Any, workers: int) -> None:
        """Ask for more workers if the existing cluster has fewer."""
        if self.n_workers is not None and self.n_workers > (cluster.n_workers or 0):
            cluster.scale(self.n_workers)

    def status(self, cluster: Any) -> str:
        """Say in which phase each pod is, and what its containers wait for."""
        return f"its pods: {cluster.sync(_describe_pods, cluster.name, cluster.namespace)}"


def cluster_spec(name: str, n_workers: int, worker_command: Any = None, **native: Any) -> dict[str, Any]:
    """Make the `DaskCluster` resource that KubeCluster would make, with commands that exist.

    Args:
        name: of the cluster.
        n_workers: number of pods; each has one worker.
        worker_command: a list of words, or one string.
        native: image, resources, env, idle_timeout, jupyter, scheduler_service_type, as in KubeCluster.
    """
    from dask_kubernetes.operator import make_cluster_spec

    spec = make_cluster_spec(name, n_workers=n_workers, worker_command=worker_command or WORKER, **native)
    for container in spec["spec"]["scheduler"]["spec"]["containers"]:
        if container["args"][:1] == ["dask-scheduler"]:
            container["args"][:1] = ["dask", "scheduler"]
    return _without_nulls(spec)


def _without_nulls(value: Any) -> Any:
    """Remove None values: the schema of the operator allows no null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _spec_arguments(given: dict[str, Any]) -> dict[str, Any]:
    chosen = {key: given[key] for key in SPEC if given.get(key) is not None}
    # Users write numbers, as in `nvidia.com/gpu: 1` and `DEBUG: 1`; the operator takes only text.
    if isinstance(chosen.get("env"), dict):
        chosen["env"] = _as_text(chosen["env"])
    if "resources" in chosen:
        chosen["resources"] = {kind: _as_text(amounts) for kind, amounts in chosen["resources"].items()}
    return chosen


def _as_text(values: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _unique_name() -> str:
    user = re.sub(r"[^a-z0-9]+", "-", user_name().lower()).strip("-") or "nobody"
    return f"ddp-hydra-{user[:20]}-{secrets.token_hex(4)}"


async def _describe_pods(cluster: str, namespace: str) -> str:
    import kr8s

    found = []
    async for pod in kr8s.asyncio.get("pods", namespace=namespace, label_selector=f"dask.org/cluster-name={cluster}"):
        states = [status.get("state", {}) for status in pod.status.get("containerStatuses", [])]
        reasons = [state["waiting"].get("reason", "") for state in states if "waiting" in state]
        conditions = pod.status.get("conditions", [])
        reasons += [one.get("message", "") for one in conditions if one.get("reason") == "Unschedulable"]
        found.append(f"{pod.name} {pod.status.phase}{''.join(f' ({reason})' for reason in reasons if reason)}")
    return ", ".join(found) or "none"
