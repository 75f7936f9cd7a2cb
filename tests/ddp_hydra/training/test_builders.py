"""What a config names becomes parts of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ddp_hydra.config.targets import make
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import World
from ddp_hydra.tasks import Classification, Task
from ddp_hydra.training import builders, optimizers
from ddp_hydra.training.callbacks import Callback
from tests.ddp_hydra.training.loop_runs import Numbers, config


def model(**node):
    cfg = config()
    cfg.model = node
    return builders.model(cfg, Numbers(3))


def test_a_model_that_is_no_module_is_refused():
    with pytest.raises(
        ConfigError, match=r"model\._target_=builtins\.list returned a list: return a torch\.nn\.Module"
    ):
        model(_target_="builtins.list")


def test_a_regression_does_not_take_the_largest_number_for_a_number_of_classes():
    cfg = config()
    cfg.model, cfg.task = (
        {"_target_": "torch.nn.Flatten", "num_classes": None},
        {"_target_": "ddp_hydra.tasks.Regression"},
    )
    with pytest.raises(ConfigError, match=r"task=regression has no classes: give model\.num_classes=1"):
        builders.model(cfg, SimpleNamespace(num_classes=251))


def test_a_model_with_a_parameter_without_a_shape_is_refused():
    with pytest.raises(ConfigError, match=r"nn\.LazyLinear: weight, bias has no shape yet.*give its size"):
        model(_target_="torch.nn.LazyLinear", out_features=3)


class Lazy(nn.Module):
    """A loss with a layer without a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3)

    def forward(self, prediction, target):
        return nn.functional.cross_entropy(self.head(prediction), target)


class Holding(Task):
    """Holds a layer without a shape."""

    def __init__(self) -> None:
        self.norm = nn.LazyBatchNorm1d(affine=False)


@pytest.mark.parametrize(
    ("group", "kind", "said"),
    [
        ("loss", Lazy, r"^loss\._target_=\S+\.Lazy: head\.weight, head\.bias has no shape yet.*give its size"),
        ("task", Holding, r"^task\._target_=\S+\.Holding: norm: running_mean, running_var has no shape yet"),
    ],
)
def test_so_are_a_loss_and_a_module_of_the_task(group, kind, said):
    cfg = config()
    cfg[group] = {"_target_": f"{__name__}.{kind.__name__}"}
    with pytest.raises(ConfigError, match=said):
        builders.task(cfg, Numbers(3), torch.device("cpu"))


def test_a_model_without_an_argument_for_weights_begins_with_those_of_a_file_too():
    assert model(_target_="torch.nn.Linear", in_features=4, out_features=3, weights=None).out_features == 3
    with pytest.raises(ConfigError, match=r"^model\.weights=nosuch: there is no such file, nor a run directory$"):
        model(_target_="torch.nn.Linear", in_features=4, out_features=3, weights="nosuch")
    with pytest.raises(ConfigError, match=r"begins a training; here the weights are those of run=: give"):
        model(_target_="torch.nn.Linear", in_features=4, out_features=3, weights=__file__)


class Misnamed(Callback):
    def on_train_epoch_end(self, run):
        raise AssertionError


class WithoutRun(Callback):
    def on_validation(self):
        raise AssertionError


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("Misnamed", r"x: Misnamed\.on_train_epoch_end would never be called: the methods are on_start, on_step"),
        ("WithoutRun", r"WithoutRun\.on_validation can't be called: write def on_validation\(self, run\)"),
    ],
)
def test_a_callback_with_a_method_that_can_not_be_called_is_refused(target, said):
    cfg = config()
    cfg.callbacks = {"x": {"_target_": f"{__name__}.{target}"}}
    with pytest.raises(ConfigError, match=said):
        builders.callbacks(cfg)


def test_a_metric_without_the_methods_of_torchmetrics_is_refused():
    cfg = config()
    cfg.metrics = {"x": {"_target_": "collections.Counter"}}
    with pytest.raises(ConfigError, match=r"metrics\.x: Counter has no compute, reset: give a subclass"):
        builders.eval_metrics(cfg, Numbers(3), torch.device("cpu"), World())
    cfg = OmegaConf.create({"metrics": {"left_out": None}})
    assert not builders.eval_metrics(cfg, Numbers(3), torch.device("cpu"), World()).metrics


