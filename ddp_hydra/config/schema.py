"""The keys that the framework itself reads, with their types, limits and defaults.

The comments in conf/ document each key. Groups that hold the arguments of a `_target_` (`cluster`, `data`, `model`,
`optimizer` …) stay free-form.
"""

from __future__ import annotations

import functools
import re
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from enum import EnumType, StrEnum
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from msgspec import Meta
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

import ddp_hydra.config.references  # noqa: F401 (it registers the resolver of conf/)
from ddp_hydra.config import hydra_compat, objective, redact
from ddp_hydra.config.limits import AtLeast0, AtLeast1, NonNegativeSeconds, PositiveSeconds, described
from ddp_hydra.errors import ConfigError

Precision = StrEnum("Precision", ["fp32", "tf32", "bf16", "fp16", "fp8"])
Device = StrEnum("Device", ["auto", "cpu", "cuda"])
Direction = StrEnum("Direction", ["maximize", "minimize"])
Backend = StrEnum("Backend", ["auto", "gloo", "nccl"])
OnNonFinite = StrEnum("OnNonFinite", ["abort", "skip", "rollback"])
CompileMode = StrEnum(
    "CompileMode",
    {
        "default": "default",
        "block": "block",
        "reduce_overhead": "reduce-overhead",
        "max_autotune": "max-autotune",
        "max_autotune_no_cudagraphs": "max-autotune-no-cudagraphs",
    },
)
Handler = StrEnum("Handler", ["client", "cluster"])


@dataclass
class TrainerConfig:
    """Sets the length, arithmetic and intervals of the training: see conf/trainer/default.yaml."""

    epochs: AtLeast1 | None = 5
    max_steps: AtLeast1 | None = None
    device: Device = Device.auto
    precision: Precision = Precision.fp32
    channels_last: bool | None = None
    compile: CompileMode | None = None
    gradient_accumulation_steps: AtLeast1 = 1
    clip_norm: Annotated[float, Meta(gt=0, description="a length, more than 0")] | None = None
    activation_checkpointing: list[str] = field(default_factory=list)
    freeze: list[str] = field(default_factory=list)
    decay_all: bool = True
    ema_decay: Annotated[float, Meta(gt=0, lt=1, description="a share between 0 and 1, e.g. 0.999")] | None = None
    threads: AtLeast0 = 0
    log_every_steps: AtLeast0 = 10
    log_every_s: PositiveSeconds | None = None
    log_growth: Annotated[float, Meta(ge=1, description="1 or more")] = 1.0
    show: list[str] | None = None
    validate_every_epochs: AtLeast0 = 1
    validate_every_steps: AtLeast0 = 0
    validate_first: bool = False
    checkpoint_every_steps: AtLeast0 = 0
    checkpoint_every_epochs: AtLeast0 = 1
    shard_above_gb: Annotated[float, Meta(ge=0, description="a size in GB, 0 or more")] | None = 4.0
    time_limit_s: PositiveSeconds | None = None
    pause_after_validations: AtLeast1 | None = None
    on_nonfinite: OnNonFinite = OnNonFinite.abort
    max_nonfinite: AtLeast1 = 10
    early_stopping_patience: AtLeast1 | None = None
    early_stopping_min_delta: float = 0.0
    profile_steps: AtLeast0 = 0
    overfit_batches: AtLeast0 = 0
    detect_anomaly: bool = False


@dataclass
class DispatchConfig:
    """Places, watches and restarts the gang: see conf/dispatch/default.yaml."""

    ranks: AtLeast1 | None = None
    ranks_per_worker: Any = "auto"
    backend: Backend = Backend.auto
    timeout_s: PositiveSeconds = 1800.0
    queue_timeout_s: PositiveSeconds = 86400.0
    start_timeout_s: PositiveSeconds = 300.0
    port_range: list[int] | None = None
    interface: str | None = None
    max_restarts: AtLeast0 = 3
    min_ranks: AtLeast1 | None = None
    restart_wait_s: NonNegativeSeconds = 60.0
    lost_timeout_s: PositiveSeconds = 15.0
    hang_timeout_s: PositiveSeconds = 300.0
    first_step_timeout_s: PositiveSeconds = 1800.0
    grace_s: NonNegativeSeconds = 300.0
    keep_warm_s: NonNegativeSeconds | None = None


