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
    said = r"MixUp \(mix=\) does not take x \(4, 5\) float32, y \(4,\) int64 \(Expected a .*\): give mix=none"
    with pytest.raises(ConfigError, match=said):
        task.mixed((torch.rand(4, 5), torch.zeros(4).long()))


IMAGES, LABELS = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
FLOATS, LONG = "make floats of x with a transform, such as v2.ToDtype", "let the data set return y.long"


@pytest.mark.parametrize(
    ("kind", "x", "y", "said"),
    [
        (
            "MixUp",
            IMAGES.byte(),
            LABELS,
            rf"x \(4, 3, 8, 8\) uint8, y \(4,\) int64 \(.*\): {FLOATS}.*, or give mix=none",
        ),
        ("MixUp", IMAGES, LABELS.int(), rf"y \(4,\) int32 \(.*\): {LONG}\(\), or give mix=none"),
        ("MixUp", IMAGES.byte(), LABELS.int(), f"{FLOATS}.* and {LONG}"),
        ("CutMix", IMAGES, LABELS.int(), rf"{LONG}\(\), or give mix=none"),
        ("CutMix", IMAGES, LABELS.float(), r"\): give mix=none"),
        ("CutMix", IMAGES, LABELS + 1, r"\): give mix=none"),
        ("CutMix", {"image": torch.rand(4)}, LABELS, r"does not take x of dict, y \(4,\) int64 \(.*\): give mix=none"),
    ],
)
def test_a_mix_refuses_types_that_it_can_not_take_with_what_to_type(kind, x, y, said):
    from torchvision.transforms import v2

    with pytest.raises(ConfigError, match=said):
        Classification(CrossEntropy(), getattr(v2, kind)(num_classes=3)).mixed((x, y))


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_a_mistake_in_a_mix_of_ones_own_stays_what_it_is(error):
    def broken(x, y):
        raise error("mine")

    with pytest.raises(error, match="mine"):
        Classification(CrossEntropy(), broken).mixed((IMAGES, LABELS))


def test_a_fault_of_a_device_in_a_mix_stays_what_it_is(monkeypatch):
    from torchvision.transforms.v2 import MixUp

    def fail(*_):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(MixUp, "forward", fail)
    with pytest.raises(RuntimeError, match="ECC"):
        Classification(CrossEntropy(), MixUp(num_classes=3)).mixed((IMAGES, LABELS))


def test_memory_that_runs_out_in_a_mix_is_no_mistake_of_types(monkeypatch):
    from torchvision.transforms.v2 import MixUp

    def full(*batch):
        raise torch.OutOfMemoryError("full")

    mix = MixUp(num_classes=3)
    monkeypatch.setattr(mix, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        Classification(CrossEntropy(), mix).mixed((IMAGES, LABELS))
