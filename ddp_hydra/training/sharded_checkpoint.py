"""Writes and reads the tensors of a checkpoint as several files, one of each rank, in the format of torch's DCP.

A checkpoint in a folder has `state.pt`, which has all of the state but the large tensors; torch's `.metadata`, and a
file of tensors of each rank. Nothing else than tensors is in these files, and nothing of them is unpickled but the
classes of torch that describe tensors.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from io import FileIO
from pathlib import Path, PosixPath
from typing import IO, Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hydra import heartbeat, results
from ddp_hydra.errors import CheckpointError
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.world import World, as_bytes, dense
from ddp_hydra.record import METADATA
from ddp_hydra.storage.files import NotingFile
from ddp_hydra.training import plain_state
from ddp_hydra.training.plain_state import KIND

PARTS = ("model", "ema", "optimizer")
"""Keys of the state that have large tensors."""
PARTS_IN = "parts_in"
"""Key of a state whose tensors are still in the files of the folder that it names, or with rank 0, by name."""
PART = "part"
"""The kind of the value that stands for a tensor in another file."""
DESCRIBING = {
    "torch.distributed.checkpoint.metadata": {
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
}
"""Classes that `.metadata` may have, by module."""
PIECE_BYTES = 2**28
"""A rank gives a sign of life after each piece that it reads."""
Like = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Makes the tensor that a part is read into, of its name, whole shape, and type."""


