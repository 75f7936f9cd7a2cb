from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_hydra.data.samplers import Distributed
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE
from ddp_hydra.tasks import Task
from ddp_hydra.training.checkpoint import read
from ddp_hydra.training.consensus import StepConsensus
from ddp_hydra.training.optimizers import UpdateBuilder
from ddp_hydra.training.parallel import Parallel, parameter_groups
from ddp_hydra.training.run import TrainingRun
from tests.ddp_hydra.training.loop_runs import Numbers, check_resume, config, flat
from tests.ddp_hydra.training.plain_torch import CONSTANT, begin_alike


def network() -> nn.Module:
    model = nn.Sequential()
    model.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    model.head = nn.Linear(4, 2)
    return model


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        ([], ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"]),
        (["*", "!head.*"], ["head.weight", "head.bias"]),
        (["body.*"], ["head.weight", "head.bias"]),
        (["!head.*", "*.bias"], ["body.0.weight", "body.1.weight", "head.weight"]),
        (["*", "!body.*", "body.1.*"], ["body.0.weight", "body.0.bias"]),
    ],
)
def test_of_the_patterns_that_fit_the_last_counts(patterns, trained):
    model = network()
    parameter_groups.freeze(model, patterns)
    assert [name for name, part in model.named_parameters() if part.requires_grad] == trained


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["scores.weight"], ["scores.bias"]),
        (["scores.*"], []),
        (["embed.*"], ["scores.bias"]),
        (["*", "!scores.*"], ["embed.weight", "scores.bias"]),
        (["*", "!embed.*"], ["embed.weight"]),
        (["*", "!scores.*", "embed.*"], ["scores.bias"]),
    ],
)
def test_a_tied_tensor_has_all_of_its_names(patterns, trained):
    model = nn.Sequential()
    model.embed, model.scores, model.last = nn.Embedding(5, 4), nn.Linear(4, 5), nn.Linear(1, 1)
    model.scores.weight = model.embed.weight
    parameter_groups.freeze(model, [*patterns, "!last.*"])
    found = [name for name, part in model.named_parameters() if part.requires_grad]
    assert found == [*trained, "last.weight", "last.bias"]


def test_what_the_model_has_frozen_itself_stays_so():
    model = network()
    model.body[0].weight.requires_grad_(False)
    model.packed = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    parameter_groups.freeze(model, ["*.bias"])
    assert [name for name, part in model.named_parameters() if part.requires_grad] == ["body.1.weight", "head.weight"]


def test_norms_whose_weights_are_frozen_are_told():
    model = network()
    parameter_groups.freeze(model, ["body.1.weight"])
    assert parameter_groups.frozen_norms(model, ["body.1.weight"]) == []
    parameter_groups.freeze(model, ["body.*"])
    assert parameter_groups.frozen_norms(model, ["body.*"]) == [model.body[1]]
    assert parameter_groups.frozen_norms(model, ["body.1.weight"]) == []  # the model has frozen its bias itself


def test_a_pattern_that_fits_nothing_is_refused_with_names_that_are_there():
    with pytest.raises(ConfigError, match=r"'!tail\.\*', but no parameter has such a name; .*body\.0\.weight"):
        parameter_groups.freeze(network(), ["*", "!tail.*"])


def test_something_must_be_left():
    with pytest.raises(ConfigError, match=r"leaves nothing to train"):
        parameter_groups.freeze(network(), ["*"])