@dataclass
class ResultsConfig:
    """Writes results: see conf/results/default.yaml, and conf/results/loggers for each logger."""

    handler: Handler = Handler.client
    root: str | None = None
    keep_checkpoints: AtLeast1 | None = 3
    keep_every: AtLeast1 | None = None
    retry_s: NonNegativeSeconds = 60.0
    mirror: str | None = None
    loggers: list[Any] = field(default_factory=list)
    loggers_timeout_s: NonNegativeSeconds = 30.0
    new_logger_runs: bool = False
    mlflow: Any = field(default_factory=dict)
    wandb: Any = field(default_factory=dict)
    aim: Any = field(default_factory=dict)
    clearml: Any = field(default_factory=dict)


@dataclass
class ObjectiveConfig:
    """Chooses what `best` means and what a sweep compares: see conf/job.yaml."""

    metric: str | None = None
    direction: Direction | None = None


@dataclass
class Config:
    """Describes a job: see conf/job.yaml."""

    cluster: Any = MISSING
    data: Any = field(default_factory=lambda: {"workers": None, "global_batch": None})
    model: Any = MISSING
    adapter: Any = field(default_factory=dict)
    sampler: Any = MISSING
    task: Any = MISSING
    loss: Any = field(default_factory=lambda: {"_target_": "ddp_hydra.tasks.losses.CrossEntropy"})
    mix: Any = field(default_factory=dict)
    metrics: Any = field(default_factory=dict)
    callbacks: Any = field(default_factory=dict)
    parallel: Any = field(default_factory=lambda: {"_target_": "ddp_hydra.training.parallel.ddp.DDP"})
    optimizer: Any = field(default_factory=lambda: {"lr_rule": "none", "lr_reference_batch": None})
    scheduler: Any = MISSING
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    results: ResultsConfig = field(default_factory=ResultsConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    seed: int = 0
    tags: list[str] = field(default_factory=list)
    resume: str | None = None
    detach: bool = False
    faults: list[str] = field(default_factory=list)
    dry_run: bool = False


SCHEMAS = {entry.name: entry.default_factory for entry in fields(Config) if is_dataclass(entry.default_factory)}
"""Schemas of the groups that have one."""
TOP = tuple(entry.name for entry in fields(Config))
"""Keys at the top of a config; a project may have others of its own."""
OF_EVERY_JOB = {entry.name for entry in fields(Config) if entry.name not in SCHEMAS and entry.type != "Any"} | {
    f"{group}.{entry.name}"
    for group, schema in SCHEMAS.items()
    for entry in fields(schema)  # type: ignore[arg-type]
}
"""Keys that each job needs, with a value of the schema where none is given: Hydra or `check_whole` refuses `~key`."""


@functools.cache
def number_types() -> dict[str, type]:
    """Return the types of the keys that hold a number or a switch: {"trainer.epochs": int, …}."""
    groups = [("", Config), *((f"{name}.", schema) for name, schema in SCHEMAS.items())]
    hints = {f"{prefix}{name}": hint for prefix, schema in groups for name, hint in get_type_hints(schema).items()}
    kinds = {key: get_args(hint) if type(None) in get_args(hint) else (hint,) for key, hint in hints.items()}
    return {key: kind[0] for key, kind in kinds.items() if kind[0] in (bool, float, int)}


def allowed(key: str) -> str:
    """Return what to give for a key: "a whole number of at least 1, or null"; "" for one without a type."""
    group, _, name = key.partition("[")[0].rpartition(".")
    kind = get_type_hints(SCHEMAS.get(group, Config), include_extras=True).get(name, Any)
    parts = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
    first = get_origin(parts[0]) or parts[0]
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        list: "a list, such as [a,b]",
        str: "a text",
    }
    found = ", ".join(first.__members__) if isinstance(first, EnumType) else words.get(first, "")
    return described(kind) or (f"{found}, or null" if found and type(None) in parts else found)


def base() -> DictConfig:
    """Return the schema as a config that takes other keys at its top: a project may have nodes of its own."""
    config: DictConfig = OmegaConf.structured(Config, flags={"struct": False})
    return config


def register() -> None:
    """Make the schemas known to Hydra as `base_config` and `base_<group>`, which no group offers as a choice."""
    schemas = {"config": base(), "trainer": TrainerConfig, "dispatch": DispatchConfig, "results": ResultsConfig}
    for name, node in schemas.items():
        hydra_compat.register(f"base_{name}", node)


