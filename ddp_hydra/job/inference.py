"""Runs the evaluation or prediction of a trained model: on a Dask cluster, or in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ddp_hydra.cluster import connect
from ddp_hydra.config import checkpoint_config, project, targets, validate
from ddp_hydra.console.signals import held_back
from ddp_hydra.dispatch import inline
from ddp_hydra.errors import ConfigError, Interrupted
from ddp_hydra.job.job_config import check_faults, gang_settings
from ddp_hydra.record import Record

EVALUATE = "ddp_hydra.training.inference:evaluate"
PREDICT = "ddp_hydra.training.inference:predict"
"""Functions that ranks run; names, because importing them here would import torch."""


@dataclass
class InferenceJob:
    """Computes something with a trained model; `overrides` and `groups` are changes of the checkpoint's config.

    Args:
        environment: variables of the run that its config or code may read.
    """

    cfg: DictConfig
    checkpoint: Path
    overrides: list[str]
    groups: dict[str, Any]
    split: str = "val"
    faults: tuple[str, ...] = ()
    trust: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    def check(self) -> project.Project:
        if self.split not in ("val", "train"):
            raise ConfigError(f"split={self.split}: give val or train")
        validate.check_numbers(self.cfg)
        roots = project.layers()
        targets.check(self.groups, roots, self.is_here or connect.is_local(self.cfg.cluster))
        return project.pack(*roots)

    @property
    def is_here(self) -> bool:
        return connect.is_inline(self.cfg.cluster) and not connect.has_existing()

    def run(
        self,
        fn: str,
        more: Callable[[], dict[str, Any]] = dict,
        receive: Callable[[Record, Callable[[Record, Path], None]], None] | None = None,
    ) -> dict[str, Any]:
        """Run `EVALUATE` or `PREDICT` on the ranks, and return what rank 0's call returns."""
        packed = self.check()
        if self.is_here:
            check_faults(self.cfg, self.faults, 1)
        own = {"overrides": self.overrides, "groups": self.groups, "split": self.split, "trust": self.trust}
        own["faults"] = list(self.faults)
        receive, run = receive or (lambda record, fetch: None), self.run_here if self.is_here else self.run_on_dask
        values = run(fn, lambda: own | more(), receive, packed)
        if reason := next((value["interrupted"] for value in values if value["interrupted"]), ""):
            raise Interrupted(f"stopped early ({reason})")
        return dict(values[0])

    def run_here(self, fn: str, arguments: Any, receive: Any, packed: project.Project) -> list[Any]:
        project.make_importable(project.layers())
        files, settings = {"checkpoint": str(self.checkpoint)}, gang_settings(self.cfg)
        return inline.run(
            fn, arguments(), on_record=lambda record: receive(record, inline.fetch), files=files, settings=settings
        )

    def run_on_dask(self, fn: str, arguments: Any, receive: Any, packed: project.Project) -> list[Any]:
        with held_back():
            from ddp_hydra.cluster import preflight

        pip = preflight.check_requirements(self.cfg.cluster.get("pip") or ())
        with connect.connect(self.cfg.cluster) as client:
            with held_back():
                from ddp_hydra.dispatch.call import Call
                from ddp_hydra.dispatch.gang import Gang

            settings = gang_settings(self.cfg, name="inference", pip=pip, variables=self.environment)
            gang = Gang(client, project=packed, settings=settings)

            def call(number: int, world_size: int) -> Call:
                if number == 0:
                    check_faults(self.cfg, self.faults, self.cfg.dispatch.ranks or world_size)
                return Call(fn, (arguments(),), files={"checkpoint": self.checkpoint})

            expected = connect.expected_workers(self.cfg.cluster)
            return gang.run_attempts(call, lambda record: receive(record, gang.fetch), expected=expected)


def on_ranks(cfg: DictConfig, named: bool) -> DictConfig:
    """Return the config with the place to compute; `named`: the user has named a cluster or a setting of it.

    A run on cluster=local is looked at in this process, which is quicker to start and has the same cores; so is a run
    of torchrun, whose processes are gone.
    """
    target = str(cfg.cluster.get("_target_")).rpartition(".")[2]
    if named or target not in ("LocalCluster", "Torchrun"):
        return cfg
    return checkpoint_config.changed(cfg, groups={"cluster": {"_target_": "ddp_hydra.cluster.kinds.Inline"}})