def test_biases_and_scales_may_be_spared_from_decay():
    model = network()
    optimizer = torch.optim.SGD(
        parameter_groups.parameters(model.parameters(), decay_all=False), lr=0.1, weight_decay=0.3
    )
    groups = [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    assert groups == [(2, 0.3), (4, 0.0)]


def test_frozen_parameters_are_not_the_optimizers():
    model = network()
    parameter_groups.freeze(model, ["*", "!head.*"])
    assert len(list(parameter_groups.parameters(model.parameters(), decay_all=True))) == 2
    assert [len(group["params"]) for group in parameter_groups.parameters(model.parameters(), decay_all=False)] == [
        1,
        1,
    ]


def test_what_is_recomputed_may_be_called_with_keywords():
    class Scaled(nn.Linear):
        def forward(self, x, *, scale):
            return scale * super().forward(x)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Scaled(4, 2)

        def forward(self, x):
            return self.part(x, scale=3.0)

    model, x = Whole(), torch.randn(2, 4)
    before = model(x)
    parameter_groups.activation_checkpointing(model, ["Scaled"])
    assert torch.equal(model(x), before)
    model(x).sum().backward()
    assert torch.equal(model.part.bias.grad, torch.full((2,), 6.0))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_computed_twice_keeps_no_activations_and_changes_nothing(compiled):
    """Also in the statistics of norms."""
    x, found, saved = torch.randn(8, 4), [], []
    for classes in ([], ["Sequential"]):
        torch.manual_seed(0)
        model = nn.Sequential()
        model.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        model.frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        parameter_groups.activation_checkpointing(model, classes)
        model.frozen[1].eval()
        call = torch.compile(model, backend="aot_eager") if compiled else model
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t.numel()), t)[1], lambda t: t):
            loss = call(x).square().mean()
        loss.backward()
        saved.append(len(kept))
        assert all(norm.track_running_stats for norm in (model.body[1], model.frozen[1]))
        found.append((model.state_dict(), [part.grad for part in model.parameters()]))
    assert saved[1] < saved[0]
    (plain, gradients), (twice, gradients_twice) = found
    assert plain["body.1.num_batches_tracked"] == 1
    for name, value in plain.items():
        torch.testing.assert_close(twice[name], value)
    torch.testing.assert_close(gradients_twice, gradients)


def test_a_copy_of_what_is_recomputed_computes_with_its_own_weights():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    parameter_groups.activation_checkpointing(model, ["Linear"])
    copied, x = deepcopy(model), torch.randn(2, 4)
    before = copied(x)
    with torch.no_grad():
        model[0][0].weight.zero_()
    assert torch.equal(copied(x), before)
    assert not torch.equal(model(x), before)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        begin_alike(self)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def layerwise(model, lr, body_lr=0.01):
    return torch.optim.SGD(
        [{"params": model.head.parameters()}, {"params": model.body.parameters(), "lr": body_lr}], lr
    )


def headless(model, lr):
    return torch.optim.SGD(model.body.parameters(), lr)


def strange(model, lr):
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr)


def by_function(name, **options):
    optimizer = {"_target_": f"{__name__}.{name}", "lr": 0.1, **options}
    return {"model": {"_target_": f"{__name__}.Halves"}, "optimizer": optimizer, "scheduler": CONSTANT}


def test_a_function_of_the_model_makes_groups_as_by_hand(train):
    model, data, sampler = Halves(), Numbers(9), Distributed(9, 2)
    optimizer = layerwise(model, 0.1)
    for epoch in range(2):
        for indices in sampler.batches(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[list(indices)]), data.y[list(indices)]).backward()
            optimizer.step()
    run = train(whole=by_function("layerwise"))
    assert flat(read(run.last)["model"]) == flat(model.state_dict())
    assert "rate      0.01 to 0.1" in run.header


def test_an_argument_of_such_a_function_may_change_in_a_resume(train):
    first = train(whole=by_function("layerwise"), stop_at=("update", 3))
    resumed = train(whole=by_function("layerwise", body_lr=0.0), resume=first.last)
    for name, value in read(first.last)["model"].items():
        assert torch.equal(value, read(resumed.last)["model"][name]) == name.startswith("body.")


def test_frozen_parameters_are_taken_out_of_such_groups(train):
    saved = read(train(whole=by_function("layerwise"), freeze=["body.*"]).last)["optimizer"]
    assert [len(group["params"]) for group in saved["param_groups"]] == [2, 0]


def decayed(model, lr, body_lr=0.01, only_trained=False):
    groups = []
    for part, rate in ((model.head, lr), (model.body, body_lr)):
        for name, parameter in part.named_parameters():
            if parameter.requires_grad or not only_trained:
                decay = 0.1 if name == "weight" else 0.0
                groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    return torch.optim.SGD(groups, lr, momentum=0.9)


