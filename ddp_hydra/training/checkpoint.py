"""Writes checkpoints in the background, and reads them, and the weights in any other file."""

from __future__ import annotations

import shutil
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast
from zipfile import is_zipfile

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from ddp_hydra import heartbeat, results
from ddp_hydra.console.text import printable, size_text
from ddp_hydra.errors import CheckpointError, ConfigError, NonFiniteLoss
from ddp_hydra.finetune.adapter import IN_ADAPTED
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.record import Checkpoint
from ddp_hydra.storage.manifest import FOLDER, STATE, state_file, step_name
from ddp_hydra.training import plain_state, sharded_checkpoint
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.finite import not_finite
from ddp_hydra.training.parallel.weights import keep_loaded, load_part, unsaved
from ddp_hydra.training.sharded_checkpoint import PARTS_IN, ReportingFile
from ddp_hydra.training.state import FORMAT, TrainingState, each

_OF_COMPILE, _OF_DDP, _OF_AVERAGE = "_orig_mod.", "module.", "n_averaged"
_AVERAGED = "ema_model."
"""What ema-pytorch puts in front of the average's names. The weights are beside them, as online_model."""
# Not ema_state_dict: in files of mmengine, it holds the weights, and state_dict their average.
_AVERAGES = "ema", "ema_model", "model_ema", "state_dict_ema"
_STATES = *_AVERAGES, "model", "model_state_dict", "state_dict"
"""The keys that hold weights in our checkpoints, and in most others."""


def finite_check(state: TrainingState) -> Callable[[dict[str, Any]], None]:
    # The names are those of now: steps may make modules and buffers while a thread checks the content.
    groups = [group for _, optimizer in each(state.optimizer) for group in optimizer.param_groups]
    trained = {parameter for group in groups for parameter in group["params"]}
    unchecked = [*state.parallel.unchecked_names(trained, state.extras.get("loss")), *state.infinite]
    of_task = task.checked_names() if (task := state.extras.get("task")) is not None else ()

    def refuse_nonfinite(content: dict[str, Any]) -> None:
        if bad := not_finite(content, unchecked, of_task):
            raise NonFiniteLoss(
                f"the state after step {content['position']['step']} is not finite ({shown(bad, 6)}), although losses "
                "and gradients were, so it is not saved. Lower optimizer.lr, give trainer.clip_norm, with "
                "resume=<run dir>"
            )

    return refuse_nonfinite


def read(path: Path, whole: bool = True) -> dict[str, Any]:
    # If not `whole`, tensors that are in other files stay there, and `PARTS_IN` says where.
    file = state_file(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}") from None
    except Exception as error:  # torch raises about anything here
        what = first_sentence(error)
        raise CheckpointError(f"{path} can't be read as a checkpoint ({what}): take an earlier step file") from None
    number = content.get("format") if isinstance(content, dict) else None
    if number != FORMAT:
        what = f"of this ddp_hydra: it has format={number}, not {FORMAT}"
        what = what if type(number) is int else f"of ddp_hydra: it has no format={FORMAT}"
        raise CheckpointError(f"{path} is not a checkpoint {what}")
    if file == path:
        if any(sharded_checkpoint.names_in(content.get("model"))):
            raise CheckpointError(
                f"{path} is a part of a checkpoint, without its tensors: copy and give the whole folder"
            )
        return content
    return sharded_checkpoint.read(content, path) if whole else {**content, PARTS_IN: str(path)}


def first_sentence(error: Exception) -> str:
    # Torch goes on for a page.
    line = printable(f"{type(error).__name__}: {error}").splitlines()[0]
    return line.partition(". ")[0].rstrip(".")


