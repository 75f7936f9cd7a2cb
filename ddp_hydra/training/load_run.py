"""Loads a checkpoint: its model, for `evaluate`, `predict`, `generate`, `export` and notebooks; or all, into a run.

The config of the run may have changed since: the new config wins.
"""

from __future__ import annotations

import copy
import inspect
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, ReduceLROnPlateau, StepLR

from ddp_hydra.config import checkpoint_config, objective, project, rank_batch, redact
from ddp_hydra.config.project import PACKAGES
from ddp_hydra.config.unknown_keys import OUR_DATA_KEYS
from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.tasks import Task
from ddp_hydra.training import build_data, builders, loss_state, optimizers, plain_state, sharded_checkpoint
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.data_description import DataDescription, shown
from ddp_hydra.training.lr_schedules import FactorLR, first_rate, own_rate
from ddp_hydra.training.parallel import Parallel, weights
from ddp_hydra.training.seeds import seeded_as
from ddp_hydra.training.sharded_checkpoint import PARTS_IN
from ddp_hydra.training.state import ByName, TrainingState, defaults, each, without_loss
from ddp_hydra.training.task_state import TaskState, load_part
from ddp_hydra.training.train_step import loss_module


@dataclass
class TrainedModel:
    """A trained model, in evaluation mode, with its config.

    Args:
        cfg: the run's config with the overrides, resolved.
        data: describes the data that it was trained on.
        config: the run's config as the checkpoint keeps it, with its interpolations: their values may be secret.
    """

    cfg: DictConfig
    parallel: Parallel
    data: DataDescription
    device: torch.device
    step: int
    config: Mapping[str, Any]

    @property
    def model(self) -> nn.Module:
        return self.parallel.model

    @cached_property
    def train_set(self) -> Any:
        return build_data.dataset(self.cfg.data.train, self.cfg.seed)


def load(
    run: str | Path,
    which: str = "best",
    overrides: Sequence[str] = (),
    split: str | None = None,
    trust: bool = False,
) -> TrainedModel:
    """Load a run's model.

    Args:
        run: run directory, checkpoint file, or the URL of a run.
        which: the checkpoint of a run directory, "best" or "last".
        overrides: "key=value" changes of the run's config; keys that interpolate them follow.
        split: the only data set that will be read, as by `checkpoint_config.composed`, if the run has it; None: any.
        trust: build also what `refuse_reads` and `refuse_targets` refuse of a checkpoint that is no run directory's.
    """
    project.make_importable(project.layers())
    with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
        content = needed(read(RunRef.named(run).checkpoint(which, Path(folder))))
    before = content["config"]
    content["config"] = OmegaConf.to_container(checkpoint_config.changed(before, overrides))
    split = split if split is not None and (content["config"].get("data") or {}).get(split) else None
    is_trusted = trust or RunRef.own(run).is_own
    if not is_trusted:
        refuse_reads(content["config"], overrides)
    cfg = checkpoint_config.composed(before, overrides, split=split)
    if not is_trusted:
        refuse_targets(cfg, overrides)
    return restore_model(content, cfg, words=overrides)


def needed(content: dict[str, Any]) -> dict[str, Any]:
    weights = content["ema"] if content.get("ema") else content
    names = ("base", "config", "data", "loss", "task", "position", "batch", "world_size", PARTS_IN)
    kept = {name: content.get(name) for name in names}
    return {**kept, "model": weights["model"]}


def restore_model(
    content: dict[str, Any],
    cfg: DictConfig,
    world: World = ALONE,
    words: Sequence[str] = (),
    groups: Collection[str] = (),
) -> TrainedModel:
    # A collective, if the model is sharded. `words` and `groups` were typed.
    cfg.data.batch_size = _batch_size(content, cfg.data, words, groups)
    device, data = builders.device(cfg), DataDescription.from_dict(content["data"])
    make, saved = partial(builders.model, cfg, data), content["model"]
    parallel = builders.inference_parallel(cfg, world)
    with seeded_as(cfg.seed, 0, 0):  # what the model has drawn beside its state is in no checkpoint
        parallel.build(cfg.trainer, make, device, saved=saved, is_trained=False)
    content = dict(sharded_checkpoint.with_parts(content, world, parallel.read_targets()))
    parallel.load(content)
    parallel.model.eval()
    return TrainedModel(cfg, parallel, data, device, content["position"]["step"], content["config"])


