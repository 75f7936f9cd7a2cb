"""Settings of the training that don't go together are refused before anything is started."""

from __future__ import annotations

import pytest

from ddp_hydra.config import validate
from ddp_hydra.errors import ConfigError
from tests.ddp_hydra.config.test_schema import composed

ACCUMULATES = ("parallel.static_graph=true", "trainer.gradient_accumulation_steps=2")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            (*ACCUMULATES, "cluster=local", "cluster.n_workers=2"),
            "^parallel.static_graph=true does not go with trainer.gradient_accumulation_steps=2",
        ),
        ((*ACCUMULATES, "cluster=ssh", "dispatch.ranks=3"), "^parallel.static_graph=true does not go"),
        (
            ("optimizer._target_=torch.optim.LBFGS",),
            r"^optimizer._target_=torch.optim.LBFGS: its step\(\) needs a closure: give optimizer=adamw or sgd",
        ),
        (
            ("optimizer=gan_adam", "optimizer.discriminator._target_=torch.optim.LBFGS"),
            "^optimizer.discriminator._target_=torch.optim.LBFGS: its step",
        ),
        (
            ("loss._target_=torch.nn.CrossEntropyLoss", "+loss.reduction=none"),
            "^loss.reduction=none of CrossEntropyLoss: give loss.reduction=mean or sum",
        ),
        (("dispatch.backend=nccl", "trainer.device=cpu"), "^dispatch.backend=nccl does not go with trainer.device=cpu"),
        (
            ("mix=mixup", "model.num_classes=3", "+loss.ignore_index=1"),
            "^loss.ignore_index=1 does not go with .*type mix=none, or '~loss.ignore_index'",
        ),
        (
            ("parallel=dp", "trainer.activation_checkpointing=[Block]"),
            r"^trainer.activation_checkpointing=\['Block'\] does not go with parallel=dp",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        validate.check(composed(*overrides))


@pytest.mark.medium
@pytest.mark.parametrize(
    "overrides",
    [
        (*ACCUMULATES, "cluster=inline"),
        (*ACCUMULATES, "cluster=local", "cluster.n_workers=1"),
        (ACCUMULATES[0], "cluster.n_workers=2"),
        (ACCUMULATES[1], "cluster.n_workers=2"),
        ("parallel=dp",),
        ("trainer.activation_checkpointing=[Block]",),
    ],
)
def test_what_goes_together_is_not(overrides):
    validate.check(composed(*overrides))
