"""Receives the parts of a prediction from the ranks, so that an interrupted one goes on; merges them into one file.

The file is CSV, Parquet, NPZ, or a folder of PNGs. It is written a few rows at a time, so that memory stays bounded.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from msgspec import Struct, to_builtins

from ddp_hydra.checked import Count
from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.rank import spec
from ddp_hydra.record import File, Record, Rows
from ddp_hydra.storage.files import part_of, prepared_path, remove_parts, replacing, write_atomic, writing
from ddp_hydra.writers.files import Fetch, FileReceiver, LogWriter

PLAN = "plan.json"
_PART = re.compile(r"parts/part-(\d{8})\.rows", re.ASCII)
_OURS = re.compile(rf"{_PART.pattern}|plan\.json|logs/rank-\d+\.log|\.lock|(parts/)?\.part-[0-9a-f]{{12}}", re.ASCII)
"""Files that a prediction writes, by their paths in its folder."""


class PredictionPlan(Struct):
    """What plan.json holds: what is predicted, and how many rows the data set and each part have.

    `samples` is null as long as an iterable data set has not ended.
    """

    plan: dict[str, Any]
    samples: Count | None
    rows: Count
    format: int = 1


class Parts:
    """Keeps the parts of one prediction in a folder; parts of another plan are refused, or removed to `overwrite` them.

    Attributes:
        samples: of the data set; None until a rank has told it, of an iterable one at its end.
        length: rows of each part but the last.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any], overwrite: bool = False) -> None:
        self.folder, self.plan = folder, dict(plan)
        self.samples: int | None = None
        self.length = 0
        self.logs = LogWriter(folder)
        try:
            found = self.read_plan()
        except ConfigError:
            if not overwrite:
                raise
            remove_parts_in(folder)
            found = None
        if found:
            self.samples, self.length = found.samples, found.rows
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        prepared_path(folder, "parts/x")
        remove_parts(folder / "parts")

    def read_plan(self) -> PredictionPlan | None:
        file, drop = self.folder / PLAN, "give overwrite=true to drop it, or another out="
        try:
            found = msgspec.convert(json.loads(file.read_bytes()), PredictionPlan)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} can't be read ({error!s:.200}): {drop}") from None
        if (found.format, found.plan) != (1, self.plan):
            raise ConfigError(f"{self.folder} is of another prediction (checkpoint, data set, config or code): {drop}")
        return found

    @property
    def total(self) -> int:
        return -(-self.samples // self.length) if self.samples else 0

    def path(self, part: int) -> Path:
        return self.folder / spec.ROWS_NAME.format(part)

    def done(self) -> list[int]:
        found = (_PART.fullmatch(f"parts/{path.name}") for path in (self.folder / "parts").glob("*.rows"))
        numbers = sorted(int(named[1]) for named in found if named)
        return [part for part in numbers if not self.total or part < self.total]

    def rows_of(self, part: int) -> int:
        return self.length if self.samples is None else min(self.length, self.samples - part * self.length)

    def receive(self, record: Record, fetch: Fetch) -> None:
        if isinstance(record.data, Rows):
            self.begin(record.data.samples, record.data.length)
        elif isinstance(record.data, File):
            self.store(record, record.data.path, fetch)
        else:
            self.logs.write(record)

    def begin(self, samples: int | None, length: int) -> None:
        samples = self.samples if samples is None else samples
        if self.samples is not None and (samples, length) != (self.samples, self.length):
            raise ConfigError(
                f"the data set has {samples:,} samples in parts of {length}, and had {self.samples:,} in parts of "
                f"{self.length} when {self.folder} was begun: give overwrite=true"
            )
        self.samples, self.length = samples, length
        content = to_builtins(PredictionPlan(self.plan, samples, length))
        write_atomic(self.folder / PLAN, json.dumps(content, indent=1).encode())

    def store(self, record: Record, path: str, fetch: Fetch) -> None:
        named = _PART.fullmatch(path)
        if named is None or not self.length or (self.total and int(named[1]) >= self.total):
            raise RecordError(f"rank {record.rank} sent {path!r:.80}, which is not a part of {self.total}")
        receiver = FileReceiver(fetch)
        try:
            receiver.receive(record, self.path(int(named[1])))
        finally:
            receiver.drop()

    def merged(self) -> Iterator[dict[str, Any]]:
        names: list[str] = []
        for part in range(self.total):
            begin = part * self.length
            end = begin + self.rows_of(part)
            for columns in spec.read_rows(self.path(part)):
                lengths = {len(values) for values in columns.values()}
                names = names or list(columns)
                if list(columns) != names:
                    raise RecordError(
                        f"the columns of row {begin} are {', '.join(columns)}, not {', '.join(names)} as before: "
                        f"{spec.ONE_LENGTH}"
                    )
                if len(lengths) != 1 or begin + (size := lengths.pop()) > end or "index" in columns:
                    raise RecordError(f"{self.path(part)} does not hold rows {begin} to {end}: remove it")
                yield {"index": np.arange(begin, begin + size), **columns}
                begin += size
            if begin != end:
                raise RecordError(f"{self.path(part)} ends with row {begin} of {end}: remove it, and try again")


def check_folder(folder: Path, out: str | Path) -> None:
    if not os.path.lexists(folder):
        return
    try:
        plan = json.loads((folder / PLAN).read_bytes())
        is_ours = isinstance(plan, dict) and {"plan", "samples", "rows"} <= plan.keys()
    except FileNotFoundError:
        is_ours = folder.is_dir() and not folder.is_symlink() and all(map(_OURS.fullmatch, _files(folder)))
    except (OSError, ValueError, RecursionError):
        is_ours = False
    if not is_ours:
        raise ConfigError(f"out={out} needs {folder} for its parts, and no prediction has made that: give another out=")


def remove_parts_in(folder: Path) -> None:
    for name in _files(folder):
        if _OURS.fullmatch(name):
            (folder / name).unlink(missing_ok=True)
    for empty in (folder / "parts", folder / "logs", folder):
        with contextlib.suppress(OSError):  # somebody's files are in it
            empty.rmdir()


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]


