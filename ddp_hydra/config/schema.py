"""The part of a config that the framework itself reads, with its types.

Groups whose content belongs to others (`cluster`, `data`, `model`, `optimizer` …) stay free-form: they are
arguments of their `_target_`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue

from ddp_hydra.config import hydra_compat, objective
from ddp_hydra.errors import ConfigError


class Precision(Enum):
    """Arithmetic of the forward pass."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp16 = "fp16"


class Device(Enum):
    """Where to train; auto takes the GPU where there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Direction(Enum):
    """Which way an objective is better."""

    maximize = "maximize"
    minimize = "minimize"


class Backend(Enum):
    """Of the process group; auto takes NCCL for GPUs and gloo for the rest."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class OnNonFinite(Enum):
    """What to do about a step whose loss or gradient is not finite."""

    abort = "abort"
    skip = "skip"
    rollback = "rollback"


class CompileMode(Enum):
    """How torch.compile shall make the model faster, see its `mode`."""

    default = "default"
    reduce_overhead = "reduce-overhead"
    max_autotune = "max-autotune"
    max_autotune_no_cudagraphs = "max-autotune-no-cudagraphs"


class Handler(Enum):
    """Where the writers run: where the command was typed, or beside rank 0, on the cluster's side."""

    client = "client"
    cluster = "cluster"


@dataclass
class TrainerConfig:
    """How long to train and what to do on the way.

    Args:
        epochs: passes over the training data; null where only max_steps counts.
        max_steps: optimizer steps; null where only epochs count.
        device: cpu, cuda or auto.
        precision: fp32, tf32 (matrix products with 11 bits, GPUs), or bf16 and fp16 (autocast).
        channels_last: memory layout of images; null means yes for models with 2-d convolutions.
        compile: torch.compile's mode: default, reduce_overhead (CUDA graphs) or max_autotune; null: not compiled.
        gradient_accumulation_steps: micro-batches of data.batch_size samples in a step of each rank.
        clip_norm: longest gradient, over all parameters; null for any.
        activation_checkpointing: classes of modules that save memory: the backward pass computes their activations
            again.
        freeze: parameters that are not trained, e.g. ['*','!fc.*'] for all but the last layer's.
        decay_all: weight decay also for biases and the scales of norms.
        base_batch_size: the optimizer's lr is for so many samples in a step, and grows with them; null: it stays.
        ema_decay: keep a moving average of the weights, which is evaluated and saved, e.g. 0.999; null for none.
        threads: CPU threads per rank; 0 shares each host's cores out among all ranks there.
        log_every_steps: a point on each curve every so many steps.
        validate_every_epochs: 0 means only at the end.
        checkpoint_every_steps: 0 means not by steps.
        checkpoint_every_epochs: 0 means only at the end.
        time_limit_s: after so long, a checkpoint is made and the job ends as if interrupted; null for no limit.
        on_nonfinite: a loss that is NaN or infinite on any rank, or a gradient that is, ends the job (abort), leaves
            the step out (skip), or goes back to the last checkpoint first (rollback). What overflows in fp16 is no
            such step: the loss scale is lowered.
        max_nonfinite: such steps to put up with.
        early_stopping_patience: the run ends when so many in a row were no better than the best; null: it goes on.
        early_stopping_min_delta: how much better the objective has to be for that.
        profile_steps: trace so many steps, and tell where their time goes; 0 for none.
        overfit_batches: train on the first so many batches only, again and again; 0 for all.
        detect_anomaly: have autograd name the operation whose gradient is NaN; slow.
    """

    epochs: int | None = 5
    max_steps: int | None = None
    device: Device = Device.auto
    precision: Precision = Precision.fp32
    channels_last: bool | None = None
    compile: CompileMode | None = None
    gradient_accumulation_steps: int = 1
    clip_norm: float | None = None
    activation_checkpointing: list[str] = field(default_factory=list)
    freeze: list[str] = field(default_factory=list)
    decay_all: bool = True
    base_batch_size: int | None = None
    ema_decay: float | None = None
    threads: int = 0
    log_every_steps: int = 10
    validate_every_epochs: int = 1
    checkpoint_every_steps: int = 0
    checkpoint_every_epochs: int = 1
    time_limit_s: float | None = None
    on_nonfinite: OnNonFinite = OnNonFinite.abort
    max_nonfinite: int = 10
    early_stopping_patience: int | None = None
    early_stopping_min_delta: float = 0.0
    profile_steps: int = 0
    overfit_batches: int = 0
    detect_anomaly: bool = False