def _batch_size(content: Mapping[str, Any], data: DictConfig, words: Sequence[str], groups: Collection[str]) -> int:
    # As the run has validated, unless another one was typed.
    size, then = data.get("batch_size"), content["batch"]
    is_typed = "data" in groups or _is_typed("data.batch_size", size, words)
    is_then = size is None or data.get("global_batch") is not None or size == then["size"]
    return rank_batch.size_of(then, content["world_size"]) if size is None or (is_then and not is_typed) else size


def restore_task(
    task: Task, content: Mapping[str, Any], cfg: DictConfig, data: Any, rank: int = 0, trust: bool = True
) -> None:
    # With the loss.
    if (loss := loss_module(task)) is not None:
        before = content["config"] if trust else _without_reads(content["config"])
        check = (lambda former: None) if trust else refuse_targets
        saved = loss_state.fitting(loss, content["loss"], before, cfg, data, rank, check)
        if saved:
            load_part(loss, "loss", type(loss).__name__, plain_state.decode(saved))
    if content["task"] and is_same_task(content["config"], cfg):
        TaskState(lambda: task).load_state_dict(plain_state.decode(content["task"]))


SHOWN = 8
_PLATEAU = {"factor", "patience", "cooldown", "eps", "mode", "threshold", "threshold_mode", "mode_worse", "min_lrs"}
"""Attributes of ReduceLROnPlateau that are its arguments."""
_BY_STEP = (StepLR, MultiStepLR, ExponentialLR)
"""Schedules of torch that multiply the rate after some steps: other arguments apply to the steps to come."""


def restore(state: TrainingState, content: Mapping[str, Any], cfg: DictConfig | None = None, data: Any = None) -> str:
    # `cfg` and `data`, by which the run was built, are needed where the config has changed.
    has_parts = PARTS_IN in content
    content = dict(state.with_parts(content))
    before, now = content["config"], state.config
    schedulers = dict(each(state.scheduler))
    settings = [
        OptimizerSettings(name, optimizer, schedulers[name], before, now) for name, optimizer in each(state.optimizer)
    ]
    nodes = [[config.get(part) for part in ("task", "loss")] for config in (before, now)]
    if nodes[0] != nodes[1]:
        content = {**content, "epoch_means": None}  # sums of what another task has counted
    if before != now and _measured_by(before) != _measured_by(now):
        content = {**content, "metrics": {}}
    if not is_same_task(before, now):
        content = {**content, "task": None}
    may_differ = nodes[0] != nodes[1] or "${" in str(nodes)  # an interpolation may have another value
    if (loss := state.extras.get("loss")) is not None and cfg is not None and may_differ:
        fitting = loss_state.fitting(loss, content.get("loss"), before, cfg, data, state.parallel.world.rank)
        content = {**content, "loss": fitting}
        if fitting is None:
            content["optimizer"] = without_loss(content["optimizer"])
    progress = state.extras.get("progress")
    has_other_length = progress is not None and progress.total != content["progress"]["total"]
    for one in settings:  # torch's schedules keep rates, some of them in others that they hold, and the run's length
        saved = content["optimizer"].get(one.name, {}) if one.name else content["optimizer"]
        one.is_other_schedule |= one.is_torchs and (
            one.has_other_rates_than(saved) or (has_other_length and one.depends_on_length)
        )
    if any(one.is_other_schedule for one in settings):
        for one in settings:  # they take their steps together
            one.is_other_schedule |= one.is_torchs
        # The new schedule starts at 0, and is moved to the run's position later.
        fresh, saved = plain_state.encode(state.scheduler.state_dict(), "scheduler"), content["scheduler"]
        if isinstance(state.scheduler, ByName):
            fresh |= {one.name: saved.get(one.name) for one in settings if not one.is_other_schedule}
        content = {**content, "scheduler": fresh, "progress": {**content["progress"], "taken": 0}}
    state.restore(content, is_own=has_parts)
    for one in settings:
        one.put_back()
    if (ema := state.extras.get("ema")) is not None and not content.get("ema"):
        # The checkpoint has no average: start from its weights.
        weights.load_copied(ema.model, state.parallel.state())
    if before != now and _objective(before) != _objective(now):
        state.best = None
        state.metrics = {name: value for name, value in state.metrics.items() if objective.is_of_run(name)}
        for plateau in [one.scheduler for one in settings if isinstance(one.scheduler, ReduceLROnPlateau)]:
            plateau.best, plateau.num_bad_epochs = plateau.mode_worse, 0
        if (early_stopping := state.extras.get("early_stopping")) is not None:
            early_stopping.load_state_dict({"best": None, "validations_without_progress": 0})
    return shown(checkpoint_config.changes(before, now), SHOWN)


