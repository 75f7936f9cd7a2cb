"""Writes checkpoints in the background, and reads them, and the weights in any other file.

After a step whose loss or gradient is not finite, all ranks stop, skip it, or roll back together to the last one.
"""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import nn

from ddp_hydra import heartbeat, results
from ddp_hydra.console.text import printable
from ddp_hydra.errors import CheckpointError, NonFiniteLoss
from ddp_hydra.rank import fault_injection
from ddp_hydra.record import Checkpoint
from ddp_hydra.storage.files import NotingFile
from ddp_hydra.training import plain_state
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.plain_state import begin_copy, not_finite
from ddp_hydra.training.state import FORMAT, TrainingState


def refuse_nonfinite(content: dict[str, Any], state: TrainingState) -> None:
    unchecked = [name for name, _ in state.model.named_buffers(remove_duplicate=False)]
    # A frozen parameter may be a mask.
    unchecked += [name for name, one in state.model.named_parameters(remove_duplicate=False) if not one.requires_grad]
    unchecked += state.infinite
    if (loss := state.extras.get("loss")) is not None:
        unchecked += [f"loss.{name}" for name, _ in loss.named_buffers(remove_duplicate=False)]
    if bad := not_finite(content, unchecked):
        raise NonFiniteLoss(
            f"the state after step {content['position']['step']} is not finite ({shown(bad, 6)}), although losses "
            "and gradients were, so it is not saved. Lower optimizer.lr, give trainer.clip_norm, with resume=<run dir>"
        )


def read(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}") from None
    except Exception as error:  # torch raises about anything here
        what = first_sentence(error)
        raise CheckpointError(f"{path} can't be read as a checkpoint ({what}): take an earlier step file") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of ddp_hydra: it has no format={FORMAT}")
    return content


def first_sentence(error: Exception) -> str:
    """Return the kind of an error and the first sentence of its message: torch goes on for a page."""
    line = printable(f"{type(error).__name__}: {error}").splitlines()[0]
    return line.partition(". ")[0].rstrip(".")


def load_fitting(model: nn.Module, path: Path) -> list[str]:
    given = weights_in(path)
    own = dict(plain_state.tensors(model.state_dict()))
    fitting = {name: value for name, value in given.items() if name in own and value.shape == own[name].shape}
    if len(fitting) < len(own) / 2:
        raise CheckpointError(
            f"{path} has weights for {len(fitting)} of the {len(own)} tensors of this model, so it is of another one. "
            f"Its names begin with {', '.join(list(given)[:3])}, the model's with {', '.join(list(own)[:3])}"
        )
    model.load_state_dict(fitting, strict=False)
    return [name for name in own if name not in fitting]


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises about anything here
        raise CheckpointError(f"{path} can't be read as weights ({first_sentence(error)})") from None
    for name in ("ema", "model", "state_dict"):  # the keys of our checkpoints and of most others
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    found = dict(plain_state.tensors(content)) if isinstance(content, dict) else {}
    if not found or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"{path} holds no weights: give a state_dict of names and tensors")
    return {name.removeprefix("module."): value for name, value in found.items()}


def write(content: dict[str, Any], path: Path, step: int) -> None:
    with path.open("wb") as file:
        reporting = ReportingFile(file, step)
        try:
            torch.save(content, cast(IO[bytes], reporting))
        except Exception as error:
            raise reporting.error or error from None


class ReportingFile(NotingFile):
    """A file that reports progress with each write, and notes why one failed.

    Args:
        file: where to write.
        step: of the checkpoint.
    """

    def __init__(self, file: BinaryIO, step: int) -> None:
        super().__init__(file)
        self.step = step

    def _write(self, data: Any) -> int:
        heartbeat.progress()
        if self.file.tell():
            fault_injection.write(self.step)
        return super()._write(data)