def check_whole(cfg: DictConfig) -> None:
    """Refuse a config without a key that every job has: `~key` removes it, or a main config of one's own lacks it."""
    for group, schema in [("", Config), *SCHEMAS.items()]:
        node: Any = cfg[group] if group else cfg
        if not OmegaConf.is_dict(node):
            raise ConfigError(f"{group}={node}: give {group}.<key>=<value> for each key that is another one")
        for key in (entry.name for entry in fields(schema)):  # type: ignore[arg-type]
            name = f"{group}.{key}".lstrip(".")
            if key not in node.keys():  # noqa: SIM118 (`in` asks for a value)
                advice = f"leave '~{name}' out; a main config of your own needs `job` in its list of defaults"
                raise ConfigError(f"{name} is missing: {advice}")
            if OmegaConf.is_missing(node, key):
                raise ConfigError(f"{name} is missing: give {name}=...")


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """Return the config as dicts and values that can travel to ranks: interpolations resolved, enums by name.

    The objective's metric and direction are filled in. A key of the user's own that has no value is left out: only what
    refers to it needs one.
    """
    container = {}
    try:
        cfg = _without_validation_keys(cfg)
        for key in map(str, cfg):
            with nullcontext() if key in TOP else suppress(OmegaConfBaseException):
                value: Any = cfg[key]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True, enum_to_str=True)
                container[key] = value
    except (MissingMandatoryValue, InterpolationToMissingValueError) as error:
        key = missing_key(error)
        group, _, name = key.rpartition(".")
        is_of_validation = name.startswith("val_") and f"{group}.".startswith("data.")
        or_none = f", or {group}.val=null for no validation" if is_of_validation else ""
        raise ConfigError(f"{key} is missing: give {key}=...{or_none}") from None
    except InterpolationResolutionError as error:
        raise ConfigError(unresolved(error)) from None
    if "objective" in cfg:
        container["objective"] = dict(zip(("metric", "direction"), objective.metric_and_direction(cfg), strict=True))
    return container


def unresolved(error: InterpolationResolutionError) -> str:
    """Return a sentence that says which interpolation of a config has no value, and why."""
    node = error.parent_node
    raw = dict(redact.leaves(OmegaConf.to_container(node._get_root()))) if node is not None else {}
    word = redact.without([f"{error.full_key}={raw.get(str(error.full_key), '')}"])[0]
    return f"{word}: {why_unresolved(error)}"


def why_unresolved(error: OmegaConfBaseException) -> str:
    first = str(error).splitlines()[0]
    if isinstance(error, UnsupportedInterpolationType):
        return f"{first}: give ${{<key>}}, or ${{oc.env:<NAME>}} for a variable of the environment"
    if first.startswith("Interpolation key") and str(error.full_key).startswith(hydra_compat.ENV_SET):
        return f"{first}: Hydra knows only its own part of the config there: give a value, or as in ${{hydra.job.name}}"
    if first.startswith("Interpolation key"):
        return f"{first}: give the full name of a key, as in ${{trainer.epochs}}, or a value"
    found = re.fullmatch(r"KeyError raised while resolving interpolation: \"(.*)\"", first)
    return found[1] if found else first


def missing_key(error: OmegaConfBaseException) -> str:
    if isinstance(error, InterpolationToMissingValueError):  # its `full_key` points to the missing one
        return str(error).partition("value: ")[2].split()[0]
    return str(error.full_key)


def _without_validation_keys(cfg: DictConfig) -> DictConfig:
    """Return the config with null for missing keys `val_...` of data without a validation set, also in a mixture."""
    sets = OmegaConf.select(cfg, "data.sets")
    groups = ["data", *(f"data.sets.{name}" for name in sets)] if OmegaConf.is_dict(sets) else ["data"]
    found = [(group, OmegaConf.select(cfg, group)) for group in groups]
    # Other data sets than a mixture may have an argument `sets`, with lists or texts in it.
    nodes = [(group, node) for group, node in found if OmegaConf.is_dict(node)]
    missing = [
        f"{group}.{key}"
        for group, node in nodes
        if _lacks_validation(cfg, "data", group)
        for key in node
        if str(key).startswith("val_") and OmegaConf.is_missing(node, key)
    ]
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{key}=null" for key in missing])) if missing else cfg  # type: ignore[return-value]


def _lacks_validation(cfg: DictConfig, *groups: str) -> bool:
    return any(OmegaConf.select(cfg, f"{group}.val", default=True) is None for group in groups)