def is_same_task(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return bool(_node(before, "task")["_target_"] == _node(now, "task")["_target_"])


class OptimizerSettings:
    """The settings that the new config, `now`, gives the optimizer of an update and its schedule: it has built them."""

    def __init__(
        self, name: str, optimizer: Optimizer, scheduler: Any, before: Mapping[str, Any], now: Mapping[str, Any]
    ) -> None:
        self.name, self.optimizer, self.scheduler = name, optimizer, scheduler
        self.groups = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        own, new = vars(scheduler), _node(now, "scheduler", name)
        changed = _changed_keys(before, now, "scheduler", name)
        is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        self.is_torchs = not is_plateau and not isinstance(scheduler, FactorLR)
        # Other schedules of torch follow a curve that belongs to all arguments, and may make other numbers of them.
        is_by_step = type(scheduler) in _BY_STEP and changed <= own.keys()
        self.is_other_schedule = "_target_" in changed or (self.is_torchs and bool(changed) and not is_by_step)
        self.depends_on_length = optimizers.depends_on_length(new)
        kept = _PLATEAU if is_plateau and not self.is_other_schedule else changed
        self.schedule = {key: own[key] for key in kept & own.keys()}
        self.changed = _changed_keys(before, now, "optimizer", name)
        # A function that makes parameter groups may take its arguments for anything.
        target = str(_node(now, "optimizer", name).get("_target_"))
        makes_groups = bool(self.changed) and optimizers.makes_groups(target)
        self.is_other_optimizer = makes_groups or "_target_" in self.changed
        # With optimizer.lr_rule the learning rate depends on the global batch.
        rules = [_node(config, "optimizer").get("lr_rule") for config in (before, now)]
        by_batch = any(rule not in (None, "none") for rule in rules)
        self.may_have_other_rates = "lr" in self.changed or by_batch or self.is_other_optimizer

    def has_other_rates_than(self, saved: Mapping[str, Any]) -> bool:
        # `saved`: the optimizer's state in the checkpoint, which may have a layout of its own.
        return self.may_have_other_rates and any(
            "lr" in group and first_rate(group) != first_rate(new)
            for group, new in zip(saved.get("param_groups", ()), self.groups, strict=False)
        )

    def put_back(self) -> None:
        for group, new in zip(self.optimizer.param_groups, self.groups, strict=True):
            changed = defaults(self.optimizer).keys() if self.is_other_optimizer else self.changed
            settings = {key: new[key] for key in changed if key in new and key != "lr"}
            if "max_momentum" in group and not self.is_other_schedule:  # a schedule cycles these
                settings.pop("momentum", None)
                if "betas" in settings:
                    settings["betas"] = (group["betas"][0], *settings["betas"][1:])
            group.update(settings)
            if self.is_other_optimizer:
                for key in group.keys() - new.keys() - {"params", "initial_lr"}:
                    del group[key]
            if self.is_other_schedule:  # torch's schedules keep some of their settings there, and cycle others
                group.update({key: value for key, value in new.items() if key not in defaults(self.optimizer)})
                cycled = ("momentum", "betas") if "max_momentum" in {**group, **new} else ()
                group.update({key: new[key] for key in ("lr", "initial_lr", *cycled) if key in new})
        if self.may_have_other_rates and not self.is_other_schedule:
            self._set_rates()
        vars(self.scheduler).update(self.schedule)
        if self.changed - {"lr"}:
            self._try_step()

    @torch.no_grad()
    def _try_step(self) -> None:
        kept = self.optimizer.state
        known = [(one, group) for group in self.optimizer.param_groups for one in group["params"] if kept.get(one)]
        if not known:
            return
        parameter, group = min(known, key=lambda pair: pair[0].numel())
        trial, stand_in = copy.copy(self.optimizer), torch.zeros_like(parameter)
        stand_in.grad = torch.zeros_like(parameter)
        trial.param_groups = [{**group, "params": [stand_in]}]
        trial.state = defaultdict(dict, {stand_in: copy.deepcopy(kept[parameter])})
        try:
            type(trial).step(trial)
        except Exception as error:
            raise CheckpointError(
                f"{type(trial).__name__} can't go on with what the checkpoint's has kept ({type(error).__name__}: "
                f"{error!s:.100}): resume with its former settings, or begin anew with model.weights=<run>"
            ) from error

    def _set_rates(self) -> None:
        for number, (group, new) in enumerate(zip(self.optimizer.param_groups, self.groups, strict=True)):
            old_lr, new_lr = first_rate(group), first_rate(new)
            if new_lr == old_lr:
                continue
            is_scaled = bool(old_lr) and new_lr is not None
            group["lr"] = group["lr"] * new_lr / old_lr if is_scaled else own_rate(new_lr)
            group["initial_lr"] = new_lr
            if hasattr(self.scheduler, "base_lrs"):
                self.scheduler.base_lrs[number] = new_lr
            if isinstance(self.scheduler, FactorLR):
                self.scheduler.written = None


def _node(config: Mapping[str, Any], section: str, name: str = "") -> Any:
    node = _own_node(config, section, name)
    return OmegaConf.to_container(node) if node else {}


def _own_node(config: Mapping[str, Any], section: str, name: str) -> Any:
    # The update called `name` may have a node of its own in the section. Each may be the interpolation of another one.
    node: Any = OmegaConf.create(dict(config)).get(section) or {}
    return node.get(name) or {} if name and "_target_" not in node else node


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], section: str, name: str) -> set[str]:
    absent = object()
    old, new = (_known_values(config, section, name) for config in (before, now))
    if not (old and new):  # a whole node is of such a variable, or of a resolver: both are as they are now
        old, new = (_node(config, section, name) for config in (before, now))
    return {key for key in {**old, **new} if old.get(key, absent) != new.get(key, absent)}