@dataclass
class DispatchConfig:
    """How the gang is placed, watched and started again.

    Args:
        ranks: number of ranks; null for one on each worker.
        backend: gloo, nccl or auto.
        timeout_s: of collectives.
        queue_timeout_s: how long to wait for workers that other jobs hold.
        start_timeout_s: how long the ranks may take to come up.
        port_range: first and last port allowed for the rendezvous; null for any free one.
        interface: network interface by which the ranks reach each other, e.g. eth1; null for that of the workers'
            addresses, as the scheduler knows them.
        max_restarts: new attempts after failures, each from the last complete checkpoint; 0 for none.
        min_ranks: go on with fewer ranks, but never with fewer than this; null for as many as at first.
        restart_wait_s: how long to wait for lost workers to come back or be replaced.
        lost_timeout_s: a worker of which nothing is heard for so long is lost.
        hang_timeout_s: a rank that makes no progress for so long hangs.
        first_step_timeout_s: the same where a rank does something for the first time, when things are compiled.
        grace_s: after Ctrl-C or SIGTERM, how long the checkpoint may take.
    """

    ranks: int | None = None
    backend: Backend = Backend.auto
    timeout_s: float = 1800.0
    queue_timeout_s: float = 86400.0
    start_timeout_s: float = 300.0
    port_range: list[int] | None = None
    interface: str | None = None
    max_restarts: int = 3
    min_ranks: int | None = None
    restart_wait_s: float = 60.0
    lost_timeout_s: float = 15.0
    hang_timeout_s: float = 300.0
    first_step_timeout_s: float = 1800.0
    grace_s: float = 300.0


@dataclass
class ResultsConfig:
    """Where results go.

    Args:
        handler: client: the writers run where the command was typed; cluster: on the cluster's side, into `root`.
        root: of cluster: s3://bucket/runs or a folder of a shared disk; each run gets its own folder there.
        keep_checkpoints: newest step files to keep besides last and best; null keeps all.
        retry_s: how long a write is tried again while the disk is full or away, or that of a worker's temporary
            folder, or the bucket fails; 0: not at all.
        mirror: s3://bucket/folder, where checkpoints are copied to, too; null for nowhere.
    """

    handler: Handler = Handler.client
    root: str | None = None
    keep_checkpoints: int | None = 3
    retry_s: float = 60.0
    mirror: str | None = None


@dataclass
class ObjectiveConfig:
    """What `best` means, and what a sweep compares.

    Args:
        metric: name of a logged metric; null: val/accuracy for a cross-entropy or a mix, val/loss for other losses,
            train/loss without a validation set.
        direction: maximize or minimize; null: as the metric's name says.
    """

    metric: str | None = None
    direction: Direction | None = None


@dataclass
class Config:
    """A job.

    Args:
        cluster: the Dask cluster: its class and its native arguments.
        data: batch_size, and the data sets `train` and `val`.
        model: the model's class or function and its arguments.
        sampler: who reads what.
        loss: the loss.
        mix: what mixes the samples of a batch.
        metrics: of the validation, beside loss and accuracy.
        parallel: how the ranks' models are kept the same.
        optimizer: the optimizer and its arguments but the parameters.
        scheduler: the learning-rate schedule.
        trainer: see TrainerConfig.
        dispatch: see DispatchConfig.
        results: see ResultsConfig.
        objective: see ObjectiveConfig.
        seed: of everything random.
        tags: words to find the run by.
        resume: a run directory or checkpoint file to go on from, or the URL of a run.
        detach: return once the run has begun; it goes on without the command. Needs results.handler=cluster.
        faults: faults to strike ranks on purpose, see `faults.py`; on the command line +fault=kill,rank=1,step=20.
        dry_run: build model and data and make one step and one batch of the validation, here, without a cluster.
    """

    cluster: Any = MISSING
    data: Any = MISSING
    model: Any = MISSING
    sampler: Any = MISSING
    loss: Any = field(default_factory=lambda: {"_target_": "ddp_hydra.training.losses.CrossEntropy"})
    mix: Any = field(default_factory=dict)
    metrics: Any = field(default_factory=dict)
    parallel: Any = field(default_factory=lambda: {"_target_": "ddp_hydra.training.parallel.ddp"})
    optimizer: Any = MISSING
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


def register() -> None:
    """Make the schemas known to Hydra, as `base_config` and `base_<group>`, which no group offers as a choice."""
    hydra_compat.register("base_config", Config)
    for group, node in (("trainer", TrainerConfig), ("dispatch", DispatchConfig), ("results", ResultsConfig)):
        hydra_compat.register(f"base_{group}", node)