def unfreezing(**options):
    return {"callbacks": {"it": {"_target_": "ddp_hydra.training.callbacks.Unfreeze", "after_epochs": 1, **options}}}


@pytest.mark.parametrize("only_trained", [False, True])
def test_what_is_unfrozen_has_the_settings_of_such_a_function(train, only_trained):
    model, data, sampler = Halves(), Numbers(9), Distributed(9, 2)
    optimizer = decayed(model, 0.1)
    for epoch in range(2):
        model.body.requires_grad_(epoch > 0)
        for indices in sampler.batches(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(data.x[list(indices)]), data.y[list(indices)]).backward()
            optimizer.step()
    given = {"whole": by_function("decayed", only_trained=only_trained), "parts": unfreezing(), "freeze": ["body.*"]}
    run, _ = check_resume(train, ("forward", 7), **given)
    assert flat(read(run.last)["model"]) == flat(model.state_dict())


def test_a_rate_of_the_callback_goes_before_and_a_former_checkpoint_keeps_its_groups(train, monkeypatch):
    given = {"whole": by_function("decayed"), "parts": unfreezing(lr=0.5), "freeze": ["body.*"]}
    groups = read(train(**given).last)["optimizer"]["param_groups"]
    found = [(group["params"], group["lr"], group["weight_decay"]) for group in groups if group["params"]]
    assert found[2:] == [(["body.weight"], 0.5, 0.1), (["body.bias"], 0.5, 0.0)]
    monkeypatch.setattr(TrainingRun, "unfreeze", unfreeze_as_before)
    _, former = check_resume(train, ("forward", 7), **given)
    monkeypatch.undo()
    groups = read(train(resume=former.last, **given).last)["optimizer"]["param_groups"]
    assert groups[-1]["params"] == ["body.weight", "body.bias"]


def unfreeze_as_before(run, patterns, lr):
    stage = {"patterns": patterns, "lr": lr}
    run.updates = run.builder.unfrozen(run.updates, stage)
    run.state.unfrozen.append(stage)


def test_a_function_that_gives_no_group_to_what_is_frozen_leaves_it_the_rate_of_the_others(train):
    given = {"whole": by_function("headed"), "parts": unfreezing(), "freeze": ["body.*"]}
    run, _ = check_resume(train, ("forward", 7), **given)
    assert [group["lr"] for group in read(run.last)["optimizer"]["param_groups"]] == [0.1, 0.1]


def headed(model, lr):
    return torch.optim.SGD(model.head.parameters(), lr)


class Joined(torch.optim.Optimizer):
    def __init__(self, *several):
        self.several, self.defaults = several, {}

    @property
    def param_groups(self):
        return [group for one in self.several for group in one.param_groups]


def test_an_optimizer_that_drops_a_new_group_can_not_unfreeze():
    cfg, model = config(freeze=["body.*"]), Halves()
    parameter_groups.freeze(model, cfg.trainer.freeze)
    device = torch.device("cpu")
    builder = UpdateBuilder(cfg, Parallel().adopt(model), Task(), StepConsensus(ALONE), 2, device)
    with pytest.raises(ConfigError, match=r"Joined\.add_param_group adds nothing"):
        builder.unfreeze(
            {"": (model, Joined(torch.optim.SGD(model.head.parameters(), 0.1)))}, {"patterns": ["*"], "lr": None}
        )


def test_a_loss_with_parameters_is_an_argument_of_such_a_function(train):
    whole = by_function("layerwise") | {"loss": {"_target_": f"{__name__}.Scaled"}}
    with pytest.raises(ConfigError, match=r"leaves out loss\.scale: give it an argument `loss`$"):
        train(whole=whole)


class Scaled(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return super().forward(output * self.scale, target)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("headless", r"but it leaves out head.weight, head.bias: to train a part only, give trainer.freeze"),
        ("strange", "has parameters of something else than the model"),
    ],
)
def test_such_a_function_gives_all_that_is_trained(train, name, said):
    with pytest.raises(ConfigError, match=said):
        train(whole=by_function(name))
