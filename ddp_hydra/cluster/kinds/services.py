"""Clusters that a service starts: a queue of batch jobs, Kubernetes, dask-gateway, Saturn Cloud, Ray."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask
from hydra.utils import get_object
from omegaconf import DictConfig

from ddp_hydra.cluster.connection import Scheduler, user_name
from ddp_hydra.cluster.kinds import Manager, signals_kept
from ddp_hydra.errors import ClusterError

SQUEUE_S = 4.0
"""Seconds that squeue may take."""
OUTPUT_OPTION = re.compile(r"(-o|--output)\b")


class Slurm(Manager):
    """`dask_jobqueue.SLURMCluster`: a scheduler in this process, and batch jobs with `processes` workers each."""

    needs_idle_shutdown = False
    hint = "the queue's limits may say no (cluster.queue, account, walltime, cores, memory)"

    def check(self) -> None:
        super().check()
        if shutil.which("sbatch") is None:
            raise ClusterError(
                "cluster=slurm: there is no sbatch here: type it on a login node, or give cluster=remote"
            )

    def open(self) -> Any:
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
        make = super().instantiate(target, {**arguments, "_partial_": True})
        with signals_kept():
            return make(job_cls=job_class_that_notes_refusals(get_object(target).job_cls, self.refusals))

    def refusal(self, cluster: Any) -> str:
        if not self.refusals or len(cluster.workers) < len(cluster.worker_spec):
            return ""
        reasons, jobs = " / ".join(dict.fromkeys(self.refusals)), f"job{'s' * (len(self.refusals) > 1)}"
        advice = "look at cluster.queue, account, walltime, cores, memory and job_extra_directives, and at `sinfo`"
        return f"sbatch refused {len(self.refusals)} batch {jobs}: {reasons}: {advice}"

    def status(self, cluster: Any) -> str:
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
    lines = error.rpartition("stderr:\n")[2].splitlines()
    messages = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in lines]
    return "; ".join(filter(None, messages)) or " ".join(error.split())


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
        given = {"n_workers": self.expected, **self.arguments}
        user = re.sub(r"[^a-z0-9]+", "-", user_name().lower()).strip("-") or "nobody"
        given["name"] = given.get("name") or f"ddp-hydra-{user[:20]}-{secrets.token_hex(4)}"
        given.setdefault("quiet", True)
        given.setdefault("shutdown_on_close", None)  # means: True for a new one, False for an existing one
        if given.get("custom_cluster_spec") is None:
            given["custom_cluster_spec"] = cluster_spec(n_workers=self.expected, **_spec_arguments(given))
        return self.instantiate(self.target, given)

    def scale(self, cluster: Any, workers: int) -> None:
        if self.n_workers is not None and self.n_workers > (cluster.n_workers or 0):
            cluster.scale(self.n_workers)

    def status(self, cluster: Any) -> str:
        return f"its pods: {cluster.sync(_describe_pods, cluster.name, cluster.namespace)}"


def cluster_spec(name: str, n_workers: int, worker_command: Any = None, **native: Any) -> dict[str, Any]:
    """Make the `DaskCluster` resource that KubeCluster would make, with commands that exist."""
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


CONNECTION = ("address", "proxy_address", "public_address", "auth")
"""Arguments for the connection to the gateway; all others are options of the cluster."""
QUESTION = "Is cluster.address the gateway's, and are you let in (cluster.auth, or gateway.auth in Dask's config)?"


class Gateway(Manager):
    """`dask_gateway.GatewayCluster`: the client reaches only the scheduler, through a TLS proxy.

    `cluster.name` chooses a cluster that runs already.
    """

    hint = "the logs of the gateway's server say more"

    def open(self) -> Any:
        name = self.arguments.get("name")
        if name is None:
            self.arguments.pop("name", None)
            return super().open()
        connection = {key: value for key, value in self.arguments.items() if key in CONNECTION}
        arguments = {"cluster_name": name, "shutdown_on_close": False, **connection}
        return self.instantiate(f"{self.target}.from_name", arguments)

    def scale(self, cluster: Any, workers: int) -> None:
        """Ask for more workers, never for fewer: others may use them."""
        if self.n_workers is not None and self.n_workers > workers:
            cluster.scale(self.n_workers)

    def explain(self, error: BaseException) -> str:
        kind, name = type(error).__name__, self.arguments.get("name")
        if kind == "GatewayClusterError" or name is None:
            advice = "" if kind.startswith("Gateway") else f". {QUESTION}"
        else:
            advice = f". Does cluster.name={name} still run? Without it, a new one is started"
        return f"{super().explain(error)}{advice}"

    def status(self, cluster: Any) -> str:
        return f"the gateway says that {cluster.name} is {cluster.gateway.get_cluster(cluster.name).status.name}"


class Saturn(Manager):
    """`dask_saturn.SaturnCluster`: starts the one cluster of a resource, or uses it if it runs."""

    hint = "its page in Saturn Cloud may say more"

    def check(self) -> None:
        super().check()
        missing = [name for name in ("SATURN_BASE_URL", "SATURN_TOKEN") if not os.environ.get(name)]
        if missing:
            raise ClusterError(
                f"cluster=saturn: set {' and '.join(missing)}, as Saturn Cloud shows them (Connect Externally)"
            )

    def client(self, cluster: Any) -> Any:
        """Connect by the address: the class was written for an older Dask, and clients use attributes that it lacks."""
        return Scheduler(cluster.scheduler_address, cluster.security).client()

    def scale(self, cluster: Any, workers: int) -> None:
        if self.n_workers is not None and 0 < workers < self.n_workers:
            cluster.scale(self.n_workers)

    def reuse_with(self, cluster: Any) -> str:
        """Return what to type: the resource alone identifies the cluster."""
        return "cluster=saturn"

    def status(self, cluster: Any) -> str:
        return f"Saturn Cloud says that the cluster {cluster.name} is {cluster.status}"


class Ray(Manager):
    """`ddp_hydra.cluster.kinds.ray_cluster.RayCluster`. Ray installs `cluster.pip` for the workers."""

    required_packages = ("ray",)
    can_keep = True  # the actors can be detached
    hint = "does `ray status` list the nodes, and is ddp-hydra installed on them?"

    def __init__(self, cfg: DictConfig, logs: Path | None = None) -> None:
        super().__init__(cfg, logs)
        environment = dict(self.arguments.get("runtime_env") or {})
        if cfg.get("pip") and self.arguments.get("address"):
            environment.setdefault("pip", list(cfg.pip))
        self.arguments |= {"runtime_env": environment, "keep": self.keep}

    def check(self) -> None:
        super().check()
        if self.keep and self.arguments.get("address") is None:
            raise ClusterError(
                "cluster.keep=true: give the address of a Ray that stays: `ray start --head`, cluster.address=auto"
            )

    def explain(self, error: BaseException) -> str:
        name = self.arguments.get("name")
        if name is not None and isinstance(error, ValueError):
            return f"no cluster of the name {name} runs on this Ray: leave out cluster.name={name} to start one"
        if type(error).__name__ == "RuntimeEnvSetupError":  # it ends with the cause, after stacks of Ray's own
            cause = str(error).strip().splitlines()[-1]
            return f"Ray could not install cluster.pip or set up cluster.runtime_env on a node: {cause}"
        return super().explain(error)

    def reuse_with(self, cluster: Any) -> str:
        return f"cluster=ray cluster.address={self.arguments['address']} cluster.name={cluster.name}"

    def status(self, cluster: Any) -> str:
        return str(cluster.describe())
