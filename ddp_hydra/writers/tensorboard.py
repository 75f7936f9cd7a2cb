"""Writes TensorBoard events without torch.

tensorboardX imports torch where it is installed, and its background thread swallows the error of a full disk.
TensorBoard's own writer takes half a second to import. The format is simple: a record is its length, the checksum of
the length, the content, and the checksum of the content, written with one flush per event:
https://github.com/tensorflow/tensorboard/blob/master/tensorboard/summary/writer/record_writer.py

The HParams tab reads a session start and a session end from the folder of a job's curves, and an experiment, which
defines the columns of its table, from the folder above. Each is a file of its own, named `….hparams`. TensorBoard uses
the first session of a folder, so a job that runs again in its old folder deletes the old files.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import itertools
import logging
import math
import os
import re
import struct
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
from hydra.core.override_parser.types import Override
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.plugins.hparams.api_pb2 import (
    DATA_TYPE_BOOL,
    DATA_TYPE_FLOAT64,
    DATA_TYPE_STRING,
    STATUS_FAILURE,
    STATUS_SUCCESS,
    STATUS_UNKNOWN,
    Experiment,
    HParamInfo,
    MetricInfo,
    MetricName,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

from ddp_hydra.config.hydra_compat import parse_override
from ddp_hydra.config.redact import HIDDEN, bare, is_secret, without
from ddp_hydra.errors import RecordError
from ddp_hydra.record import Histogram, Image, Metrics, Record, RolledBack, Start, Text
from ddp_hydra.storage.files import AppendFile, prepared_path, write_atomic, writing
from ddp_hydra.writers.files import names_logged

_numbers = itertools.count()
_SECOND = re.compile(r"events\.out\.tfevents\.(\d+)\.", re.ASCII)


def file_name(folder: Path) -> str:
    """Return a new name for an event file; TensorBoard reads the files of a folder in the order of their names.

    A file's points drop earlier ones, so its name sorts behind the others, also where this host's clock is behind.
    """
    found = (_SECOND.match(path.name) for path in folder.glob("events.out.tfevents.*"))
    after = max((int(second[1]) for second in found if second), default=-1) + 1
    return f"events.out.tfevents.{max(int(time.time()), after):010d}.{os.getpid()}.{next(_numbers):06d}"


def encoded(event: Event) -> bytes:
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


_COSTS = ("data_wait", "mfu", "peak_memory", "samples_per_s", "slowest_rank", "tokens_per_s")
_COUNTS = ("data/bad_samples", "data/cache_hits", "data/retries")
_OF_ANY_RANK = (Text, Image, Histogram, RolledBack)
AHEAD_BYTES = 2**22
"""The most bytes of points that are kept to be written again."""
_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}


class Restart:
    """Finds the step from which a user's own function logs again: it does not say so.

    Args:
        earlier: the names that earlier attempts have logged, by step.
        unknown: the size of what they have logged before; 0: nothing.
    """

    def __init__(self, earlier: Mapping[int, Set[str]], unknown: int = 0) -> None:
        self.earlier = earlier
        # A run that starts from its first step logs again what it logs for step 0.
        self.beginning = 0 if unknown else min(filter(None, earlier), default=math.inf)
        steps: dict[str, list[int]] = {}
        for step in sorted(earlier):
            for name in earlier[step]:
                steps.setdefault(name, []).append(step)
        # What is logged of one step only may be settings, and a curve that ends long before the others counts epochs.
        self.has_curves = any(len(found) > 1 for found in steps.values())
        last = {name: found[-1] for name, found in steps.items() if len(found) > 1 or not self.has_curves}
        self.furthest = max(last.values(), default=-1)
        self.last = {name: step for name, step in last.items() if 2 * step >= self.furthest}
        self.step: int | None = None
        self.now: dict[int, set[str]] = {}

    def first(self, names: Set[str], step: int) -> int | None:
        """Take what is logged; return the first step whose earlier points go, once one after it is logged."""
        if self.step is None:
            is_again = any(step <= self.last.get(name, -1) for name in names)
            self.step = step if is_again and (step or not self.has_curves) else None
        elif step > self.step:
            if self.earlier.get(self.step, set()) - self.now[self.step]:
                return self.step + 1 if self.step else None
            return 0 if (self.step or step) <= self.beginning else self.step or None
        self.now.setdefault(step, set()).update(names)
        return None


class TensorBoardWriter:
    """Writes scalars of rank 0, texts, images and histograms of any rank to `<run_dir>/tensorboard`.

    When a new attempt starts, or the job runs again in the same folder, an event has TensorBoard drop the points after
    the step from which it starts, so that each curve has one line. (TensorBoard's fast loader drops them tag by tag,
    from the first new point on.)
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        path = prepared_path(run_dir, f"tensorboard/{file_name(run_dir / 'tensorboard')}")
        self._file = AppendFile(path)
        self._empty = True
        self._seen: set[str] = set()  # counts that have been more than 0
        self._attempt = 0
        self._restart: Restart | None = None
        self._rollbacks = Counter[int]()  # of each rank
        self._newest = 0  # the attempt that was heard last
        self._ahead = deque[tuple[int, bytes]]()  # points that the next drop is not meant for, by step
        self._ahead_bytes = 0
        self._dropped = 0  # the step from which on the newest rollback has dropped
        earlier = path.parent.glob("events.out.tfevents.*")  # the job runs again, or continues, in its old folder
        self._has_points = any(events.suffix != ".hparams" for events in earlier)

    def write(self, record: Record) -> None:
        data, rank = record.data, record.rank
        if record.attempt < self._attempt or (rank != 0 and not isinstance(data, _OF_ANY_RANK)):
            return
        if record.attempt > self._newest:
            self._end_restart()
            self._newest = record.attempt
        if self._rollbacks[rank] < self._rollbacks[0] and (record.step or 0) >= self._dropped:
            return  # of a step that this rank will do again
        match data:
            case Start() | RolledBack():
                self._begin(record)
                return
            case Metrics():
                self._go_on(record, data)
                value = self._scalars(data)
            case Text():
                value = _text(data, rank)
            case Image():
                value = _image(data, rank)
            case Histogram():
                value = _histogram(data, rank)
            case _:
                return
        event = Event(wall_time=record.time_s, step=record.step or 0, summary=value)
        self._append(event)
        if self._restart or record.attempt > self._attempt or self._rollbacks[rank] > self._rollbacks[0]:
            self._ahead.append((event.step, encoded(event)))
            self._ahead_bytes += len(self._ahead[-1][1])
            while self._ahead_bytes > AHEAD_BYTES:
                self._ahead_bytes -= len(self._ahead.popleft()[1])

    def _begin(self, record: Record) -> None:
        """Have the points of earlier attempts dropped that are logged again."""
        step, is_rollback = record.step or 0, isinstance(record.data, RolledBack)
        if record.rank == 0:
            # A run that starts from step 0 logs again what it logs before its first step.
            self._dropped = step + (is_rollback or step > 0)
            self._drop(self._dropped, record.time_s)
        if not is_rollback:
            self._attempt, self._restart, self._rollbacks = record.attempt, None, Counter()
        self._rollbacks[record.rank] += is_rollback

    def _go_on(self, record: Record, logged: Metrics) -> None:
        """Find out where a user's own function begins again, as it sends no start record."""
        if record.step is None:
            return
        if record.attempt > self._attempt:
            self._attempt, self._restart = record.attempt, Restart(*names_logged(self._run_dir))
        if self._restart is None:
            return
        first = self._restart.first(logged.metrics.keys(), record.step)
        if first is not None:
            self._drop(first, record.time_s)
        if first is not None or record.step > self._restart.furthest:
            self._restart = None
            self._forget_ahead()

    def _end_restart(self) -> None:
        """Drop what an attempt that has ended had begun to log again."""
        first = None if self._restart is None else self._restart.first(set(), self._restart.furthest + 1)
        if first is not None:
            self._drop(first, time.time())
        self._restart = None
        self._forget_ahead()

    def _drop(self, first: int, time_s: float) -> None:
        """Have all points dropped from a step on, and write again those that were ahead."""
        if self._has_points or not self._empty:
            again = b"".join(content for step, content in self._ahead if step >= first)
            self._append(Event(wall_time=time_s, step=first, session_log=SessionLog(status=SessionLog.START)), again)
        self._forget_ahead()

    def _forget_ahead(self) -> None:
        self._ahead.clear()
        self._ahead_bytes = 0

    def close(self) -> None:
        try:
            self._end_restart()
        finally:
            self._file.close()
        with contextlib.suppress(OSError):
            self._file.path.parent.rmdir()  # nothing was written

    def _scalars(self, logged: Metrics) -> Summary:
        """Return the points of a metrics record.

        TensorBoard sorts its groups by name: `work` holds the costs, so that they come after `train` and `val`. A count
        gets no curve while it is 0.
        """
        values = logged.metrics
        self._seen |= {name for name in _COUNTS if values.get(name)}
        shown = {_tag(name): value for name, value in values.items() if name not in _COUNTS or name in self._seen}
        return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in shown.items()])

    def _append(self, event: Event, more: bytes = b"") -> None:
        first: list[Event] = []
        if self._empty:
            first = [Event(wall_time=event.wall_time, file_version="brain.Event:2")]
            if not self._has_points:  # TensorBoard's slow loader drops nothing by the first one
                first += [Event(wall_time=event.wall_time, session_log=SessionLog(status=SessionLog.START))]
        self._file.append(b"".join(map(encoded, (*first, event))) + more)
        self._empty = False