def load_fitting(path: Path, model: nn.Module, world: World) -> list[str]:
    # A collective. Only the host of rank 0 has the file.
    own = dict(plain_state.tensors(model.state_dict()))
    shapes = {name: one.shape for name, one in own.items()}
    shapes |= {IN_ADAPTED.sub(".", name): shape for name, shape in shapes.items()}
    given: dict[str, torch.Tensor] = world.send(lambda: weights_in(path, shapes))
    changed: frozenset[str] = getattr(model, "changed_names", frozenset()) - given.keys()
    if begun := sorted(name for name in changed if IN_ADAPTED.sub(".", name) in given):
        raise ConfigError(
            f"{path} lacks {begun[0]}, which peft has changed as the adapter began, so its other weights don't fit: "
            "give adapter.init_lora_weights=true with model.weights"
        )
    given |= {name: given[plain] for name in own if (plain := IN_ADAPTED.sub(".", name)) in given}
    own = {name: one for name, one in own.items() if name in given or not (".lora_" in name or name in unsaved(model))}
    fitting = {name: value for name, value in given.items() if name in own and value.shape == own[name].shape}
    if len(fitting) < len(own) / 2:
        raise CheckpointError(
            f"{path} has weights for {len(fitting)} of the {len(own)} tensors of this model, so it is of another one. "
            f"Its names begin with {', '.join(list(given)[:3])}, the model's with {', '.join(list(own)[:3])}"
        )
    load_part(model, fitting)
    keep_loaded(model, fitting)
    return [name for name in own if name not in fitting]