def flat(prediction, target):
    return nn.functional.cross_entropy(prediction, target)


def test_an_argument_that_is_missing_is_told_with_what_to_type():
    cfg = OmegaConf.create({"model": {"_target_": "torch.nn.Linear", "in_features": 3}})
    with pytest.raises(ConfigError, match=r"'out_features': give \+model\.out_features=<value>$"):
        make(cfg.model)
    cfg = OmegaConf.create({"loss": {"_target_": f"{__name__}.flat"}})
    with pytest.raises(ConfigError, match=rf"_target_=hydra\.utils\.get_method \+loss\.path={__name__}\.flat$"):
        make(cfg.loss)
    node = OmegaConf.create({"_target_": "hydra.utils.get_method", "path": f"{__name__}.flat"})
    assert make(node) is flat


class Asks(torch.optim.SGD):
    """Its step() can't be called without an argument."""

    def step(self, closure, batch):
        return super().step(closure)


def test_an_optimizer_whose_step_needs_arguments_is_refused():
    cfg = config()
    cfg.optimizer = {"_target_": f"{__name__}.Asks", "lr": 0.1}
    with pytest.raises(ConfigError, match=r"Asks: its step\(\) needs closure, batch.*or optimizer=sgd"):
        optimizers.optimizer(cfg, torch.nn.Linear(1, 1))


def test_a_static_graph_with_micro_batches_is_refused_once_there_are_several_ranks():
    cfg = config(gradient_accumulation_steps=2)
    cfg.parallel.static_graph = True
    with pytest.raises(ConfigError, match=r"parallel.static_graph=true does not go with .* on several ranks"):
        builders.parallel(cfg, World(0, 2))


def criterion(**loss):
    return builders.criterion(OmegaConf.create({"share": 0.25, "loss": loss}))


def test_a_loss_that_smooths_nothing_needs_no_argument_for_it():
    assert isinstance(criterion(_target_="torch.nn.BCEWithLogitsLoss", label_smoothing=0.0), nn.BCEWithLogitsLoss)
    assert criterion(_target_="torch.nn.CrossEntropyLoss", label_smoothing=0.0).label_smoothing == 0


class OnlyForward(nn.Module):
    """A loss as most people write it: its signature is that of `nn.Module`."""

    def forward(self, prediction, target):
        return (prediction - target).square().mean()


class Plain:
    """A loss that is no module, and has no constructor of its own."""


def test_a_loss_of_ones_own_needs_no_constructor():
    for kind in (OnlyForward, Plain):
        assert isinstance(criterion(_target_=f"{__name__}.{kind.__name__}", label_smoothing=0.0), kind)


def test_a_loss_and_a_mix_may_be_partial_functions_as_for_instantiate():
    loss = criterion(_target_="torch.nn.functional.huber_loss", _partial_=True, delta=0.3)
    x, y = torch.randn(8), torch.randn(8)
    assert torch.equal(loss(x, y), nn.functional.huber_loss(x, y, delta=0.3))
    with pytest.raises(ConfigError, match=r"huber_loss.*width"):
        criterion(_target_="torch.nn.functional.huber_loss", _partial_=True, width=0.3)
    cfg = config()
    cfg.mix = {"_target_": "torch.lerp", "_partial_": True, "weight": 0.5}
    assert torch.equal(builders.mix(cfg, Numbers(3))(x, y), torch.lerp(x, y, 0.5))


def test_a_loss_that_cannot_smooth_is_refused_with_the_whole_key_to_leave_out():
    with pytest.raises(ConfigError, match=r"takes no label_smoothing.*type '~loss\.label_smoothing'"):
        criterion(_target_="torch.nn.BCEWithLogitsLoss", label_smoothing=0.1)


