"""Writes predictions as CSV, Parquet, NPZ, or a folder of PNGs: a few rows at a time, so that memory stays bounded."""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.files import part_of, replacing, writing

KINDS = {".csv": "table", ".parquet": "table", ".npz": "arrays", "": "pictures"}
"""Suffix of the file -> kind of predictions that it holds, see `training/predictions.py`; "" for a folder."""
TABLE = "predictions.csv"
"""The table in a folder of pictures."""
_GROUP_ROWS = 65_536


def kind_of(out: Path) -> str:
    """Return the kind of predictions that a file holds.

    Raises:
        ConfigError: there is no such kind, or its package is not installed.
    """
    if out.suffix not in KINDS:
        raise ConfigError(f"out={out}: give a name that ends with .csv, .parquet or .npz, or a folder for pictures")
    if out.suffix == ".parquet":
        pyarrow()
    return KINDS[out.suffix]


def pyarrow() -> Any:
    """Return the package that writes Parquet."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError(
            "Parquet needs pyarrow: type pip install 'ddp-hydra[parquet]', or give out=predictions.csv"
        ) from None
    return pyarrow


def write(out: Path, chunks: Iterable[Mapping[str, Any]], samples: int) -> None:
    """Write predictions; `out` appears when all of it is written.

    Args:
        out: the file or folder.
        chunks: some rows each: name -> array (rows, ...) or list.
        samples: rows of all chunks.
    """
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.suffix:
            _write_pictures(out, chunks)
            return
        with replacing(out) as part:
            if out.suffix == ".csv":
                with part.open("w", newline="", encoding="utf-8") as file:
                    _write_csv(file, chunks)
            elif out.suffix == ".parquet":
                _write_parquet(part, chunks)
            else:
                _write_npz(part, chunks, samples)


def _write_csv(file: IO[str], chunks: Iterable[Mapping[str, Any]]) -> None:
    table = csv.writer(file, lineterminator="\n")
    for number, columns in enumerate(chunks):
        if not number:
            table.writerow(columns)
        table.writerows(zip(*map(_cells, columns.values()), strict=True))


def _cells(values: Any) -> list[Any]:
    """Return the values of a column; float32 numbers with as many digits as they have."""
    if isinstance(values, list):
        return values
    return [str(value) for value in values] if values.dtype.kind == "f" else values.tolist()


def _write_parquet(path: Path, chunks: Iterable[Mapping[str, Any]]) -> None:
    arrow = pyarrow()
    writer: Any = None
    tables: list[Any] = []
    size = 0
    try:
        for columns in chunks:
            tables.append(arrow.table({name: arrow.array(values) for name, values in columns.items()}))
            size += len(tables[-1])
            writer = writer or arrow.parquet.ParquetWriter(path, tables[-1].schema)
            if size >= _GROUP_ROWS:
                writer.write_table(arrow.concat_tables(tables))
                tables, size = [], 0
        if tables:
            writer.write_table(arrow.concat_tables(tables))
    finally:
        if writer is not None:
            writer.close()


def _write_npz(path: Path, chunks: Iterable[Mapping[str, Any]], samples: int) -> None:
    """Write each column into a file of its own first, for an array in an archive is written in one go."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part-") as folder:
        spools: dict[str, _Spool] = {}
        for columns in chunks:
            for number, (name, values) in enumerate(columns.items()):
                spool = spools.setdefault(name, _Spool(Path(folder) / str(number)))
                spool.add(np.asarray(values) if not isinstance(values, list) else values)
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for name, spool in spools.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    spool.write(member, samples)


class _Spool:
    """Holds a column on the disk.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dtype: Any = None
        self.shape: tuple[int, ...] = ()
        self.longest = 1
        self.is_text = False

    def add(self, values: Any) -> None:
        """Append some rows."""
        if isinstance(values, list):
            self.is_text = True
            self.longest = max(self.longest, *map(len, values))
            with self.path.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(value) + "\n" for value in values)
            return
        self.dtype = self.dtype or values.dtype
        self.shape = self.shape or values.shape[1:]
        if (values.dtype, values.shape[1:]) != (self.dtype, self.shape):
            raise ConfigError(
                f"the task predicts arrays {values.dtype} {values.shape[1:]} and {self.dtype} {self.shape}, which fit "
                "in no common array: return the same for each batch"
            )
        with self.path.open("ab") as file:
            file.write(np.ascontiguousarray(values).tobytes())

    def write(self, file: IO[bytes], samples: int) -> None:
        """Write the column as .npy."""
        dtype = np.dtype(f"<U{self.longest}") if self.is_text else self.dtype
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (samples, *self.shape)}
        np.lib.format.write_array_header_2_0(file, header)
        if not self.is_text:
            with self.path.open("rb") as content:
                shutil.copyfileobj(content, file)
            return
        with self.path.open(encoding="utf-8") as lines:
            for line in lines:
                file.write(np.array([json.loads(line)], dtype).tobytes())


def _write_pictures(out: Path, chunks: Iterable[Mapping[str, Any]]) -> None:
    draft = part_of(out)
    draft.mkdir()
    try:
        with (draft / TABLE).open("w", newline="", encoding="utf-8") as file:
            _write_csv(file, (_saved(draft, columns) for columns in chunks))
        if out.is_dir():
            out.rmdir()  # an empty one
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _saved(folder: Path, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Write the pictures of some rows, and return the columns with their file names in place of them."""
    found = dict(columns)
    pictures = [name for name, values in columns.items() if isinstance(values, list) and isinstance(values[0], bytes)]
    for number, name in enumerate(pictures):
        suffix = f"-{number}" if number else ""
        found[name] = [f"{index:08d}{suffix}.png" for index in columns["index"]]
        for file, content in zip(found[name], columns[name], strict=True):
            (folder / file).write_bytes(content)
    return found
