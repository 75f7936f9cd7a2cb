"""`parallel=fsdp2`: the bits of DDP, checkpoints that load into any layout, and what can't be sharded is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddp_hydra.config.project import pack
from ddp_hydra.errors import ConfigError, RankFailed
from ddp_hydra.rank.world import World, in_world
from ddp_hydra.training.parallel import fsdp2
from tests.integration.support import training
from tests.integration.support.training import BLOCKS, Trained, learned
from tests.integration.test_exactness import assert_equal

pytestmark = pytest.mark.integration


@pytest.fixture
def train(project, tmp_path) -> Callable[..., Trained]:
    """Run the training loop on some ranks of a cluster."""

    def run(client: Any, name: str, *overrides: str, **options: Any) -> Trained:
        return training.train(client, project, tmp_path / name, *BLOCKS, *overrides, **options)

    return run


EVERYTHING = (
    "trainer.epochs=2",
    "model.dropout=0.3",
    "trainer.gradient_accumulation_steps=2",
    "data.batch_size=4",
    "trainer.ema_decay=0.9",
    "trainer.activation_checkpointing=[Block]",
    "trainer.freeze=['stem.bias']",
    "trainer.on_nonfinite=rollback",
    "trainer.checkpoint_every_steps=4",
    "faults=['nan,rank=1,step=6']",
)
NO_SAVE = ("trainer.epochs=2", "trainer.ema_decay=0.9", "trainer.checkpoint_every_epochs=2")
"""A validation is followed by a step, and not by a save, which would gather and free what is whole."""


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, EVERYTHING, id="everything"),
        pytest.param(1, ["trainer.max_steps=8"], id="one rank"),
        pytest.param(2, ["trainer.max_steps=8", "model.tied=true"], id="tied"),
        pytest.param(2, ["trainer.max_steps=8", "parallel.blocks=[Block,Linear]"], id="small", marks=pytest.mark.slow),
        pytest.param(2, [*NO_SAVE, "parallel.reshard_after_forward=false"], id="kept", marks=pytest.mark.slow),
        pytest.param(
            2, ["trainer.max_steps=8", "optimizer=sgd", "optimizer.fused=false"], id="sgd", marks=pytest.mark.slow
        ),
    ],
)
def test_it_has_the_bits_of_ddp(client2, train, ranks, options):
    both = [one for one in options if not one.startswith("parallel.")]
    sharded = train(client2, "fsdp2", "parallel=fsdp2", *options, ranks=ranks)
    whole = train(client2, "ddp", "parallel=ddp", *both, ranks=ranks)
    assert_equal(learned(sharded), learned(whole))
    assert sharded.metrics("grad_norm") == whole.metrics("grad_norm")


ODD = ("model._target_=models.blocks.Odd",)
REFUSED = {
    "Adafactor can't compute with shares of parameters": [
        "optimizer=sgd",
        "optimizer._target_=torch.optim.Adafactor",
        *(f"~optimizer.{key}" for key in ("momentum", "nesterov", "fused")),
    ],
    "Mixing can't compute with shares of parameters (models/blocks.py, line": [
        "optimizer=sgd",
        "optimizer._target_=models.blocks.Mixing",
        *(f"~optimizer.{key}" for key in ("momentum", "nesterov", "weight_decay", "fused")),
    ],
    "LowMoments keeps its state in tensors of its own, of whose shares": [
        "optimizer=sgd",
        "optimizer._target_=models.blocks.LowMoments",
    ],
    "does not go with trainer.precision=fp16: give trainer.precision=bf16": ["trainer.precision=fp16"],
    "parallel.replicas=3 does not divide this job's 2 ranks": ["parallel.replicas=3"],
    "parallel.blocks has Bottleneck, but the model has BatchNorm1d, Block, Blocks,": ["parallel.blocks=[Bottleneck]"],
    "does not go with trainer.channels_last=true": ["trainer.channels_last=true"],
    "parallel.cpu_offload=true is for GPUs": ["parallel.cpu_offload=true"],
    "the loss Centres has parameters: make it a part of the model": [
        "loss._target_=models.blocks.Centres",
        "~loss.label_smoothing",
    ],
    "can't share parameters with no axis: scale: make them": [*ODD, "+model.odd=scalar"],
    "trainer.precision=fp8 needs a GPU": ["trainer.precision=fp8"],
    "would not call the hooks of parameters: stem.bias: change gradients in": [*ODD, "+model.odd=hook"],
    "in no nn.ParameterList, ParameterDict or ModuleList: own: keep them": [*ODD, "+model.odd=list"],
    "and buffers stay as they are": [*ODD, "+model.odd=mask", "trainer.precision=bf16"],
    "Torch said: models/blocks.py, line": [*ODD, "+model.odd=looks"],
    "parameters of a block need one type": [*ODD, "+model.odd=double"],
    "the task's step did not call the model itself": ["task._target_=models.blocks.HeadAlone"],
}
OTHERS_REFUSED = {
    "parallel=none is for one rank, but this job has 2: give dispatch.ranks=1": ["parallel=none"],
    "parallel.comm_hook=zip: give one of auto, none, shared, fp16": ["parallel=ddp", "parallel.comm_hook=zip"],
    "sync_batchnorm=true needs GPUs": ["parallel=ddp", "parallel.sync_batchnorm=true"],
    "trainer.freeze has 'nothing.*', but no parameter has such a name; ": ["trainer.freeze=['nothing.*']"],
    "'Bottleneck', but the model has BatchNorm1d": ["trainer.activation_checkpointing=[Bottleneck]"],
}
"""Of other kinds, and of all."""


@in_world
def messages(world: World, configs: list[dict[str, Any]]) -> list[str]:
    """On each rank: what is said of some jobs that are refused."""
    from ddp_hydra.training.loop import train

    found = []
    for config in configs:
        try:
            train(world, config)
        except Exception as error:
            found.append(str(error))
        world.kept.clear()
    return found


def test_what_can_not_be_sharded_is_refused(client2, gang, project):
    fsdp2 = {sentence: ["parallel=fsdp2", *words] for sentence, words in REFUSED.items()}
    refused = fsdp2 | OTHERS_REFUSED
    configs = [training.composed(project, *BLOCKS, *words) for words in refused.values()]
    for found in gang(client2, project=pack(project), backend="gloo").run(messages, configs):
        for sentence, said in zip(refused, found, strict=True):
            assert sentence in said


def test_a_job_that_is_refused_ends_at_once(client2, train):
    sentence, words = list(REFUSED.items())[-1]
    with pytest.raises(RankFailed, match=re.escape(sentence)) as caught:
        train(client2, "run", "parallel=fsdp2", *words)
    assert "Connection closed" not in str(caught.value)


def test_an_optimizer_of_torchao_is_refused_before_its_first_step():
    low, plain = (type(name, (torch.optim.SGD,), {"__module__": "torchao.optim.adam"}) for name in ("Adam8bit", "Adam"))
    low.block_size, plain.block_size = 256, math.inf
    fsdp2.check_optimizer(plain([torch.zeros(2)]))
    with pytest.raises(ConfigError, match="Adam8bit keeps its state in tensors of its own"):
        fsdp2.check_optimizer(low([torch.zeros(2)]))


def test_a_rank_where_nothing_counts_takes_part(client2, train):
    """Rank 1 has no sample that counts in any step."""
    counted = ["task._target_=models.blocks.FirstHalf", "trainer.max_steps=4", "model.over_batch=false"]
    sharded, whole = (train(client2, kind, f"parallel={kind}", *counted) for kind in ("fsdp2", "ddp"))
    assert_equal(learned(sharded), learned(whole))


def test_a_function_may_share_parts_of_the_model_otherwise(client2, train):
    """By tensor parallelism, whose sums round otherwise; a checkpoint of it and one of another layout load into it.

    Ranks have equally many validation samples, as this takes.
    """
    options = [
        *("trainer.max_steps=6", "trainer.checkpoint_every_steps=4", "data.val.n=32", "trainer.clip_norm=1"),
        *("model.over_batch=false", "trainer.ema_decay=0.9"),
    ]
    width = ("parallel=fsdp2", "parallel.fn=models.blocks.over_width")
    shared, whole = train(client2, "shared", *width, *options), train(client2, "whole", "parallel=ddp", *options)
    later = whole.folder / "checkpoints" / "step-000004.pt"
    resumed = train(client2, "resumed", *width, *options, resume=later)
    rest = [line for line in whole.metrics() if line["step"] > 4]
    for run, lines in ((shared, whole.metrics()), (resumed, rest)):
        found = [line for line in run.metrics() if line["step"] >= lines[0]["step"]]
        for line, wanted in zip(found, lines, strict=True):
            assert line == pytest.approx(wanted, rel=1e-4)
    states = (run.checkpoint("last.pt")["model"] for run in (shared, whole))
    for (name, value), (wanted, other) in zip(*map(dict.items, states), strict=True):  # it loads into other layouts
        assert (name, value.shape) == (wanted, other.shape)


def test_parameters_are_unfrozen_after_a_validation_and_shown(client2, train):
    """They are shares, of which all ranks make a histogram."""
    options = [
        "trainer.epochs=2",
        "trainer.freeze=['*','!head*']",
        "+callbacks.unfreeze={_target_: ddp_hydra.training.callbacks.Unfreeze, after_epochs: 1}",
        "+callbacks.show={_target_: ddp_hydra.training.callbacks.Histograms, every_steps: 4}",
    ]
    sharded, whole = (train(client2, kind, f"parallel={kind}", *options) for kind in ("fsdp2", "ddp"))
    assert_equal(learned(sharded), learned(whole))
    shown = [[(one.step, one.data) for one in run.records if one.kind == "histogram"] for run in (sharded, whole)]
    assert shown[0] == shown[1] != []


def test_it_computes_in_bf16_and_keeps_fp32(client2, train):
    run = train(client2, "run", "parallel=fsdp2", "trainer.precision=bf16", "trainer.max_steps=12")
    losses = [line["train/loss"] for line in run.metrics() if "train/loss" in line]
    assert losses[-1] < losses[0]
    assert {value.dtype for value in run.checkpoint("last.pt")["model"].values()} == {torch.float32, torch.int64}
