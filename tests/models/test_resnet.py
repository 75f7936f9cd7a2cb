"""The residual networks: what comes out, and what a bad argument says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.resnet import resnet18, resnet50


@pytest.mark.medium
@pytest.mark.parametrize("build", [resnet18, resnet50])
@pytest.mark.parametrize("small_images", [False, True])
def test_gives_one_logit_per_class(build, small_images):
    with torch.device("meta"):  # only shapes are computed
        logits = build(num_classes=7, small_images=small_images)(torch.zeros(2, 3, 32, 32))
    assert logits.shape == (2, 7)


@pytest.mark.parametrize(("small_images", "side"), [(True, 32), (False, 8)])
def test_small_images_keep_the_resolution_up_to_the_first_layer(small_images, side):
    with torch.device("meta"):
        network = resnet18(num_classes=10, small_images=small_images)
        x = network.maxpool(network.relu(network.bn1(network.conv1(torch.zeros(2, 3, 32, 32)))))
    assert x.shape[-2:] == (side, side)


@pytest.mark.medium
def test_pretrained_weights_are_kept_and_the_last_layer_fits_the_classes(monkeypatch):
    asked = []

    def offline(self, *args, **kwargs):
        asked.append(self.name)
        network = resnet18(num_classes=1000)
        nn.init.constant_(network.bn1.weight, 0.25)
        return network.state_dict()

    monkeypatch.setattr("torchvision.models.ResNet18_Weights.get_state_dict", offline)
    network = resnet18(num_classes=10, weights="DEFAULT")
    assert asked == ["IMAGENET1K_V1"]
    assert torch.all(network.bn1.weight == 0.25)
    assert network.fc.out_features == 10


def test_unknown_weights_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'best'.*IMAGENET1K_V1.*model\.weights=null"):
        resnet18(num_classes=10, weights="best")


@pytest.mark.parametrize("num_classes", [0, -1, None, "ten"])
def test_a_number_of_classes_that_is_none_is_refused(num_classes):
    with pytest.raises(ValueError, match=r"model\.num_classes=10"):
        resnet50(num_classes=num_classes)