def _tag(name: str) -> str:
    return f"work/{name.removeprefix('data/')}" if name in _COSTS or name.startswith("data/") else name


def _of_rank(name: str, rank: int) -> str:
    # In one curve, points of several ranks that do not come in the order of their steps would drop each other.
    return f"{name}/rank-{rank}" if rank else name


def _text(sent: Text, rank: int) -> Summary:
    content = sent.text.encode(errors="replace")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[content], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=_of_rank(sent.name, rank), metadata=metadata, tensor=tensor)])


def _histogram(sent: Histogram, rank: int) -> Summary:
    edges, counts = sent.edges, sent.counts
    middles = [(left + right) / 2 for left, right in itertools.pairwise(edges)]
    proto = HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
        bucket_limit=edges[1:],
        bucket=counts,
    )
    return Summary(value=[Summary.Value(tag=_of_rank(sent.name, rank), histo=proto)])


def _image(sent: Image, rank: int) -> Summary:
    try:
        png = base64.b64decode(sent.png, validate=True)
    except (binascii.Error, ValueError):
        png = b""
    if len(png) < 33 or png[:8] != b"\x89PNG\r\n\x1a\n" or png[12:16] != b"IHDR":
        raise RecordError(f"image {sent.name!r} of rank {rank} is not a PNG: pass PNG bytes to results.image")
    width, height, _, color = struct.unpack(">IIBB", png[16:26])
    if not 0 < width < 2**31 or not 0 < height < 2**31:
        raise RecordError(f"image {sent.name!r} of rank {rank} claims {width} x {height} pixels")
    image = Summary.Image(height=height, width=width, colorspace=_CHANNELS.get(color, 3), encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=_of_rank(sent.name, rank), image=image)])


