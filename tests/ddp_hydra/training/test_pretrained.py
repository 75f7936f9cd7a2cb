"""Runs begin with the weights of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_hydra.errors import CheckpointError
from ddp_hydra.training.checkpoint import read
from tests.ddp_hydra.training.loop_runs import weights


@pytest.mark.medium
def test_a_run_may_begin_with_the_weights_of_another_but_its_last_layer(train, tmp_path):
    start = train(epochs=3)
    same = train(epochs=1, start=start.last, parts={"optimizer": {"lr": 1e-30}})
    assert torch.allclose(weights(same), weights(start))
    assert "weights   all from a file" in same.header
    wider = train(
        epochs=1, start=start.last, parts={"model": {"_target_": "tests.ddp_hydra.training.test_pretrained.Deeper"}}
    )
    assert "weights   all from a file but head.weight, head.bias" in wider.header


class Deeper(torch.nn.Linear):
    """With one layer more."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"state_dict": state}], ids=["bare", "wrapped"])
def test_anybodys_weights_will_do(wrap, train, tmp_path):
    file = tmp_path / "weights.pth"
    values = {"module.weight": torch.ones(3, 4), "module.bias": torch.zeros(3)}
    torch.save(wrap(values), file)
    run = train(epochs=1, start=file, parts={"optimizer": {"lr": 1e-30}})
    assert torch.equal(read(run.last)["model"]["weight"], torch.ones(3, 4))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"a": torch.ones(2), "b": torch.ones(2)},
            r"weights for 0 of the 2 tensors.*begin with a, b, the model's with",
        ),
        ([1, 2], r"holds no weights"),
        (b"nothing", r"can't be read as weights"),
    ],
)
def test_what_are_no_weights_of_this_model_are_refused(content, said, train, tmp_path):
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=said):
        train(start=file)
