"""Mixup and cutmix, as the config gives them, in the loop: targets are the shares of what the model sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from ddp_hydra.errors import ConfigError
from ddp_hydra.tasks import Classification
from ddp_hydra.tasks.losses import CrossEntropy
from tests.ddp_hydra.training.loop_runs import check_resume

pytest.importorskip("torchvision")
CONF = Path(__file__).parents[3] / "conf"


class Colours:
    """Images all of the colour of their class, so that the mean colour of a mixed one is its target."""

    num_classes = 3

    def __init__(self, n: int) -> None:
        self.y = torch.arange(n) % 3

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        colour = nn.functional.one_hot(self.y[index], 3).float()
        return colour[:, None, None].expand(3, 8, 8), self.y[index]


class MeanColour(nn.Linear):
    """One layer over the mean colour; keeps what it sees and says."""

    seen: list[tuple[bool, Tensor, Tensor]] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        colour = x.mean((2, 3))
        logits = super().forward(colour)
        self.seen.append((self.training, colour, logits.detach()))
        return logits


@pytest.fixture
def seen() -> Iterator[list[tuple[bool, Tensor, Tensor]]]:
    MeanColour.seen.clear()
    yield MeanColour.seen
    MeanColour.seen.clear()


def parts(mix: str) -> dict[str, Any]:
    model = {"_target_": "tests.ddp_hydra.training.test_mix.MeanColour", "in_features": 3}
    node = OmegaConf.load(CONF / "mix" / f"{mix}.yaml")
    assert isinstance(node, DictConfig)
    return {"mix": node, "model": model, "data": {"batch_size": 4}}


def by_hand(colours: Tensor, logits: Tensor) -> float:
    return -(colours * logits.log_softmax(1)).sum(1).mean().item()


@pytest.mark.medium
@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_the_loss_is_that_of_the_mixed_targets_and_validation_is_not_mixed(mix, train, seen):
    run = train(data=Colours, epochs=4, log_every_steps=1, parts=parts(mix))
    trained = [(colours, logits) for in_training, colours, logits in seen if in_training]
    judged = [(colours, logits) for in_training, colours, logits in seen if not in_training]
    assert len(trained) == 4 * 2
    assert len(judged) == 4 * 2  # 5 samples in batches of 4
    assert any((colours.max(1).values < 0.99).any() for colours, _ in trained)
    assert all((colours.max(1).values == 1).all() for colours, _ in judged)
    assert [loss for _, loss in run.metrics("train/loss")] == pytest.approx([by_hand(*one) for one in trained])
    validations = [
        by_hand(*map(torch.cat, zip(*judged[begin : begin + 2], strict=True))) for begin in range(0, len(judged), 2)
    ]
    assert [loss for _, loss in run.metrics("val/loss")] == pytest.approx(validations)


@pytest.mark.medium
@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_a_resumed_run_mixes_as_if_never_stopped(mix, train, seen):
    check_resume(train, data=Colours, epochs=3, parts=parts(mix))


def test_a_mix_of_images_refuses_rows_of_a_table_with_what_to_type():
    from torchvision.transforms.v2 import MixUp

    task = Classification(CrossEntropy(), MixUp(alpha=0.2, num_classes=3))
    said = r"MixUp \(mix=\) does not take x \(4, 5\), y \(4,\) \(Expected a .*\): give mix=none"
    with pytest.raises(ConfigError, match=said):
        task.mixed((torch.rand(4, 5), torch.zeros(4).long()))