log = logging.getLogger(__name__)

Value = bool | float | str
_TYPES: dict[type, Any] = {bool: DATA_TYPE_BOOL, float: DATA_TYPE_FLOAT64}
_NO_HPARAMS = {"resume", "dry_run", "fault", "faults", "results", "hydra"}


def values(overrides: Iterable[str]) -> dict[str, Value]:
    """Return the keys that were given for a job, with their values.

    Numbers and booleans keep their type. Everything else is the text that was typed: a group's option, a list, an
    interpolation (its value may be a secret). Keys and addresses that seem to hold a secret are left out. So are keys
    that do not change what is trained.
    """
    found: dict[str, Value] = {}
    for text in overrides:
        override = parse_override(text)
        name = override.key_or_group + (f"@{override.package}" if override.package else "")
        hides = is_secret(override.package or "", override.value()) or HIDDEN in without([bare(text)])[0]
        if override.is_delete() or re.split("[./]", name)[0] in _NO_HPARAMS or hides:
            continue
        found[_utf8(name)] = _value(override, text.partition("=")[2])
    return found


@contextmanager
def session(run_dir: Path, overrides: Iterable[str]) -> Iterator[None]:
    """Show a job that has overrides in the HParams tab: when it began and ended, and whether it succeeded.

    An interrupted job ends with an unknown status. If the files cannot be written, the job runs without them.
    """
    hparams = values(overrides)
    _delete_old(run_dir / "tensorboard")
    if not hparams:
        yield
        return
    start = SessionStartInfo(start_time_secs=time.time())
    for name, value in hparams.items():
        kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else "number_value"
        setattr(start.hparams[name], kind, value)
    _put(run_dir, "session_start_info", HParamsPluginData(session_start_info=start))
    status = STATUS_FAILURE
    try:
        yield
        status = STATUS_SUCCESS
    except KeyboardInterrupt:
        status = STATUS_UNKNOWN
        raise
    finally:
        end = SessionEndInfo(status=status, end_time_secs=time.time())
        _put(run_dir, "session_end_info", HParamsPluginData(session_end_info=end))


