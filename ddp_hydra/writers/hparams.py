"""Writes what TensorBoard's HParams tab shows of a job and of a sweep.

The tab reads a session start and a session end from the folder of a job's curves, and an experiment, which defines the
columns of its table, from the folder above. Each is a file of its own, named `….hparams`. TensorBoard uses the first
session of a folder, so a job that runs again in its old folder deletes the old files.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT
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
from ddp_hydra.config.redact import bare, holds_secret, named_secret
from ddp_hydra.errors import RecordError
from ddp_hydra.storage.files import prepared_path, write_atomic, writing
from ddp_hydra.writers.tensorboard import encoded, file_name

log = logging.getLogger(__name__)

Value = bool | float | str
_MAX_BOXES = 12
_NO_HPARAMS = {"resume", "dry_run", "fault", "faults", "results", "hydra"}


def values(overrides: Iterable[str]) -> dict[str, Value]:
    """Return the keys that were given for a job, with their values.

    Numbers and booleans keep their type. Everything else is the text that was typed: a group's option, a list, an
    interpolation (its value may be a secret). Keys and addresses that seem to hold a secret are left out. So are keys
    that do not change what is trained, and overrides that Hydra cannot parse.
    """
    found: dict[str, Value] = {}
    for text in overrides:
        try:
            override = parse_override(text)
        except HydraException:
            continue
        name = override.key_or_group + (f"@{override.package}" if override.package else "")
        is_secret = any(map(named_secret, name.split("@"))) or holds_secret(override.value())
        if override.is_delete() or re.split("[./]", name)[0] in _NO_HPARAMS or is_secret:
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
            experiment.hparam_infos.append(_info(name, column))
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


def _info(name: str, column: Iterable[Value | None]) -> HParamInfo:
    """Return a column. If it has few values of one type, the tab shows a checkbox for each."""
    found = dict.fromkeys(value for value in column if value is not None)
    kinds = {type(value) for value in found}
    data_type = DATA_TYPE_BOOL if kinds == {bool} else DATA_TYPE_FLOAT64 if kinds == {float} else DATA_TYPE_STRING
    info = HParamInfo(name=name, type=data_type, differs=True)
    if len(kinds) == 1 and len(found) <= _MAX_BOXES:
        info.domain_discrete.extend(sorted(found))
    return info


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
        write_atomic(prepared_path(folder, f"{below}/{file_name()}.hparams"), b"".join(map(encoded, events)))
    except RecordError as error:
        log.warning("TensorBoard's HParams tab does not show %s: %s", folder, error)


def _delete_old(folder: Path) -> None:
    try:
        for old in folder.glob("events.out.tfevents.*.hparams"):
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("TensorBoard's HParams tab may show an earlier run: %s", error)
