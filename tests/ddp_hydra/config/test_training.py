"""Settings of the training that don't go together are refused before anything is started."""

from __future__ import annotations

import pytest

from ddp_hydra.config import validate
from ddp_hydra.errors import ConfigError
from tests.ddp_hydra.config.configs import changed

STATIC, ACCUMULATES = {"parallel.static_graph": True}, {"trainer.gradient_accumulation_steps": 2}
BOTH = {**STATIC, **ACCUMULATES}
LBFGS = "torch.optim.LBFGS"
DP = {"parallel._target_": "ddp_hydra.training.parallel.dp.DP"}
CHECKPOINTS = {"trainer.activation_checkpointing": ["Block"]}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {**BOTH, "cluster.n_workers": 2},
            "^parallel.static_graph=true does not go with trainer.gradient_accumulation_steps=2",
        ),
        ({**BOTH, "cluster.n_workers": None, "dispatch.ranks": 3}, "^parallel.static_graph=true does not go"),
        (
            {"optimizer._target_": LBFGS},
            rf"^optimizer._target_={LBFGS}: its step\(\) needs a closure: give optimizer=adamw or sgd",
        ),
        ({"optimizer.critic": {"_target_": LBFGS}}, f"^optimizer.critic._target_={LBFGS}: its step"),
        (
            {"loss._target_": "torch.nn.CrossEntropyLoss", "loss.reduction": "none"},
            "^loss.reduction=none of CrossEntropyLoss: give loss.reduction=mean or sum",
        ),
        (
            {"dispatch.backend": "nccl", "trainer.device": "cpu"},
            "^dispatch.backend=nccl does not go with trainer.device=cpu",
        ),
        (
            {"mix._target_": "torchvision.transforms.v2.MixUp", "loss.ignore_index": 1},
            "^loss.ignore_index=1 does not go with .*type mix=none, or '~loss.ignore_index'",
        ),
        ({**DP, **CHECKPOINTS}, r"^trainer.activation_checkpointing=\['Block'\] does not go with parallel=dp"),
    ],
)
def test_what_does_not_go_together_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        validate.check(changed(values))


@pytest.mark.medium
@pytest.mark.parametrize(
    "values",
    [
        {**BOTH, "cluster.n_workers": None},
        {**BOTH, "cluster.n_workers": 1},
        {**STATIC, "cluster.n_workers": 2},
        {**ACCUMULATES, "cluster.n_workers": 2},
        DP,
        CHECKPOINTS,
    ],
    ids=str,
)
def test_what_goes_together_is_not(values):
    validate.check(changed(values))
