"""Clusters that Ray places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ddp_hydra.cluster.kinds.base import Manager
from ddp_hydra.errors import ClusterError


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
        self.arguments["runtime_env"] = environment

    def check(self) -> None:
        super().check()
        if self.keep and self.arguments.get("address") is None:
            raise ClusterError(
                "cluster.keep=true: give the address of a Ray that stays: `ray start --head`, cluster.address=auto"
            )

    def open(self) -> Any:
        self.arguments["keep"] = self.keep
        return super().open()

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
