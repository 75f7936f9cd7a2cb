"""The state of a training run: captured, written beside the training, and restored.

A checkpoint is a dict of tensors and plain values that `torch.load(weights_only=True)` takes. Randomness needs no
state: the order of samples, their augmentation and the seed of each step are functions of the position.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import nn

from ddp_hydra import heartbeat, results
from ddp_hydra.errors import CheckpointError, NonFiniteLoss
from ddp_hydra.rank import fault_injection
from ddp_hydra.training.finite import not_finite

FORMAT = 1


@dataclass
class Position:
    """How far a run is.

    Args:
        step: optimizer steps done.
        epoch: epochs completed.
        samples: samples seen by all ranks together.
        offset: of these, how many in the epoch under way.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    offset: int = 0

    def advance(self, samples: int) -> None:
        """One step, over so many samples of all ranks."""
        self.step += 1
        self.samples += samples
        self.offset += samples

    def end_epoch(self) -> None:
        """On to the next epoch."""
        self.epoch += 1
        self.offset = 0


@dataclass
class State:
    """All that a run needs to go on.

    Args:
        model: not wrapped in DDP.
        optimizer: its optimizer.
        scheduler: its learning-rate schedule.
        position: how far it is.
        config: what is kept of the config, see `stored.of`.
        best: the objective's best value so far.
        extras: name -> what else has a state_dict, or None.
        pending: the end of an epoch is reached, and its validation still to come.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    position: Position
    config: dict[str, Any]
    extras: Mapping[str, Any] = field(default_factory=dict)
    best: float | None = None
    pending: bool = False

    def capture(self) -> dict[str, Any]:
        """Copy the state to the CPU, where later steps don't change it."""
        return self.begin_capture()()

    def begin_capture(self) -> Callable[[], dict[str, Any]]:
        """Begin to copy the state to the CPU, and return a function that waits for the copy; see `begin_copy`."""
        return begin_copy(
            {
                "format": FORMAT,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                **{name: part.state_dict() for name, part in self.extras.items() if part is not None},
                "position": asdict(self.position),
                "best": self.best,
                "pending": self.pending,
                "config": self.config,
                "world_size": dist.get_world_size() if dist.is_initialized() else 1,
                "torch": str(torch.__version__),
            }
        )

    def restore(self, content: dict[str, Any]) -> None:
        """Put a captured state back.

        Raises:
            CheckpointError: it is of another model or optimizer.
        """
        load_weights(self.model, content)
        try:
            self.optimizer.load_state_dict(content["optimizer"])
            self.scheduler.load_state_dict(content["scheduler"])
            for name, part in self.extras.items():
                if part is not None and content.get(name):
                    part.load_state_dict(content[name])
            vars(self.position).update(asdict(Position(**content["position"])))
            for group in self.optimizer.param_groups:
                if missing := self.optimizer.defaults.keys() - group.keys():
                    raise ValueError(f"it has no {', '.join(sorted(missing))}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this optimizer and schedule ({error}): resume with the config it was "
                "made with (resume=<run dir> brings it along)"
            ) from error
        self.best = content.get("best")
        self.pending = bool(content.get("pending"))


def refuse_nonfinite(content: dict[str, Any], state: State) -> None:
    """Refuse a captured state with numbers that nothing can go on from: no checkpoint holds such.

    Raises:
        NonFiniteLoss: it names them.
    """
    if found := not_finite(content, (name for name, _ in state.model.named_buffers())):
        names = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
        raise NonFiniteLoss(
            f"after step {content['position']['step']} not all that is to be saved is finite ({names}), though losses "
            "and gradients were; it is not saved. Lower optimizer.lr, or give trainer.clip_norm, and go on from the "
            "last checkpoint with resume=<run dir>"
        )


def load_weights(model: nn.Module, content: dict[str, Any]) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        CheckpointError: they are of another model.
    """
    try:
        model.load_state_dict(content["model"])
    except (KeyError, TypeError, RuntimeError) as error:
        lines = str(error).splitlines()
        raise CheckpointError(
            f"the checkpoint is not of this model: {' '.join(line.strip() for line in lines[:3])[:300]}"
        ) from None


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint file; it is never unpickled.

    Raises:
        CheckpointError: it is missing, damaged, or something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}") from None
    except Exception as error:  # torch raises about anything here
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"{path} can't be read as a checkpoint ({reason:.140}): it is "
            "damaged or something else; take an earlier step file of the same run"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of ddp_hydra: it has no format={FORMAT}")
    return content


def read_on_all_ranks(path: Path) -> dict[str, Any]:
    """Read on rank 0 and send to the others. A collective.

    Args:
        path: the file, on rank 0's host.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read(path)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        box[0] = read(path)
    dist.broadcast_object_list(box, src=0)
    return box[0]


def begin_copy(value: Any) -> Callable[[], Any]:
    """Copy all tensors of a nested state to the CPU, and return a function that waits for the copy.

    Copies from a GPU go to pinned memory while the loop goes on: what it gives to the GPU later comes after them.
    """
    copied = _copy(value)
    if not torch.cuda.is_initialized():
        return lambda: copied
    done = torch.cuda.Event()
    done.record()

    def arrived() -> Any:
        done.synchronize()
        return copied

    return arrived


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_cuda:
            return value.detach().clone()
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value.detach(), non_blocking=True)
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(part) for part in value)
    return value


def write(content: dict[str, Any], path: Path, step: int) -> None:
    """Write a captured state to a file, with signs of life."""
    with path.open("wb") as file:
        ticking = Ticking(file, step)
        try:
            torch.save(content, cast(IO[bytes], ticking))
        except Exception as error:
            raise ticking.error or error from None  # torch would rather complain of the file's length


class Ticking:
    """A file that tells the pulse of each piece written.

    Args:
        file: where to write.
        step: of the checkpoint.

    Attributes:
        error: the first of writing.
    """

    def __init__(self, file: BinaryIO, step: int) -> None:
        self.file, self.step = file, step
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        """Write one piece."""
        heartbeat.progress()
        try:
            if self.file.tell():
                fault_injection.write(self.step)
            return self.file.write(data)
        except Exception as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Pass on."""
        self.file.flush()


class Saver:
    """Writes checkpoints in the background: the loop waits only for the copy of the tensors."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(self, state: State, metrics: dict[str, float], best: bool) -> None:
        """Copy the state, and write it while training goes on. Waits for the one before."""
        self.wait()
        content = state.begin_capture()
        meta = {**asdict(state.position), "metrics": metrics, "best": best}
        heartbeat.here().saving = True  # until it is sent
        self.thread = threading.Thread(target=self._write, args=(content, meta, state), name="checkpoint")
        self.thread.start()

    def _write(self, content: Callable[[], dict[str, Any]], meta: dict[str, Any], state: State) -> None:
        try:
            refuse_nonfinite(content(), state)
            results.submit_file(
                f"checkpoints/step-{meta['step']:06d}.pt",
                lambda path: write(content(), path, meta["step"]),
                step=meta["step"],
                checkpoint=meta,
            )
        except BaseException as error:
            self.error = error
        finally:
            heartbeat.here().saving = False

    def wait(self) -> None:
        """Wait until the last checkpoint is on its way; raise what went wrong with it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error