KINDS = {".csv": "table", ".parquet": "table", ".npz": "arrays", "": "pictures"}
"""Suffix of the file -> kind of predictions that it holds, see `training/predictions.py`; "" for a folder."""
TABLE = "predictions.csv"
"""The table in a folder of pictures."""
_GROUP_ROWS = 65_536


def kind_of(out: Path) -> str:
    if out.suffix not in KINDS:
        raise ConfigError(f"out={out}: give a name that ends with .csv, .parquet or .npz, or a folder for pictures")
    if out.suffix == ".parquet":
        pyarrow()
    return KINDS[out.suffix]


def pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError(
            "Parquet needs pyarrow: pip install 'ddp-hydra[parquet]', or give out=predictions.csv"
        ) from None
    return pyarrow


Chunks = Callable[[], Iterable[Mapping[str, Any]]]


def write(out: Path, chunks: Chunks, samples: int) -> None:
    """Write predictions; `out` appears when all of it is written."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.suffix:
            _write_pictures(out, chunks())
            return
        with replacing(out) as part:
            if out.suffix == ".csv":
                with part.open("w", newline="", encoding="utf-8") as file:
                    _write_csv(file, chunks())
            elif out.suffix == ".parquet":
                _write_parquet(part, chunks)
            else:
                _write_npz(part, chunks, samples)


class _UnixLines:
    """Ends lines with LF for a `csv.writer` that ends them with CRLF, so that it quotes texts with either character."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, line: str) -> None:
        self._file.write(line.removesuffix("\r\n") + "\n")