def weights_in(path: Path, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    # By the model's names. `shapes`: of its tensors.
    try:
        content: Any = read(path) if path.is_dir() else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises about anything here
        raise CheckpointError(f"{path} can't be read as weights ({first_sentence(error)})") from None
    found = []
    for state in states_in(content):
        names = own_names(state, shapes)
        found.append({names[name]: value for name, value in state.items()})
    if not found:
        raise CheckpointError(f"{path} holds no weights: give a state_dict of names and tensors")
    # An average may have its decay as a tensor, and its weights as a list. It may lack buffers and frozen parameters:
    # these come from the weights.
    n_fitting = [sum(shapes.get(name) == one.shape for name, one in state.items()) for state in found]
    least = [min(len(state), max(n_fitting)) / 2 for state in found]
    fitting = [state for state, n, needed in zip(found, n_fitting, least, strict=True) if n and n >= needed]
    fitting = fitting or [max(found, key=lambda state: sum(one.numel() for one in state.values()))]
    return {name: value for state in reversed(fitting) for name, value in state.items()}


def states_in(content: Any, in_average: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    # Averages come first. What holds one may have it under any key.
    if not isinstance(content, dict):
        return
    for name in _STATES:
        yield from states_in(content.get(name), in_average or name in _AVERAGES)
    found = dict(plain_state.tensors(content))
    if found and all(isinstance(name, str) for name in found):
        yield found
        if averaged := {name.removeprefix(_AVERAGED): one for name, one in found.items() if name.startswith(_AVERAGED)}:
            yield averaged
    for name in [name for name in content if name not in _STATES] if in_average else ():
        yield from states_in(content[name], in_average)


def own_names(names: Collection[str], known: Collection[str]) -> dict[str, str]:
    # For each name in a file, the model's. torch.compile, DistributedDataParallel and AveragedModel put something in
    # front of both; a model's own names may begin so, too.
    own = {name.replace(_OF_COMPILE, ""): name for name in known}
    tries = [{name: name.replace(_OF_COMPILE, "") for name in names}]
    while (rest := set(tries[-1].values()) - {_OF_AVERAGE}) and all(one.startswith(_OF_DDP) for one in rest):
        tries.append({name: one.removeprefix(_OF_DDP) for name, one in tries[-1].items()})
    best = max(tries, key=lambda found: sum(one in own for one in found.values()))
    return {name: own.get(one, one) for name, one in best.items()}


def write(content: dict[str, Any], path: Path, step: int) -> ReportingFile:
    with path.open("wb") as file, ReportingFile(file, step).explained() as reporting:
        torch.save(content, cast(IO[bytes], reporting))
    return reporting


def move(path: Path, written: ReportingFile | None, target: Path) -> ReportingFile | None:
    shutil.move(path, target)
    return written


class CheckpointSaver:
    """Writes checkpoints in the background. The loop waits only until the tensors are copied.

    Rank 0 writes the state into a file. Where its tensors take more than `shard_above_gb`, each rank writes a part of
    them into a file of its own, and the checkpoint is a folder.
    """

    def __init__(self, world: World = ALONE, shard_above_gb: float | None = None) -> None:
        self.world, self.shard_above_gb, self.number = world, shard_above_gb, 0
        self.group: Any = None
        self.executor = ThreadPoolExecutor(1, "checkpoint")
        self.sending: Future[None] | None = None

    def check_space(self, n_bytes: int) -> None:
        # A collective. Ranks of a host, and of a disk there, write into the folders of their workers.
        in_parts = self.shard_above_gb is not None and self.world.group and n_bytes > self.shard_above_gb * 1e9
        own = n_bytes // self.world.size if in_parts else n_bytes if self.world.rank == 0 else 0
        folder = results.outbox().parent
        disk = (socket.gethostname(), folder.stat().st_dev)
        needed: Counter[tuple[str, int]] = Counter()
        rows = self.world.gather_objects((disk, own, shutil.disk_usage(folder).free, str(folder)))
        for disk, size, free, name in rows:
            needed[disk] += size
            if needed[disk] > free and name == str(folder):
                raise ConfigError(
                    f"{size_text(free)} are free in {name} on host {disk[0]}, and its ranks write "
                    f"{size_text(needed[disk])} of a checkpoint there before it is fetched: free "
                    f"{size_text(needed[disk] - free)}, or give the workers another folder by DASK_TEMPORARY_DIRECTORY "
                    "or dask worker --local-directory <folder>"
                )

    def save(self, state: TrainingState, metrics: dict[str, float], best: bool) -> None:
        # A collective. Wait for the checkpoint before it.
        self.wait()
        state.gather(self.world)
        self.number += 1
        at = state.position
        described = Checkpoint(at.step, at.epoch, at.samples, dict(metrics), best)
        if self.shard_above_gb is not None and self.world.group and state.n_bytes() > self.shard_above_gb * 1e9:
            send = self._parts(state, replace(described, number=self.number))
        elif self.world.rank == 0:
            send = self._file(state, described)
        else:
            if state.parallel.is_sharded:
                state.begin_capture(whole=True)
            return
        heartbeat.here().saving = True  # until it is sent
        self.sending = self.executor.submit(self._run, send)

    def _file(self, state: TrainingState, described: Checkpoint) -> Callable[[], None]:
        content, step, check = state.begin_capture(whole=True), described.step, finite_check(state)

        def send() -> None:
            check(content())
            path = f"{FOLDER}/{step_name(step)}"
            results.submit_file(path, lambda target: write(content(), target, step), step, described)

        return send

    def _parts(self, state: TrainingState, described: Checkpoint) -> Callable[[], None]:
        if self.group is None:
            self.group = dist.new_group(backend="gloo")
        content, step, check = state.begin_capture(), described.step, finite_check(state)
        left_out = state.names_of_rank_0() if self.world.rank else set()
        path = f"{FOLDER}/{step_name(step, is_folder=True)}"

        def send() -> None:
            check(content())
            rest, copied = sharded_checkpoint.taken_apart(content())
            tensors = {name: tensor for name, tensor in copied.items() if name not in left_out}
            beside = partial(TemporaryDirectory, prefix="save-", dir=results.outbox().parent)
            with results.with_room(beside) as folder:
                owners, files = sharded_checkpoint.write(tensors, Path(folder), self.group, step)
                if self.world.rank == 0:
                    whole = replace(described, parts={STATE: 0, **owners})
                    results.submit_file(f"{path}/{STATE}", lambda target: write(rest, target, step), step, whole)
                for name in [name for name, rank in owners.items() if rank == self.world.rank]:
                    writer = partial(move, Path(folder, name), files.get(name))
                    results.submit_file(f"{path}/{name}", writer, step, described)

        return send

    def _run(self, send: Callable[[], None]) -> None:
        try:
            send()
        finally:
            heartbeat.here().saving = False

    def wait(self) -> None:
        # What has failed is raised once.
        sending, self.sending = self.sending, None
        if sending is not None:
            sending.result()