def _known_values(config: Mapping[str, Any], section: str, name: str) -> dict[str, Any]:
    # A value that nobody knows, as of a variable that another host has given, equals no other.
    try:
        node = _own_node(_without_reads(dict(config)), section, name)
    except OmegaConfBaseException:
        return {}
    return {str(key): _known_value(node, key) for key in node}


def _known_value(node: Any, key: Any) -> Any:
    try:
        value = node[key]
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException:
        return object()
    return value


def _measured_by(config: Mapping[str, Any]) -> dict[str, Any]:
    # What gives metrics their meaning, by its values. The validation set may refer to keys of the user beside it.
    data = [f"data.{key}" for key in config.get("data") or {} if key == "val" or key not in OUR_DATA_KEYS]
    raw = OmegaConf.create(_without_reads(dict(config), as_text=True))
    found: dict[str, Any] = {}
    for key in (*data, "task", "loss", "metrics"):
        with suppress(OmegaConfBaseException):  # it is read where it is needed
            value = OmegaConf.select(raw, key)
            found[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return found


def _objective(config: Mapping[str, Any]) -> tuple[str, str] | None:
    try:
        return objective.metric_and_direction(OmegaConf.create(dict(config)))
    except ConfigError:
        return None


BUILT = ("model", "adapter", "data", "task", "loss", "mix", "metrics")
"""Groups that a trained model is built from."""
CLASSES = (
    "torch.nn",
    "torch.utils.data",
    "torchvision",
    "torchmetrics",
    "ddp_hydra.data",
    "ddp_hydra.finetune",
    "ddp_hydra.tasks",
    *PACKAGES,
)
"""Modules and packages whose classes are built."""
UNPICKLE = ("torch.utils.data.datapipes", "torchvision.datasets.lsun")
"""Modules among them whose classes unpickle what they read."""
FUNCTIONS = ("torchvision.models", "torch.nn.functional", "torch._C._nn", "ddp_hydra.data.huggingface", *PACKAGES)
"""Modules and packages whose functions are called."""
KNOWN = (
    "torch.tensor",
    *(f"ddp_hydra.finetune.models.{name}" for name in ("causal_lm", "masked_lm", "sequence_classification")),
    "ddp_hydra.finetune.adapter.lora",
)
"""Functions that are called, too, of modules whose other functions may do anything."""
RUNS_CODE: Mapping[str, Callable[[Any], bool]] = {
    "trust_remote_code": bool,
    "weights_only": lambda value: not value,
    "use_kernels": bool,
    "attn_implementation": lambda value: "/" in str(value),  # a kernel on the hub
}
"""Arguments of transformers, and whether a value lets files of a model or of the hub run code."""
_REFERENCE = re.compile(r"\$\{(oc\.select:|of_set:)?[\w.,\[\] -]+\}")
"""Matches an interpolation that reads the config alone."""


def refuse_reads(stored: Mapping[str, Any], words: Sequence[str] = (), groups: Collection[str] = ()) -> None:
    # An interpolation may read more than the config, and a resolver of a project may do anything: none is resolved
    # before. `stored` is the checkpoint's config with its interpolations, `words` and `groups` were typed.
    for key, value in redact.values_of(stored):
        if _is_read(value) and key.partition(".")[0] not in groups and not _is_typed(key, value, words):
            raise ConfigError(
                f"{key}={value} is from a checkpoint that is a lone file or from a URL: its config may not read this "
                f"machine's environment. Type {key}=<value>, or trust=true if you trust it"
            )


def refuse_targets(cfg: DictConfig, words: Sequence[str] = (), groups: Collection[str] = ()) -> None:
    # A target of a checkpoint may do anything. `words` and `groups` were typed.
    for key, value in redact.values_of(OmegaConf.to_container(cfg)):
        *around, name = key.split(".")
        group = key.partition(".")[0]
        if group not in BUILT or group in groups or _is_typed(key, value, words):
            continue
        # A backslash has kept it from being resolved; what it is given to may resolve it.
        is_hidden = isinstance(value, str) and "${" in value
        # A list or a dict of anything is true; only attentions are named by a dict, one for each part of a model.
        runs_code = (name in RUNS_CODE and RUNS_CODE[name](value)) or any(
            one != "attn_implementation" or RUNS_CODE[one](value) for one in RUNS_CODE.keys() & set(around)
        )
        if is_hidden or runs_code or (name == "_target_" and not _is_known(str(value))):
            raise ConfigError(
                f"{key}={value} is from a checkpoint that is a lone file or from a URL: its config may name classes of "
                "torch.nn, torchvision, torchmetrics, ddp_hydra and this project only. Type trust=true if you trust "
                "it, or give its run directory on this machine"
            )


def _is_typed(key: str, value: Any, words: Sequence[str]) -> bool:
    typed = (word.lstrip("+").partition("=")[::2] for word in words)
    return any(key == one or (key.startswith(f"{one}.") and str(value) in text) for one, text in typed)


def _is_read(value: Any) -> bool:
    # By a resolver, such as oc.env.
    while isinstance(value, str) and (without := _REFERENCE.sub("x", value)) != value:  # the inner ones first
        value = without
    return isinstance(value, str) and "${" in value


def _without_reads(value: Any, as_text: bool = False) -> Any:
    # What was typed for a group has passed `refuse_targets`, not what the checkpoint has there.
    if isinstance(value, dict):
        return {key: _without_reads(one, as_text) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_reads(one, as_text) for one in value]
    if not _is_read(value):
        return value
    return value.replace("${", "{") if as_text else "???"


def _is_known(target: str) -> bool:
    if target in KNOWN:
        return True
    if not _is_below(target, (*CLASSES, *FUNCTIONS)):
        return False  # not even imported
    try:
        found = get_object(target)
    except Exception:  # it is told when it is built
        return True
    module = getattr(found, "__module__", None) or ""
    if inspect.isclass(found):
        return _is_below(module, CLASSES) and not _is_below(module, UNPICKLE)
    # A method takes anything as its `self`.
    is_function = "." not in getattr(found, "__qualname__", ".") or _is_below(module, PACKAGES)
    return is_function and _is_below(module, FUNCTIONS)


def _is_below(name: str, packages: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)