def check(cfg: DictConfig) -> None:
    """Refuse what no job can mean, before anything is started.

    Raises:
        ConfigError: with the key, the value given and what is allowed.
    """
    positive = {
        "cluster.n_workers": OmegaConf.select(cfg, "cluster.n_workers"),
        "dispatch.ranks": cfg.dispatch.ranks,
        "data.batch_size": OmegaConf.select(cfg, "data.batch_size"),
        "trainer.epochs": cfg.trainer.epochs,
        "trainer.max_steps": cfg.trainer.max_steps,
        "trainer.log_every_steps": cfg.trainer.log_every_steps,
        "trainer.max_nonfinite": cfg.trainer.max_nonfinite,
        "trainer.gradient_accumulation_steps": cfg.trainer.gradient_accumulation_steps,
        "trainer.base_batch_size": cfg.trainer.base_batch_size,
        "trainer.early_stopping_patience": cfg.trainer.early_stopping_patience,
        "dispatch.min_ranks": cfg.dispatch.min_ranks,
        "results.keep_checkpoints": cfg.results.keep_checkpoints,
    }
    for key, value in positive.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{key}={value}: give a whole number of at least 1")
    counts = ("validate_every_epochs", "checkpoint_every_steps", "checkpoint_every_epochs", "threads")
    for key in (*counts, "profile_steps", "overfit_batches"):
        if cfg.trainer[key] < 0:
            raise ConfigError(f"trainer.{key}={cfg.trainer[key]}: give 0 or more")
    seconds = ("timeout_s", "queue_timeout_s", "start_timeout_s", "lost_timeout_s", "hang_timeout_s")
    for key in (*seconds, "first_step_timeout_s"):
        if cfg.dispatch[key] <= 0:
            raise ConfigError(f"dispatch.{key}={cfg.dispatch[key]:g}: give seconds, more than 0")
    for key in ("max_restarts", "restart_wait_s", "grace_s"):
        if cfg.dispatch[key] < 0:
            raise ConfigError(f"dispatch.{key}={cfg.dispatch[key]:g}: give 0 or more")
    if cfg.trainer.time_limit_s is not None and cfg.trainer.time_limit_s <= 0:
        raise ConfigError(f"trainer.time_limit_s={cfg.trainer.time_limit_s:g}: give seconds, more than 0, or null")
    if cfg.trainer.clip_norm is not None and cfg.trainer.clip_norm <= 0:
        raise ConfigError(f"trainer.clip_norm={cfg.trainer.clip_norm:g}: give a length, more than 0, or null")
    if cfg.trainer.ema_decay is not None and not 0 < cfg.trainer.ema_decay < 1:
        raise ConfigError(f"trainer.ema_decay={cfg.trainer.ema_decay:g}: give a share between 0 and 1, e.g. 0.999")
    if cfg.trainer.epochs is None and cfg.trainer.max_steps is None:
        raise ConfigError("trainer.epochs and trainer.max_steps are both null, so the job would never end: give one")
    if OmegaConf.select(cfg, "data.batch_size") is None or OmegaConf.select(cfg, "data.train") is None:
        raise ConfigError("data needs batch_size (per rank) and train (a data set with a _target_); see conf/data")
    _check_results(cfg)
    objective.of(cfg)
    ports = cfg.dispatch.port_range
    if ports is not None and not (len(ports) == 2 and 0 < ports[0] <= ports[1] < 65536):
        raise ConfigError(f"dispatch.port_range={list(ports)}: give the first and the last port, e.g. [40000,40100]")


def _check_results(cfg: DictConfig) -> None:
    results = cfg.results
    if not results.retry_s >= 0:
        raise ConfigError(f"results.retry_s={results.retry_s:g}: give seconds, 0 or more")
    if results.handler is Handler.cluster:
        if not results.root:
            raise ConfigError(
                "results.handler=cluster needs a place that the workers can write: give results.root=s3://bucket/runs, "
                "or a folder of a disk that all hosts share"
            )
        if results.mirror:
            raise ConfigError(
                f"results.mirror={results.mirror}: with results.handler=cluster the checkpoints are in the store "
                "already; leave it out"
            )
    elif results.root:
        raise ConfigError(
            f"results.root={results.root} is for results that do not come here: give results.handler=cluster, too, or "
            "hydra.run.dir=<folder> for a folder here"
        )
    elif cfg.detach:
        raise ConfigError(
            "detach=true: without this command, nobody would write the results: give results.handler=cluster "
            "results.root=s3://bucket/runs, too"
        )


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The resolved config as plain dicts and values, enums by name: what travels to ranks.

    The objective is spelt out.

    Raises:
        ConfigError: a key has no value that must have one.
    """
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True, enum_to_str=True)
    except (MissingMandatoryValue, InterpolationToMissingValueError) as error:
        key = error.full_key
        if isinstance(error, InterpolationToMissingValueError):  # of the key that points to the missing one
            key = str(error).partition("value: ")[2].split()[0]
        raise ConfigError(f"{key} is missing: give {key}=...") from None
    assert isinstance(container, dict)
    if "objective" in cfg:
        container["objective"] = dict(zip(("metric", "direction"), objective.of(cfg), strict=True))
    return {str(key): value for key, value in container.items()}
