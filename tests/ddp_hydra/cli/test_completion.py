from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from ddp_hydra.cli.completion import choices
from ddp_hydra.config.schema import Config


@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("trainer.precision=", ["fp32", "tf32", "bf16", "fp16"]),
        ("trainer.precision=fp", ["fp32", "fp16"]),
        ("trainer.compile=", ["default", "reduce_overhead", "max_autotune", "max_autotune_no_cudagraphs", "null"]),
        ("trainer.channels_last=", ["false", "true", "null"]),
        ("detach=t", ["true"]),
        ("trainer.precision", []),
        ("trainer.epochs=", []),
        ("trainer.nothing=", []),
        ("nothing.at.all=", []),
    ],
)
def test_all_values_of_an_enum_are_offered(word, offered):
    assert choices(OmegaConf.structured(Config), word) == [f"{word.partition('=')[0]}={value}" for value in offered]
