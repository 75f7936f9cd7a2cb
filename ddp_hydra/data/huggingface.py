"""Loads data sets with Hugging Face's `datasets`: from its hub, or Parquet, JSON lines, CSV and text files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

FILES = ("parquet", "json", "csv", "text", "arrow", "webdataset")
"""Formats of files, which stand in the place of a name on the hub."""


def load(
    path: str,
    subset: str | None = None,
    split: str = "train",
    files: str | Sequence[str] | None = None,
    streaming: bool = False,
    columns: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    shuffle_buffer: int = 0,
    seed: int = 0,
    collate: Callable[[list[dict[str, Any]]], Any] | None = None,
    **options: Any,
) -> Any:
    """Return a data set whose samples are dicts of tensors.

    Args:
        path: name on the hub, or a format of files: parquet, json, csv, text.
        subset: part of a data set on the hub.
        split: of a data set on the hub.
        files: paths or URLs, which may hold patterns; with a format of files only.
        streaming: read the samples one after the other, and keep nothing on the disk.
        columns: those that a sample has; None for all.
        rename: column -> name in the sample.
        transform: sample -> the columns that it changes or adds, such as a tokenizer's.
        shuffle_buffer: when streaming, mix the samples in a buffer of so many; 0: keep the order of the files.
        seed: of the order.
        collate: list of samples -> batch; None for torch's default.
        options: others of `datasets.load_dataset`.

    Raises:
        ValueError: there are no files, or no such column.
    """
    try:
        import datasets
    except ImportError:
        raise ModuleNotFoundError(
            "data=huggingface needs datasets: type `pip install 'ddp-hydra[huggingface]'`"
        ) from None
    if path in FILES and not files:
        raise ValueError(
            f"path={path} reads files: give data.files=<paths or URLs>, and data.val_files=… or data.val=null"
        )
    datasets.disable_progress_bars()  # they would fill the logs of all ranks
    data_files = {"data_files": list(files) if not isinstance(files, str) else files, "split": "train"} if files else {}
    data = datasets.load_dataset(path, subset, **{"split": split, **data_files}, streaming=streaming, **options)
    if transform is not None:
        data = data.map(transform)
    if columns is not None:
        _check(columns, data.column_names)
        data = data.select_columns(list(columns))
    if rename:
        _check(rename, data.column_names)
        data = data.rename_columns(dict(rename))
    if streaming and shuffle_buffer:
        data = data.shuffle(seed=seed, buffer_size=shuffle_buffer)
    data = data.with_format("torch")
    for feature in (data.features or {}).values():
        if isinstance(feature, datasets.ClassLabel):
            data.classes = feature.names
    if collate is not None:
        data.collate = collate
    return data


def _check(names: Any, there: Sequence[str] | None) -> None:
    """Refuse columns that a data set does not have, as far as it knows its columns."""
    if there and (missing := [name for name in names if name not in there]):
        raise ValueError(f"there is no column {', '.join(missing)}, only {', '.join(there)}")