def write_experiment(folder: Path, jobs: Iterable[Iterable[str]], metrics: Iterable[str]) -> None:
    """Define the columns of the HParams tab for `tensorboard --logdir <folder>`: the keys that differ between jobs.

    Without this, the tab has a column for every override and every metric, ordered by name.
    """
    rows = [values(overrides) for overrides in jobs]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    experiment = Experiment(time_created_secs=time.time())
    for name, column in columns.items():
        if len(rows) == 1 or any(value != column[0] for value in column):
            kinds = {type(value) for value in column if value is not None}
            data_type = _TYPES.get(kinds.pop() if len(kinds) == 1 else str, DATA_TYPE_STRING)
            experiment.hparam_infos.append(HParamInfo(name=name, type=data_type, differs=True))
    experiment.metric_infos.extend(MetricInfo(name=MetricName(tag=_utf8(name))) for name in metrics)
    _delete_old(folder)
    _put(folder, "experiment", HParamsPluginData(experiment=experiment), below=".")


def _value(override: Override, typed: str) -> Value:
    value = override.value()
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and abs(value) < 1e300 and not math.isnan(value):  # JSON cannot hold the others
        return float(value)
    return _utf8(bare(value if isinstance(value, str) else typed))


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()


def _put(folder: Path, tag: str, data: HParamsPluginData, below: str = "tensorboard") -> None:
    content = SummaryMetadata.PluginData(plugin_name="hparams", content=data.SerializeToString())
    nothing = TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=0)]))
    value = Summary.Value(tag=f"_hparams_/{tag}", metadata=SummaryMetadata(plugin_data=content), tensor=nothing)
    summary = Summary(value=[value])
    events = Event(file_version="brain.Event:2"), Event(summary=summary)
    for event in events:
        event.wall_time = time.time()
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        path = prepared_path(folder, f"{below}/{file_name(folder / below)}.hparams")
        write_atomic(path, b"".join(map(encoded, events)))
    except RecordError as error:
        log.warning("TensorBoard's HParams tab does not show %s: %s", folder, error)


def _delete_old(folder: Path) -> None:
    try:
        for old in folder.glob("events.out.tfevents.*.hparams"):
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("TensorBoard's HParams tab may show an earlier run: %s", error)
