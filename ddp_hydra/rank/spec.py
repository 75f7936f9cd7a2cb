"""Describes a job: the same struct on the client, in the workers' tasks and in the ranks.

Return values of ranks are encoded for the client as plain data, arrays and tensors, never pickles: the format must not
be able to run code. It is msgpack; tuples, sets, large integers, complex numbers, arrays and tensors are extension
types.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgpack
import msgspec
from msgspec import Struct

import ddp_hydra
from ddp_hydra.checked import prepare
from ddp_hydra.config.limits import (
    AtLeast0,
    AtLeast1,
    NonNegativeSeconds,
    PositiveSeconds,
    RanksPerWorker,
    check_gang,
    check_limits,
    limits_of,
)
from ddp_hydra.config.project import Project
from ddp_hydra.errors import ConfigError, RecordError

FORMAT = 3
"""Grows with each change of the structs below."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank's place in its gang.

    Args:
        rank: global rank, 0 … world_size - 1.
        world_size: number of ranks in the gang.
        local_rank: rank among the ranks of the same host.
        local_world_size: number of ranks on that host.
        node_rank: number of the host, in order of rank.
        worker: address of the Dask worker that starts the rank; it may start several.
        host: the host's address, as the other workers reach it.
        nodes: number of hosts.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    worker: str
    host: str
    nodes: int = 1


class GangSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a gang is dispatched, watched and restarted, and how its ranks work.

    The arguments that are not listed here mean what the comments in conf/dispatch/default.yaml say, with None for null.

    Args:
        name: name that Dask's dashboard and `ps` show; it is made unique.
        group: whether to initialise the process group for functions; if False, they do it themselves, as scripts do.
        threads: CPU threads per rank; 0 takes what `variables` say, or shares each host's cores among all ranks.
        data_workers: processes that make the batches of each rank: it takes their helper when it starts; None: on GPUs.
        retry_s: how long to wait for space where a worker's temporary folder is full.
        pip: requirements that each worker must have, in pip's syntax.
        grace_s: 0 ends the ranks at once.
        stop_s: seconds from SIGTERM to SIGKILL when ranks are stopped, in which a script may save something; None: 30
            for scripts, 0.5 for functions.
        keep_warm_s: None is 0.
        sweep: the sweep that this job belongs to, where several wait for workers.
        cwd: working folder of the ranks, where their host has it; "" for this process's.
        log_config: how the ranks log, as `logging.config.dictConfig` takes it; {} leaves it to the function.
        variables: of the environment of each rank, as Hydra sets them for a job.
    """

    name: str = "gang"
    ranks: AtLeast1 | None = None
    ranks_per_worker: RanksPerWorker = 1
    backend: str = "auto"
    group: bool = True
    threads: AtLeast0 = 0
    data_workers: AtLeast0 | None = 0
    timeout_s: PositiveSeconds = 1800.0
    retry_s: NonNegativeSeconds = 60.0
    queue_timeout_s: PositiveSeconds = 86400.0
    start_timeout_s: PositiveSeconds = 300.0
    port_range: tuple[int, int] | None = None
    interface: str | None = None
    pip: tuple[str, ...] = ()
    max_restarts: AtLeast0 = 0
    min_ranks: AtLeast1 | None = None
    restart_wait_s: NonNegativeSeconds = 60.0
    lost_timeout_s: PositiveSeconds = 15.0
    hang_timeout_s: PositiveSeconds = 300.0
    first_step_timeout_s: PositiveSeconds = 1800.0
    grace_s: NonNegativeSeconds = 0.0
    stop_s: NonNegativeSeconds | None = None
    keep_warm_s: NonNegativeSeconds | None = None
    sweep: str = ""
    cwd: str = ""
    log_config: dict[str, Any] = {}
    variables: dict[str, str] = {}

    @classmethod
    def make(cls, settings: Mapping[str, Any]) -> GangSettings:
        """Check settings by name.

        Raises:
            ConfigError: there is no such setting, or its value is not allowed.
        """
        # Numbers of numpy and torch count as Python's.
        given = {key: value.item() if getattr(value, "ndim", None) == 0 else value for key, value in settings.items()}
        check_limits("", given, limits_of(cls), "None")
        try:
            made = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"a gang's settings are {', '.join(sorted(cls.__struct_fields__))}: {error}") from None
        check_gang("", made.ranks, made.min_ranks, made.port_range)
        return made


class JobSpec(Struct, frozen=True, kw_only=True):
    """What each host is sent of a gang's attempt, and what its ranks read.

    Args:
        gang: the gang's name, the same in all attempts.
        attempt: number of the gang's start.
        ranks: the places of the ranks; each worker starts its own.
        call: cloudpickle of (function or "module:name", args, kwargs).
        project: the packed project space, or None.
        settings: of the gang.
        ranks_on_host: host -> how many ranks the sweep runs there at once; it shares the cores among as many, so that
            all its jobs get equally many threads. Empty outside of a sweep.
        is_script: the call is a `Script`: it makes its process group itself, ends as a program does, and may save
            something when it gets SIGTERM.
        generation: how many worlds the attempt had before.
        lives_on: a rank that has lost the others waits for its next world, instead of ending.
        format, version: of the ddp_hydra that has made this.
    """

    gang: str
    attempt: int
    ranks: tuple[RankSpec, ...]
    call: bytes = b""
    project: Project | None = None
    settings: GangSettings = GangSettings()
    ranks_on_host: dict[str, int] = {}
    is_script: bool = False
    generation: int = 0
    lives_on: bool = False
    format: int = FORMAT
    version: str = ddp_hydra.__version__

    @property
    def topic(self) -> str:
        return f"{self.gang}-{self.attempt}" if self.attempt else self.gang

    @property
    def makes_group(self) -> bool:
        return self.settings.group and not self.is_script

    @property
    def stop_s(self) -> float:
        given = self.settings.stop_s
        return given if given is not None else 30.0 if self.is_script else 0.5

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> JobSpec:
        """Read what a client has sent.

        Raises:
            ConfigError: the client has another version of ddp_hydra.
        """
        sender = ClientVersion()
        with contextlib.suppress(msgspec.MsgspecError):
            sender = msgspec.msgpack.decode(data, type=ClientVersion)
            if sender.format == FORMAT:
                return msgspec.msgpack.decode(data, type=cls)
        raise ConfigError(
            f"the client has ddp_hydra {sender.version} (format {sender.format}), and worker host "
            f"{socket.gethostname()} has {ddp_hydra.__version__} (format {FORMAT}): install the same version on both"
        )


class ClientVersion(Struct):
    """What any version can read of a job: which version has sent it."""

    format: int = 0
    version: str = "of an unknown version"


class RankLaunch(Struct, frozen=True, kw_only=True):
    """What a rank reads when its process starts.

    Args:
        job: with this rank alone, its own number of threads, and the project's hash without its archive.
        outbox: folder for files on their way to the client.
        worker_pid: process id of its Dask worker; 0 where that is the client's own process.
        nanny_pid: of the worker's nanny; 0 without one.
    """

    job: JobSpec
    outbox: str
    worker_pid: int = 0
    nanny_pid: int = 0

    @property
    def spec(self) -> RankSpec:
        return self.job.ranks[0]


prepare(GangSettings, JobSpec, ClientVersion, RankLaunch)


_TUPLE, _SET, _INT, _COMPLEX, _ARRAY, _TENSOR, _PAIRS, _FROZENSET = range(1, 9)
_CONTAINERS: dict[int, type] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset, _PAIRS: dict}
MAX_DEPTH = 32
"""Allowed depth of nested extension types. Each takes about 40 KiB of the C stack, which msgpack does not check."""


def encode(value: Any) -> bytes:
    try:
        return _encode(value, 0)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"a rank's return value cannot travel: {error}") from None


def decode(data: bytes) -> Any:
    try:
        return _decode(data, 0)
    except Exception as error:  # the data comes from a rank, so it can be anything
        raise RecordError(f"what a rank returned cannot be read ({type(error).__name__}: {error})") from None


def _encode(value: Any, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise ValueError(f"it has tuples, sets or the like more than {MAX_DEPTH} deep inside one another")
    return msgpack.packb(value, default=partial(_pack, depth=depth + 1), strict_types=True)


def _decode(data: bytes, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} extension types inside one another")
    return msgpack.unpackb(data, ext_hook=partial(_unpack, depth=depth + 1), strict_map_key=False)


def _pack(value: Any, depth: int) -> Any:
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, _encode(list(value), depth))
    if isinstance(value, (set, frozenset)):
        return msgpack.ExtType(_SET if isinstance(value, set) else _FROZENSET, _encode(list(value), depth))
    if isinstance(value, dict):
        return msgpack.ExtType(_PAIRS, _encode([list(pair) for pair in value.items()], depth))
    if isinstance(value, int):
        return msgpack.ExtType(_INT, f"{int(value):x}".encode())  # decimal would stop at 4300 digits
    if isinstance(value, complex):
        return msgpack.ExtType(_COMPLEX, _encode([value.real, value.imag], depth))
    if isinstance(value, (float, str, bytes, list)):  # subclasses, such as numpy.float64 or torch.Size
        base: Any = next(base for base in (float, str, bytes, list) if isinstance(value, base))
        return base(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return _pack_tensor(value, depth)
    if type(value).__module__ == "numpy":
        return msgpack.ExtType(_ARRAY, _array_bytes(value))
    raise TypeError(
        f"{kind} is neither plain data (None, bool, numbers, str, bytes, list, tuple, set, dict) nor an array "
        "or tensor; return those, such as model.state_dict(), or send a file with results.submit(path, data)"
    )


def _pack_tensor(tensor: Any, depth: int) -> Any:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        # A clone, because a view of one element counts as contiguous whatever its stride is.
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        raw = whole.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    except RuntimeError:
        raise TypeError(
            f"a tensor of layout {tensor.layout} on {tensor.device} has no plain content; return tensor.to_dense()"
        ) from None
    return msgpack.ExtType(_TENSOR, _encode([dtype, list(tensor.shape), raw], depth))


def _array_bytes(array: Any) -> bytes:
    import numpy as np

    if getattr(array, "dtype", np.dtype(object)).hasobject:
        raise TypeError("an array of Python objects is not plain data; return a list, or an array of one number type")
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _unpack(code: int, data: bytes, depth: int) -> Any:
    if code in _CONTAINERS:
        return _CONTAINERS[code](_decode(data, depth))
    if code == _INT:
        return int(data, 16)
    if code == _COMPLEX:
        return complex(*_decode(data, depth))
    if code == _ARRAY:
        import numpy as np

        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        return array if array.ndim else array[()]
    if code == _TENSOR:
        import torch

        name, shape, raw = _decode(data, depth)
        dtype = getattr(torch, name)
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.view(shape)
    raise ValueError(f"unknown extension type {code}")


# -- rows of predictions ---------------------------------------------------------------------------------

ROWS_NAME = "parts/part-{:08d}.rows"
"""Path of the file of a part, by its number."""
ONE_LENGTH = (
    "where samples differ in length, let collate pad all to one length, or give a task of your own whose predict() "
    "returns a list for each sample"
)
"""Advice for batches whose predictions have other columns."""
_ROWS_LENGTH = 8


def write_rows(file: IO[bytes], columns: Mapping[str, Any]) -> None:
    """Append some rows to a file: the columns are arrays (rows, ...) or lists of that length, by their names."""
    if unfit := [name for name in columns if not is_column_name(name)]:
        raise ConfigError(f"the task predicts {unfit[0]!r}: give a column a name without slashes")
    data = encode(dict(columns))
    file.write(len(data).to_bytes(_ROWS_LENGTH, "big") + data)


def is_column_name(name: Any) -> bool:
    """Tell whether a column can be called so: by a text that is not a path."""
    return isinstance(name, str) and bool(name) and name.isprintable() and not {"/", "\\"} & set(name)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, as many at a time as were written. It comes from a rank, so it can be anything."""
    error = RecordError(f"{path.name} holds no rows of predictions")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while head := file.read(_ROWS_LENGTH):
            length = int.from_bytes(head, "big")
            if length > size - file.tell():
                raise error
            columns = decode(file.read(length))
            is_table = isinstance(columns, dict) and all(is_column_name(name) for name in columns)
            if not is_table or not all(hasattr(values, "__len__") for values in columns.values()):
                raise error
            yield columns