def _write_csv(file: IO[str], chunks: Iterable[Mapping[str, Any]]) -> None:
    table = csv.writer(_UnixLines(file), lineterminator="\r\n")
    for number, columns in enumerate(chunks):
        if not number:
            table.writerow(columns)
        table.writerows(zip(*map(_cells, columns.values()), strict=True))


def _cells(values: Any) -> list[Any]:
    """Return the values of a column; float32 numbers with as many digits as they have."""
    if isinstance(values, list):
        return values
    return [str(value) for value in values] if values.dtype.kind == "f" else values.tolist()


Kind = tuple[np.dtype[Any], tuple[int, ...]]
"""Type of the values in a column, and shape of each; a text is of kind "U"."""


def _kinds(chunks: Chunks) -> dict[str, Kind]:
    """Return the kind of each column, which may have whole numbers in one part, and fractions or `None` in another."""
    found: dict[str, Kind] = {}
    with_missing: dict[str, None] = {}
    for columns in chunks():
        for name, values in columns.items():
            if isinstance(values, list) and all(value is None for value in values):
                with_missing[name] = None
                continue
            array = _texts(values) if isinstance(values, list) else values
            dtype, shape = found.setdefault(name, (array.dtype, array.shape[1:]))
            kinds = {dtype.kind, array.dtype.kind}
            # A number that is missing is NaN: of true and false, they are fractions, too.
            if array.shape[1:] != shape or not (len(kinds) == 1 or kinds <= {*"iuf"} or kinds == {*"bf"}):
                kind = f"{array.dtype} {array.shape[1:]} and {dtype} {shape}"
                advice = "return one kind" if array.shape[1:] == shape else spec.ONE_LENGTH
                raise ConfigError(f"the task predicts {name!r} as arrays {kind}: {advice}")
            found[name] = np.promote_types(dtype, array.dtype), shape
    for name in with_missing:
        dtype, shape = found.get(name, (np.dtype("U1"), ()))
        found[name] = np.dtype(float) if dtype.kind in "biu" else dtype, shape
    return found


def _texts(values: Sequence[str | None]) -> np.ndarray:
    return np.asarray(["" if value is None else value for value in values])


def _column(values: Any, kind: Kind) -> Any:
    """Return a column of numbers as an array of its kind; one of texts as it is."""
    dtype, shape = kind
    if dtype.kind == "U":
        return values
    if isinstance(values, list):
        return np.full((len(values), *shape), np.nan, dtype)
    return values.astype(dtype, copy=False)


def _write_parquet(path: Path, chunks: Chunks) -> None:
    arrow, kinds = pyarrow(), _kinds(chunks)
    writer: Any = None
    tables: list[Any] = []
    size = 0
    try:
        for columns in chunks():
            arrays = {name: _column(values, kinds[name]) for name, values in columns.items()}
            types = {name: arrow.string() if isinstance(arrays[name], list) else None for name in arrays}
            tables.append(arrow.table({name: arrow.array(one, types[name]) for name, one in arrays.items()}))
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


def _write_npz(path: Path, chunks: Chunks, samples: int) -> None:
    """Write one column after the other, for an array in an archive is written in one go."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name, (dtype, shape) in _kinds(chunks).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
                np.lib.format.write_array_header_2_0(member, {**header, "shape": (samples, *shape)})
                for columns in chunks():
                    values = _column(columns[name], (dtype, shape))
                    values = _texts(values) if isinstance(values, list) else values
                    member.write(np.ascontiguousarray(values, dtype).tobytes())


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
    found = dict(columns)
    pictures = [name for name, values in columns.items() if isinstance(values, list) and isinstance(values[0], bytes)]
    for number, name in enumerate(pictures):
        suffix = f"-{number}" if number else ""
        found[name] = [f"{index:08d}{suffix}.png" for index in columns["index"]]
        for file, content in zip(found[name], columns[name], strict=True):
            (folder / file).write_bytes(content)
    return found