def test_an_axis_of_the_classes_that_a_task_is_given_is_no_guess():
    cfg = config()
    cfg.loss = {"_target_": "torch.nn.MultiMarginLoss"}
    cfg.task = {"_target_": "ddp_hydra.tasks.Classification"}
    assert builders.task(cfg, Numbers(3), torch.device("cpu")).guesses_axis
    cfg.task = {**cfg.task, "class_axis": -1}
    given = builders.task(cfg, Numbers(3), torch.device("cpu"))
    assert (given.guesses_axis, given.class_axis) == (False, -1)


def test_arguments_of_a_loss_and_a_task_may_refer_to_other_parts_of_the_config():
    target = "ddp_hydra.tasks.losses.CrossEntropy"
    assert criterion(_target_=target, label_smoothing="${share}", weight=[1, 2]).label_smoothing == 0.25
    cfg = config()
    cfg.task = {"_target_": "ddp_hydra.tasks.classification.LanguageModel", "ignore": "${seed}"}
    assert builders.task(cfg, Numbers(3), torch.device("cpu")).counting.ignore == cfg.seed


def test_a_fused_optimizer_and_complex_parameters_are_refused_with_what_to_type():
    cfg = config()
    cfg.optimizer = {"_target_": "torch.optim.Adam", "lr": 0.1, "fused": True}
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"the model has some of torch.complex64: give optimizer.fused=false"):
        optimizers.optimizer(cfg, model)
    mixed = torch.nn.Linear(2, 2)
    mixed.quantised = torch.nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)  # it is frozen
    assert optimizers.optimizer(cfg, mixed).defaults["fused"] is True
    cfg.optimizer.fused = False
    assert optimizers.optimizer(cfg, model).defaults["fused"] is False


@pytest.mark.parametrize("other", ["foreach", "differentiable"])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "AdamW"])
def test_a_fused_optimizer_that_is_to_compute_otherwise_is_refused_with_what_to_type(name, other):
    cfg = config()
    cfg.optimizer = {"_target_": f"torch.optim.{name}", "lr": 0.1, "fused": True, other: True}
    said = f"{other}=true: torch takes no fused=true with it: give optimizer.fused=false, too"
    with pytest.raises(ConfigError, match=rf"^optimizer\.{said}"):
        optimizers.optimizer(cfg, torch.nn.Linear(2, 2))
    cfg.optimizer.fused = False
    assert optimizers.optimizer(cfg, torch.nn.Linear(2, 2)).defaults[other] is True
    cfg.optimizer = {"a": {**cfg.optimizer, "fused": True}}
    with pytest.raises(ConfigError, match=r"^optimizer\.a\.\w+=true: .* give optimizer\.a\.fused=false"):
        optimizers.optimizer(cfg, torch.nn.Linear(2, 2), update="a")


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", scale)


def test_a_list_in_the_place_of_a_tensor_is_told_with_what_to_type():
    node = {"_target_": f"{__name__}.Scaled", "scale": [1, 2]}
    with pytest.raises(
        ConfigError, match=r"ListConfig.*: for a tensor, give {_target_: torch\.tensor, data: \[\.\.\.\]}"
    ):
        make(OmegaConf.create(node))
    made = make(OmegaConf.create({**node, "scale": {"_target_": "torch.tensor", "data": [1, 2]}}))
    assert made.scale.tolist() == [1, 2]


TASKS = "ddp_hydra.tasks."
OURS = {"_target_": "ddp_hydra.tasks.losses.CrossEntropy", "label_smoothing": 0.0}
MIX = {"_target_": "torchvision.transforms.v2.MixUp", "alpha": 0.2, "num_classes": None}
BINARY = {"_target_": "torch.nn.BCEWithLogitsLoss"}


class Smoothed(Task):
    """Takes a part of the loss's config by an interpolation."""

    def __init__(self, label_smoothing):
        self.label_smoothing = label_smoothing


class Through(Classification):
    """Hands what it does not name to the class it is made from."""

    def __init__(self, width, **options):
        super().__init__(**options)


def with_parts(task, loss=OURS, mix=None):
    cfg = config()
    cfg.task, cfg.loss, cfg.mix = task, loss, mix or {}
    return cfg


