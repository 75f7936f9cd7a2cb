"""Data sets, samplers and the loader. Nothing here knows of ranks, Dask or jobs.

The data sets are imported when they are first used: they need torch, which takes seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_hydra.data.image_folder import S3ImageFolder
    from ddp_hydra.data.image_table import ImageTable
    from ddp_hydra.data.mix import Mix
    from ddp_hydra.data.parquet_rows import ParquetRows
    from ddp_hydra.data.webdataset import TarSamples
    from ddp_hydra.data.wids import WidsImages, WidsShards

__all__ = ["ImageTable", "Mix", "ParquetRows", "S3ImageFolder", "TarSamples", "WidsImages", "WidsShards"]
_MODULES = {
    "ImageTable": "image_table",
    "Mix": "mix",
    "ParquetRows": "parquet_rows",
    "S3ImageFolder": "image_folder",
    "TarSamples": "webdataset",
    "WidsImages": "wids",
    "WidsShards": "wids",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
