"""dask-pytorch-ddp's S3ImageFolder, as published."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import data_common as common
import data_loader


def published() -> ModuleType:
    """Its module for data alone: the package imports what today's Dask does not have any more."""
    package = importlib.util.find_spec("dask_pytorch_ddp")
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location("dask_pytorch_ddp_data", Path(package.origin).with_name("data.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Read in each run."""
    arguments = common.arguments()
    results = []
    for workers, endpoint, images in common.runs(arguments):
        os.environ["AWS_ENDPOINT_URL"] = endpoint  # it has no argument for it
        dataset = published().S3ImageFolder("photos", "train", transform=data_loader.to_crop)
        order = common.shuffled(images, arguments.seed)
        results += data_loader.read_through_loader(dataset, order, workers)
    common.say(results)


if __name__ == "__main__":
    main()
