"""Loads data sets with Hugging Face's `datasets`: from its hub, a folder of `save_to_disk`, or files.

Formats of files are Parquet, JSON lines, CSV and text.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from ddp_hydra.config import redact
from ddp_hydra.console.text import listed
from ddp_hydra.data.batch import unlike
from ddp_hydra.errors import DataError
from ddp_hydra.storage.urls import FORMATS, as_text

SUFFIXES = {"jsonl": "json", "txt": "text", "tsv": "csv"}
"""Formats of files by suffixes that are no names of formats."""

_NO_TENSOR = re.compile(r"Value\((?:dtype=)?'((?:timestamp|date|time|duration|decimal)[^']*)'")


def load(
    path: str | os.PathLike[str],
    subset: str | None = None,
    split: str = "train",
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    streaming: bool = False,
    columns: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    shuffle_buffer: int = 0,
    seed: int = 0,
    collate: Callable[[list[dict[str, Any]]], Any] | None = None,
    **options: Any,
) -> Any:
    """Return a data set whose samples are dicts of tensors.

    Args:
        path: name on the hub, a folder of `save_to_disk`, or a format of files: parquet, json, csv, text.
        subset: part of a data set on the hub.
        split: of a data set on the hub, or of such a folder.
        files: paths or URLs, which may hold patterns; with a format of files only.
        streaming: read the samples one after the other, and keep nothing on the disk.
        columns: those that a sample has; None for all.
        rename: column -> name in the sample.
        transform: sample -> the columns that it changes or adds, such as a tokenizer's.
        shuffle_buffer: samples of the buffer in which a stream's are mixed; 0: keep the order of the files.
        seed: of the order.
        collate: list of samples -> batch; None for torch's default.
        options: others of `datasets.load_dataset`.

    Raises:
        ValueError: there are no files, or no such column.
        DataError: a column holds times or decimals.
    """
    data = read(path, subset, split, files, streaming, **options)
    import datasets

    if transform is not None:
        data = data.map(transform) if streaming else data.map(transform, new_fingerprint=_fingerprint(data, transform))
    if columns is not None:
        _check(columns := listed(columns), data.column_names)
        data = data.select_columns(columns)
    if rename:
        _check(rename, data.column_names)
        data = data.rename_columns(dict(rename))
    if streaming and shuffle_buffer:
        data = data.shuffle(seed=seed, buffer_size=shuffle_buffer)
    _check_types(data.features or {})
    data = data.with_format("torch")
    for feature in (data.features or {}).values():
        if isinstance(feature, datasets.ClassLabel):
            data.classes = feature.names
    data.collate = collate or collate_columns
    return data


def read(
    path: Any,
    subset: str | None = None,
    split: str = "train",
    files: Any = None,
    streaming: bool = False,
    **options: Any,
) -> Any:
    """Return a data set as `datasets` makes it; arguments: see `load`.

    Raises:
        ValueError: there are no files, or no such split.
    """
    try:
        import datasets
        from datasets.arrow_writer import SchemaInferenceError
    except ImportError:
        raise ModuleNotFoundError("this data set needs datasets: type `pip install 'ddp-hydra[huggingface]'`") from None
    path, files = as_text(path), as_text(files)
    if path in FORMATS and not files:
        raise ValueError(
            f"path={path} reads files: give data.files=<paths or URLs>, and data.val_files=… or data.val=null"
        )
    if files and path in SUFFIXES and not Path(path).exists():
        raise ValueError(f"path={path}: such files are read by data.path={SUFFIXES[path]}")
    datasets.disable_progress_bars()  # they would fill the logs of all ranks
    if (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
        return _from_disk(datasets.load_from_disk(path), path, split, streaming)
    data_files = {"data_files": list(files) if not isinstance(files, str) else files, "split": "train"} if files else {}
    try:
        return datasets.load_dataset(path, subset, **{"split": split, **data_files}, streaming=streaming, **options)
    except (datasets.exceptions.DatasetGenerationError, StopIteration, ValueError) as error:
        if isinstance(error, ValueError) and path not in FORMATS:
            raise
        given = path if files is None else files if isinstance(files, str) else ", ".join(files)
        cause = error.__cause__ or error
        if isinstance(cause, (StopIteration, SchemaInferenceError)) or "corresponds to no data" in str(cause):
            matches = ", or no file has such a name" if "*" in given else ""
            raise ValueError(redact.bare(f"{given} has no rows{matches}")) from None
        raise ValueError(redact.bare(f"{given} can't be read as {path}: {cause}")) from error


def _from_disk(saved: Any, path: str, split: str, streaming: bool) -> Any:
    if isinstance(saved, dict):
        if split not in saved:
            raise ValueError(
                f"{path} has no split {split}, only {', '.join(saved)}: give data.train_split=… and data.val_split=… "
                "or data.val=null"
            )
        saved = saved[split]
    elif split != "train":
        raise ValueError(f"{path} has no splits: give the validation a folder of its own, or data.val=null")
    return saved.to_iterable_dataset() if streaming else saved


def collate_columns(samples: list[Mapping[str, Any]]) -> Any:
    """Make a batch of samples as torch does; name the column that can't be stacked.

    Args:
        samples: of dicts.

    Raises:
        DataError: a column has an empty cell, or tensors of different shapes.
    """
    try:
        batch = default_collate(samples)
    except (RuntimeError, TypeError, KeyError, ValueError):
        if reason := unlike(samples):
            raise _no_batch(reason) from None
        raise
    for name, values in batch.items() if isinstance(batch, dict) else ():
        if isinstance(values, list) and any(value is None for value in values):  # texts, of which the first is there
            raise _no_batch(f"{name!r} has empty cells")
        is_row = isinstance(values, torch.Tensor) and values.ndim == 1 and values.is_floating_point()
        if is_row and values.isnan().any():  # an empty cell of numbers becomes NaN
            raise _no_batch(f"{name!r} has empty cells or NaN")
    return batch


def _no_batch(reason: str) -> DataError:
    return DataError(
        f"{reason}, so the samples make no batch: leave the column out with data.columns=[...], change it with "
        "data.transform (images: .convert('RGB') and one size), or stack it with data.collate"
    )


def _check_types(features: Mapping[str, Any]) -> None:
    for name, feature in features.items():
        # The text of a feature has the types of all its parts.
        if found := _NO_TENSOR.search(str(feature)):
            raise DataError(
                f"{name!r} holds {found[1]}, of which torch makes no tensor: leave the column out with "
                "data.columns=[...]; data.transform can make a column of numbers of it"
            )


def _fingerprint(data: Any, transform: Callable[..., Any]) -> str:
    # Return the name under which transformed samples are cached: another one for each edit of the user's code.
    # `datasets` takes an importable function by its name. What it calls may be anywhere in its project, so that all
    # the Python files count that lie below the entry of sys.path from which it was imported.
    from datasets.fingerprint import Hasher

    function: Any = transform
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    try:
        parts = [data._fingerprint, Hasher.hash(transform), *_sources(module)]
    except Exception:  # what can't be pickled has no name: then nothing is found in the cache
        return uuid.uuid4().hex
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _sources(module: str) -> list[str]:
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if file is None:
        return []
    path = Path(file).resolve()
    depth = module.count(".") + (path.name == "__init__.py")
    root = path.parents[depth]
    if root.name in ("site-packages", "dist-packages"):
        root = root / module.partition(".")[0]
    files = sorted(root.rglob("*.py")) if root.is_dir() else [path]
    return [f"{one.relative_to(root)} {hashlib.sha256(one.read_bytes()).hexdigest()}" for one in files]


def _check(names: Any, there: Sequence[str] | None) -> None:
    if there and (missing := [name for name in names if name not in there]):
        raise ValueError(f"there is no column {', '.join(missing)}, only {', '.join(there)}")