def taken_apart(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    # `content` is what `plain_state.encode` makes. It returns a state with names in place of its tensors, and the
    # tensors by these names: one that lies at several places has the name of the first.
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    rest = {key: _without(value, key, tensors, names) if key in PARTS else value for key, value in content.items()}
    return rest, tensors


def _without(value: Any, name: str, tensors: dict[str, Tensor], names: dict[int, str]) -> Any:
    # An inner function that calls itself would keep the tensors until Python looks for cycles.
    if isinstance(value, Tensor) and value.layout is torch.strided and value.ndim:
        name = names.setdefault(id(value), name)
        tensors[name] = value
        return {KIND: PART, "value": name}
    if type(value) in (list, tuple):
        return type(value)(_without(one, f"{name}.{number}", tensors, names) for number, one in enumerate(value))
    if not isinstance(value, dict):
        return value
    return plain_state.rebuilt(value, lambda key, one: (key, _without(one, f"{name}.{key}", tensors, names)))


def put_together(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {key: _filled(value, tensors) if key in PARTS else value for key, value in content.items()}


def _filled(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_filled(one, tensors) for one in value)
    if not isinstance(value, dict):
        return value
    if value.get(KIND) == PART:
        return tensors[value["value"]]
    return plain_state.rebuilt(value, lambda key, one: (key, _filled(one, tensors)))


def names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value.get(KIND) == PART:
        yield value["value"]
    elif isinstance(value, dict) or type(value) in (list, tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from names_in(one)


def write(
    tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup, step: int
) -> tuple[dict[str, int], dict[str, ReportingFile]]:
    # A collective. It returns the names of the files of all ranks, each with the rank that has written it; and what
    # this rank has written.
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.checkpoint.filesystem import FileSystem

    files: dict[str, ReportingFile] = {}

    class ReportingFiles(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            with super().create_stream(path, mode) as file:
                reporting = files[Path(path).name] = ReportingFile(cast(BinaryIO, file), step)
                with reporting.explained():
                    yield reporting

    class PatientWriter(FileSystemWriter):
        """Waits while the disk is full. The other ranks wait for this one."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            return self._with_room(partial(super().write_data, plan, planner))

        def finish(self, metadata: Any, results: Any) -> None:
            self._with_room(partial(super().finish, metadata, results))

        def _with_room(self, action: Callable[[], Any]) -> Any:
            def attempt() -> Any:
                before = set(folder.iterdir())
                try:
                    return action()
                except BaseException:
                    for path in set(folder.iterdir()) - before:
                        path.unlink()
                    raise

            return results.with_room(attempt)

    writer = PatientWriter(folder, sync_files=False)
    writer.fs = ReportingFiles()
    with plain_errors():
        described = save(dict(tensors), storage_writer=writer, process_group=group)
    names = {info.relative_path for info in described.storage_data.values()}
    return {METADATA: 0, **{name: int(name.split("_")[2]) for name in sorted(names)}}, files


class ReportingFile(NotingFile):
    """A file of the checkpoint of a step. It reports progress with each write."""

    def __init__(self, file: BinaryIO, step: int) -> None:
        super().__init__(file)
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def _write(self, data: Any) -> int:
        heartbeat.progress()
        if self.file.tell():
            fault_injection.write(self.step)
        return super()._write(data)


@contextmanager
def plain_errors() -> Iterator[None]:
    # Torch raises something that is no Exception.
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from None


def whole(_: str, shape: torch.Size, kind: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=kind)


def read(content: Mapping[str, Any], folder: Path, like: Like = whole) -> dict[str, Any]:
    # `content` is that of the folder's `state.pt`. Of the tensors, a rank reads what `like` makes.
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, load

    class DescribedReader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return found

        def read_data(self, plan: Any, planner: Any) -> Any:
            # Torch's own copies each piece twice, which takes three times as long.
            rest = []
            with ExitStack() as files:
                opened = cache(lambda name: files.enter_context((folder / name).open("rb", buffering=0)))
                for item in plan.items:
                    info, target = self.storage_data[item.storage_index], planner.resolve_tensor(item).detach()
                    file = opened(info.relative_path)
                    if (offset := offset_of(self._slice_file(file, info), item, target)) is None:
                        rest.append(item)
                        continue
                    read_into(target, file, info.offset + offset)
                    planner.commit_tensor(item, target)
            return super().read_data(replace(plan, items=rest), planner)

    class TensorPlanner(DefaultLoadPlanner):
        def load_bytes(self, *_: Any) -> None:
            raise CheckpointError(f"{folder} has a value that is no tensor")

    try:
        found = described(folder)
        known = found.state_dict_metadata
        tensors = {name: like(name, known[name].size, known[name].properties.dtype) for name in names_in(dict(content))}
        with plain_errors():
            load(tensors, storage_reader=DescribedReader(folder), planner=TensorPlanner(), no_dist=True)
    except CheckpointError:
        raise
    except Exception as error:  # torch and pickle raise about anything here
        raise CheckpointError(
            f"{folder} can't be read as a checkpoint ({type(error).__name__}: {error!s:.200})"
        ) from None
    return put_together(content, tensors)


def offset_of(saved: IO[bytes], item: Any, target: Tensor) -> int | None:
    # Where in a file of torch.save the bytes of `target` are; None if they are not there as they are in memory.
    tensor = torch.load(saved, map_location="meta", weights_only=True)
    for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    is_same = (tensor.dtype, tensor.shape, target.device.type) == (target.dtype, target.shape, "cpu")
    if not (is_same and tensor.is_contiguous() and target.is_contiguous()):
        return None
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return None if begin is None else begin + tensor.storage_offset() * tensor.itemsize


def read_into(target: Tensor, file: FileIO, offset: int) -> None:
    memory: memoryview = as_bytes(target).numpy().data
    while memory:
        heartbeat.progress()
        if not (n := os.preadv(file.fileno(), [memory[:PIECE_BYTES]], offset)):
            raise EOFError(f"{file.name} ends too early")
        memory, offset = memory[n:], offset + n


def send(make: Callable[[], dict[str, Any]], world: World) -> dict[str, Any]:
    # A collective. The tensors of the state stay on rank 0, and the other ranks get their layouts.
    own: dict[str, Tensor] = {}

    def outlined() -> dict[str, Any]:
        content = make()
        if content.get(PARTS_IN) or world.size == 1:
            return content
        content, tensors = taken_apart(content)
        own.update((name, dense(tensor)) for name, tensor in tensors.items())
        content = plain_state.begin_copy(content)()  # no number stays in the file
        return {**content, PARTS_IN: {name: tensor.to("meta") for name, tensor in own.items()}}

    content: dict[str, Any] = world.send(outlined)
    return {**content, PARTS_IN: own} if own else content


def with_parts(content: Mapping[str, Any], world: World, like: Like) -> Mapping[str, Any]:
    # A collective. The state is one of `send`; of its tensors, a rank keeps what `like` makes.
    parts = content.get(PARTS_IN)
    if parts is None:
        return content
    if isinstance(parts, str):
        return read(content, on_this_host(Path(parts)), like)
    tensors = {name: _received(tensor, world, partial(like, name)) for name, tensor in parts.items()}
    return put_together({name: part for name, part in content.items() if name != PARTS_IN}, tensors)


def _received(tensor: Tensor, world: World, like: Callable[[torch.Size, torch.dtype], Tensor]) -> Tensor:
    # `torch.empty_like` of a tensor without memory imports Sympy. Each restart would wait for that, and for DTensor.
    layout = tensor.shape, tensor.stride()
    whole = torch.empty_strided(*layout, dtype=tensor.dtype) if tensor.is_meta else tensor
    if whole.numel():
        world.send_from_rank_0(as_bytes(whole))
    share: Any = like(whole.shape, whole.dtype)
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is None or not isinstance(share, dtensor.DTensor):
        return whole if tensor.is_meta else whole.clone()  # out of the file
    own = dtensor.distribute_tensor(whole, share.device_mesh, share.placements, src_data_rank=None)
    share.to_local().copy_(own.to_local())  # it may be a view of the whole
    return share


def described(folder: Path) -> Any:
    with (folder / METADATA).open("rb") as file:
        found = _Descriptions(file).load()
    if found.storage_meta is None:
        raise CheckpointError(f"{folder / METADATA} says nothing of its files")
    for name in {info.relative_path for info in found.storage_data.values()}:
        if Path(name).name != name:
            raise CheckpointError(f"{folder / METADATA} names {name}, which is outside of its folder")
    return found


class _Descriptions(pickle.Unpickler):
    """Reads `.metadata` without building anything else than descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in DESCRIBING.get(module, ()):
            raise CheckpointError(f"the checkpoint's {METADATA} has a {module}.{name}, which describes no tensor")
        return PosixPath if module == "pathlib" else super().find_class(module, name)


def on_this_host(path: Path) -> Path:
    # A folder of the client is where it was given, or was sent to one of this worker's ranks.
    if path.exists():
        return path
    found = sorted(results.outbox().parent.parent.glob(f"rank-*/in/{path.name}"))
    if not found:
        raise CheckpointError(f"{path} is not on host {os.uname().nodename}")
    return found[0]
