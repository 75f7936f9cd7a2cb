"""Build torchvision's residual networks, with an optional stem for small images."""

from __future__ import annotations

from torch import nn
from torchvision.models import ResNet, get_model, get_model_weights


def resnet18(
    num_classes: int, weights: str | None = None, small_images: bool = False, norm_momentum: float = 0.1
) -> ResNet:
    """Build a ResNet-18 (11.2 M parameters at 10 classes).

    Args:
        num_classes: width of the last layer.
        weights: None for random ones, else a name of torchvision's `ResNet18_Weights`, e.g. "DEFAULT". The last layer
            is random unless `num_classes` is 1000, as for ImageNet.
        small_images: whether to use a 3x3 stem without stride and max pool, for images of about 32x32 pixels. It is
            slower, because every layer then gets 16 times the pixels.
        norm_momentum: weight of one step in the statistics that BatchNorm validates with; use more for short runs.

    Returns:
        A module: images float (batch, 3, height, width) -> logits (batch, num_classes).

    Raises:
        ValueError: `weights` is not a known name, or `num_classes` is not a positive number.
    """
    return _build("resnet18", num_classes, weights, small_images, norm_momentum)


def resnet50(
    num_classes: int, weights: str | None = None, small_images: bool = False, norm_momentum: float = 0.1
) -> ResNet:
    """Build a ResNet-50 (23.5 M parameters at 10 classes), as `resnet18` does; `weights` is of `ResNet50_Weights`."""
    return _build("resnet50", num_classes, weights, small_images, norm_momentum)


def _build(name: str, num_classes: int, weights: str | None, small_images: bool, norm_momentum: float) -> ResNet:
    """Build a network; replace its last layer and its stem as needed, and set the momentum of the norms."""
    known = get_model_weights(name)
    if weights is not None and weights not in known.__members__:
        raise ValueError(
            f"there are no weights {weights!r}; allowed are null and {', '.join(known.__members__)}: "
            "type model.weights=null or one of these"
        )
    if not isinstance(num_classes, int) or num_classes < 1:
        raise ValueError(
            f"num_classes is {num_classes!r}, and must be a positive whole number: type "
            "model.num_classes=10, or use a data set that has `classes`"
        )
    network: ResNet = get_model(name, weights=weights)
    if weights is None or num_classes != network.fc.out_features:
        network.fc = nn.Linear(network.fc.in_features, num_classes)
    if small_images:
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        network.maxpool = nn.Identity()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = norm_momentum
    return network