class CheckpointSaver:
    """Writes checkpoints in the background. The loop waits only until the tensors are copied."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(self, state: TrainingState, metrics: dict[str, float], best: bool) -> None:
        # Wait for the checkpoint before it.
        self.wait()
        content = state.begin_capture()
        position = state.position
        described = Checkpoint(position.step, position.epoch, position.samples, dict(metrics), best)
        heartbeat.here().saving = True  # until it is sent
        self.thread = threading.Thread(target=self._write, args=(content, described, state), name="checkpoint")
        self.thread.start()

    def _write(self, content: Callable[[], dict[str, Any]], described: Checkpoint, state: TrainingState) -> None:
        try:
            refuse_nonfinite(content(), state)
            results.submit_file(
                f"checkpoints/step-{described.step:06d}.pt",
                lambda path: write(content(), path, described.step),
                described.step,
                described,
            )
        except BaseException as error:
            self.error = error
        finally:
            heartbeat.here().saving = False

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error


SHOWN = 64
"""The most sample ids in a message; the record has all of them."""
NAMED = 6
"""The most parameters in a message; the record has all of them."""


@dataclass(frozen=True)
class NonFiniteStep:
    """A step whose loss or gradient is not finite.

    Args:
        bad_rank: the first rank that found it.
        loss: of the step, on this rank.
        gradients: names of the parameters whose gradient is not finite; empty if the loss is not finite.
        steps_ago: 0 for the step under way, 1 for the one before it.
    """

    bad_rank: int
    loss: float
    gradients: Sequence[str] = ()
    steps_ago: int = 0


class NonFiniteHandler:
    """Handles steps that are not finite on some rank.

    Args:
        policy: "abort" raises. "skip" leaves the step's update out. "rollback" first goes back to the last
            checkpoint, in case the weights had gone wrong before; if the step fails again, its update is left out.
        max_steps: the most steps that may fail.
        state: of the run.

    Attributes:
        steps: the steps that failed.
    """

    def __init__(self, policy: str, max_steps: int, state: TrainingState) -> None:
        self.policy, self.max_steps, self.state = policy, max_steps, state
        self.steps: list[int] = []
        self.buffers = list(state.model.buffers()) if policy != "abort" else []
        self.saved_buffers = [buffer.clone() for buffer in self.buffers]
        self.checkpoint: Callable[[], dict[str, Any]] | None = None
        self.stages = 0
        self.remember()

    def remember(self) -> None:
        # Called at each checkpoint.
        if self.policy == "rollback":
            self.checkpoint = self.state.begin_capture()
            self.stages = len(self.state.unfrozen)

    @property
    def is_outdated(self) -> bool:
        # Parameters were unfrozen since: the copy does not fit the optimizer any more.
        return self.policy == "rollback" and self.stages != len(self.state.unfrozen)

    @torch.no_grad()
    def before_step(self) -> None:
        for saved, buffer in zip(self.saved_buffers, self.buffers, strict=True):
            saved.copy_(buffer)

    @torch.no_grad()
    def handle(self, found: NonFiniteStep, rank: int, samples: Sequence[int]) -> bool:
        step = self.state.position.step + 1 - found.steps_ago
        record(step, found, rank, samples)
        again = step in self.steps
        if not again:
            self.steps.append(step)
        if self.policy == "abort" or len(self.steps) > self.max_steps:
            raise NonFiniteLoss(self._message(step, found, rank, samples), consequence=rank != found.bad_rank)
        for saved, buffer in zip(self.saved_buffers, self.buffers, strict=True):
            buffer.copy_(saved)
        if self.policy == "skip" or again:
            return False
        assert self.checkpoint is not None
        content = self.checkpoint()
        refuse_nonfinite(content, self.state)
        self.state.restore(begin_copy(content)())  # a copy: the optimizer will change these tensors
        return True

    def _message(self, step: int, found: NonFiniteStep, rank: int, samples: Sequence[int]) -> str:
        gradients = found.gradients
        if rank != found.bad_rank:
            what = "gradient" if gradients else "loss"
            return f"rank {found.bad_rank} found a {what} that is not finite in step {step}"
        bad, advice = f"the loss is {found.loss} in step {step}", ""
        if gradients:
            names = shown(gradients, NAMED)
            bad = f"the gradient of {names} is not finite in step {step}, although the loss is {found.loss:.4g}"
            advice = ", have debug=anomaly name the operation that it comes from"
        ids = shown([str(sample) for sample in samples], SHOWN)
        allowed = f", and {self.max_steps} such steps were allowed (trainer.max_nonfinite)"
        spent = allowed if self.policy != "abort" else ""
        return (
            f"{bad}{spent}; samples of this rank: {ids}. Lower optimizer.lr, look at these samples{advice}, or go on "
            "without such steps with trainer.on_nonfinite=skip or rollback"
        )


def record(step: int, found: NonFiniteStep, rank: int, samples: Sequence[int]) -> None:
    # Samples of the ranks whose loss is not finite; of all ranks if a gradient is not.
    if found.gradients or not math.isfinite(found.loss):
        content = {"step": step, "rank": rank, "loss": str(found.loss), "samples": [int(sample) for sample in samples]}
        content |= {"gradients": list(found.gradients)} if found.gradients else {}
        print(f"{'gradient' if found.gradients else 'loss'} not finite: {json.dumps(content)}")  # noqa: T201
        results.text("nonfinite", json.dumps(content), step=step)
    elif rank == 0:
        print(f"loss or gradient not finite on rank {found.bad_rank} in step {step}")  # noqa: T201