@pytest.mark.parametrize(
    ("task", "loss", "mix", "said"),
    [
        (
            "Segmentation",
            {},
            MIX,
            r"^mix\._target_=torchvision\.\S+MixUp would have no effect, as Segmentation takes no mix",
        ),
        ("LanguageModel", {}, MIX, r"takes no mix: give mix=none, or write a task whose __init__ takes `mix`$"),
        ("ModelLoss", {}, MIX, "as ModelLoss takes no mix"),
        ("Regression", {}, MIX, "as Regression takes no mix"),
        (
            "Segmentation",
            {"label_smoothing": 0.1},
            None,
            r"^loss\.label_smoothing=0\.1 would .* takes task\.criterion in",
        ),
        ("Segmentation", BINARY, None, r"^loss\._target_=torch\.nn\.BCEWithLogitsLoss would have no effect, as Segm"),
        (
            "LanguageModel",
            {"weight": [1, 2], "ignore_index": 0},
            None,
            r"^loss\.weight=\[1, 2\] loss\.ignore_index=0 wou",
        ),
        ("ModelLoss", {"label_smoothing": 0.1}, MIX, r"^loss\.label_smoothing=0\.1 would .*; mix\._target_=.* would"),
    ],
)
def test_a_loss_or_a_mix_that_a_task_does_not_take_is_refused(task, loss, mix, said):
    node = {"_target_": TASKS + task, **({"criterion": None} if task == "Segmentation" else {})}
    cfg = with_parts(node, {**OURS, **loss}, mix)
    with pytest.raises(ConfigError, match=said):
        builders.trained_task(cfg, Numbers(3), torch.device("cpu"))
    if task != "Regression":
        builders.task(cfg, Numbers(3), torch.device("cpu"))  # of a trained model
        builders.trained_task(with_parts(node), Numbers(3), torch.device("cpu"))


def test_a_criterion_of_the_tasks_own_node_is_named_in_place_of_the_loss():
    for kind, criterion in (("Segmentation", None), ("Classification", BINARY)):
        cfg = with_parts({"_target_": TASKS + kind, "criterion": criterion}, {**OURS, "label_smoothing": 0.1})
        said = (
            rf"as {kind} takes task\.criterion in its place: give loss=cross_entropy .*'task\.criterion={{_target_: <cl"
        )
        with pytest.raises(ConfigError, match=said):
            builders.trained_task(cfg, Numbers(3), torch.device("cpu"))
        cfg.loss.label_smoothing = 0.0
        builders.trained_task(cfg, Numbers(3), torch.device("cpu"))


@pytest.mark.parametrize(
    "task",
    [
        {"_target_": TASKS + "Classification"},
        {"_target_": f"{__name__}.Through", "width": 3},
        {"_target_": TASKS + "Classification", "criterion": "${loss}", "mix": "${mix}"},
    ],
)
def test_a_task_that_takes_the_loss_and_the_mix_is_built_with_them(task):
    built = builders.trained_task(
        with_parts(task, {**OURS, "label_smoothing": 0.1}, {**MIX, "num_classes": 3}), Numbers(3), torch.device("cpu")
    )
    assert (built.criterion.label_smoothing, type(built.mix).__name__) == (0.1, "MixUp")


@pytest.mark.parametrize("loss", [None, {}, {**OURS, "weight": None, "ignore_index": -100}])
def test_a_loss_that_asks_for_nothing_goes_with_any_task(loss):
    builders.trained_task(with_parts({"_target_": TASKS + "ModelLoss"}, loss), Numbers(3), torch.device("cpu"))


def test_a_key_of_the_task_may_refer_to_one_of_the_loss():
    node = {"_target_": f"{__name__}.Smoothed", "label_smoothing": "${loss.label_smoothing}"}
    cfg = with_parts(node, {**OURS, "label_smoothing": 0.1})
    assert builders.trained_task(cfg, Numbers(3), torch.device("cpu")).label_smoothing == 0.1
    criterion = {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": "${model.smoothing}"}
    cfg = with_parts({"_target_": TASKS + "Segmentation", "criterion": criterion}, {**OURS, "label_smoothing": 0.1})
    cfg.model.smoothing = "${loss.label_smoothing}"
    builders.trained_task(cfg, Numbers(3), torch.device("cpu"))
