"""Calls the code of users at certain moments: their base class, the run as they see it, and some of ours."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import torch
from torch import nn

from ddp_hydra import heartbeat, results
from ddp_hydra.config.objective import OWN, OWN_PREFIXES
from ddp_hydra.console.text import is_chosen, listed
from ddp_hydra.errors import ConfigError, RecordError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.training.cadence import is_due
from ddp_hydra.training.parallel import parameter_groups
from ddp_hydra.training.state import TrainingState, each
from ddp_hydra.training.task_state import load_part, refusals

BINS = 64


class Callback:
    """Code that is called at certain moments, on all ranks alike. A subclass defines the methods that it needs.

    A callback looks, logs, and may ask to stop. It does not change weights, learning rates or what is frozen: a run
    that is resumed would not repeat that. `RunView.unfreeze` is the exception, because checkpoints remember it. If a
    callback has to change more, it sets `changes_training`, and keeps what a resume needs in its own state.

    A checkpoint keeps the state that a callback has on rank 0, and a resume gives it to all ranks. With `on_each_rank`,
    it keeps the states of all ranks, and each rank gets its own; of more ranks than before, some get the same.
    """

    changes_training = False
    on_each_rank = False

    def on_start(self, run: RunView) -> None:
        """Act before the first step, also of a resumed run."""

    def on_step(self, run: RunView) -> None:
        """Act after each step."""

    def on_validation(self, run: RunView) -> None:
        """Act after each validation, whose metrics `run.metrics` has, or where one is due without a set for it."""

    def on_checkpoint(self, run: RunView) -> None:
        """Act before each checkpoint is written."""

    def on_end(self, run: RunView) -> None:
        """Act after the last step, also of a run that was asked to stop."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: tensors and plain values; by default, nothing. Called after `on_start`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint: before `on_start`, and where a run goes back to an earlier step.

        A rollback gives an empty one, `{}`, too, if that is what `state_dict` has returned.
        """


class RunView:
    """A run, as callbacks see it.

    Args:
        run: the `training.run.TrainingRun`, which calls the callbacks.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def model(self) -> nn.Module:
        """The model, not wrapped in DDP."""
        model: nn.Module = self._run.model
        return model

    @property
    def average(self) -> nn.Module | None:
        """The moving average of the model, which is validated; None without trainer.ema_decay.

        An optimizer with eval() and train() has one, too: as it was at the last validation or checkpoint.
        """
        return self._run.ema.model if self._run.ema is not None else None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._run.position.step

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self._run.cadence.total_steps

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._run.position.epoch

    @property
    def samples(self) -> int:
        """Samples that all ranks together have seen."""
        return self._run.position.samples

    @property
    def rank(self) -> int:
        """This rank."""
        return self._run.rank

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last value of each metric.

        From the end of an epoch until the next record of the training, metrics of the training are means over it.
        """
        return dict(self._run.state.metrics)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._run.loader.device

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log numbers: metrics.jsonl, TensorBoard, and the loggers. The numbers of rank 0 count.

        `objective.metric` may be one that is logged in each `on_validation`.

        Raises:
            ConfigError: a name is one of the run's own.
        """
        self._run.names.take(metrics)
        if self.rank == 0:
            self._run.logged |= results.send_metrics(metrics, self.step, self._run.epoch_shown, self.samples)

    def text(self, name: str, text: str) -> None:
        """Show a text (Markdown). Rank 0's counts."""
        if self.rank == 0:
            results.text(name, text, self.step)

    def image(self, name: str, pixels: Any) -> None:
        """Show an image. Rank 0's counts.

        Args:
            name: of the image.
            pixels: (height, width) or (height, width, 3), an array or a tensor: whole numbers from 0 to 255, or
                fractions from 0 to 1; fractions outside are clipped, as torch's `add_image` does.

        Raises:
            RecordError: it has another shape, or whole numbers outside of 0 to 255.
        """
        if self.rank == 0:
            from PIL import Image

            content = io.BytesIO()
            wanted = "pixels of shape (height, width) or (height, width, 3)"
            got = tuple(pixels.shape) if hasattr(pixels, "shape") else type(pixels).__name__
            try:
                given = pixels.detach().cpu() if torch.is_tensor(pixels) else pixels
                found = np.asarray(given.double() if torch.is_tensor(given) and given.is_floating_point() else given)
                if found.dtype.kind in "bf":
                    found = (np.nan_to_num(found).clip(0, 1) * 255.0).round()
                elif found.size and found.dtype.kind in "iu" and not 0 <= found.min() <= found.max() <= 255:
                    wanted = "whole numbers from 0 to 255, or fractions from 0 to 1"
                    got = f"{found.min()} to {found.max()}"
                    raise ValueError
                Image.fromarray(found.astype(np.uint8)).save(content, "PNG")
            except (TypeError, ValueError, OverflowError):
                raise RecordError(f"run.image({name!r:.80}, …) takes {wanted}, got {got}") from None
            results.image(name, content.getvalue(), self.step)

    def histogram(self, name: str, values: torch.Tensor) -> None:
        """Show how values are distributed. The values of rank 0 count.

        Args:
            name: of the histogram.
            values: of any shape; values that are not finite are left out. A tensor of a sharded model is gathered, so
                all ranks have to call this.
        """
        if hasattr(values, "full_tensor"):
            values = values.full_tensor()
        if self.rank == 0:
            flat = torch.as_tensor(values).detach().float().flatten()
            counts, edges = np.histogram(flat[flat.isfinite()].cpu().numpy(), BINS)
            results.histogram(name, edges.tolist(), counts.tolist(), self.step)

    def stop(self, reason: str, done: bool = True) -> None:
        """End the run: at this validation, or else after the next step. One rank that asks is enough.

        Args:
            reason: shown to the user.
            done: the run validates, saves and counts as done. False: it saves and counts as interrupted, to be resumed.
        """
        signal = self._run.stop_signal
        if not signal.asked:
            signal.why, signal.asked_after = str(reason), self.step
            if not done:
                results.warn(f"a callback asked to stop after step {self.step}: {reason}")
        signal.asked = signal.asked or heartbeat.REASONS.index("done" if done else "callback")

    def unfreeze(self, patterns: str | Sequence[str], lr: float | None = None) -> None:
        """Train parameters that `trainer.freeze` has frozen, from now on, on all ranks. A collective.

        Checkpoints remember it, so a resumed run does the same.

        Args:
            patterns: of parameter names, as of `trainer.freeze`; a text is one of them.
            lr: the optimizer's own rate for them, to which the schedule applies; None: the rate of the others, or
                of the group that the optimizer's function gives them.

        Raises:
            ConfigError: the patterns fit no frozen parameter, or the schedule can't take more parameters.
        """
        self._run.unfreeze(patterns, lr)


class MetricNames:
    """The names of metrics. A name of the run can't be one of the user's code.

    Attributes:
        of_run: names that the run has logged.
        of_user: names that a callback, model, loss or data set has logged.
    """

    def __init__(self) -> None:
        self.of_run: set[str] = set()
        self.of_user: set[str] = set()

    def take(self, names: Iterable[str]) -> None:
        """Note names that the user's code logs; refuse one of the run's own."""
        given = set(map(str, names))
        self._refuse(name for name in given if name.startswith(OWN_PREFIXES) or name in OWN or name in self.of_run)
        self.of_user |= given

    def add(self, names: Iterable[str]) -> None:
        """Note names that the run logs, or will log; refuse one that the user's code has logged before.

        Some of a validation are known only once there was one.
        """
        self.of_run.update(names)
        self._refuse(self.of_run & self.of_user)

    def _refuse(self, taken: Iterable[str]) -> None:
        for name in taken:
            own = ", ".join((*OWN_PREFIXES, *OWN))
            raise ConfigError(
                f"results.log, or run.log of a callback: {name!r} is a name of the run's own metrics ({own}, and those "
                f"of its validation): give another, 'my/{name.rpartition('/')[2]}'"
            )


class Callbacks:
    """Calls the callbacks of a run, and sees that they change nothing that a resume would not repeat."""

    def __init__(self, callbacks: Mapping[str, Callback], state: TrainingState, world: World = ALONE) -> None:
        self.callbacks, self.state, self.world = dict(callbacks), state, world
        self.of_ranks: dict[str, list[dict[str, Any]]] = {}
        self.loaded: Mapping[str, Any] = {}
        # A callback may make in on_start what it has a state of.
        self.started = {name for name, one in self.callbacks.items() if type(one).on_start is Callback.on_start}

    def call(self, event: str, view: RunView) -> None:
        """Call the method of all callbacks for an event; refuse changes of the training without `changes_training`."""
        for name, callback in self.callbacks.items():
            modes = [(module, module.training) for module in self.state.model.modules()]
            before = self._fingerprint()
            with results.in_callback(view.log):
                getattr(callback, f"on_{event}")(view)
            self.started.add(name)
            for module, mode in modes:
                module.training = mode
            unfroze = self.state.unfrozen != before["unfrozen"]
            if unfroze and self.state.model.training:  # amid an epoch: at once, as in a run that is resumed here
                parameter_groups.train_mode(self.state.model, view._run.frozen_norms)
            if callback.changes_training or unfroze:
                continue
            after = self._fingerprint()
            if changed := [what for what, value in before.items() if value != after[what]]:
                raise ConfigError(
                    f"callbacks.{name} ({type(callback).__name__}) has changed {' and '.join(changed)}, which a "
                    "resumed run would not repeat: use run.unfreeze(...), or set changes_training=True"
                )

    def _fingerprint(self) -> dict[str, Any]:
        """Return numbers that change when the training is changed."""
        weights, is_trained = self.state.parallel.fingerprint()
        groups = [group for _, optimizer in each(self.state.optimizer) for group in optimizer.param_groups]
        return {
            "weights": weights,
            "what is frozen": is_trained,
            "the optimizer's settings": [[v for k, v in group.items() if k != "params"] for group in groups],
            "unfrozen": list(self.state.unfrozen),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback that defines one. Before on_start, that is what it was given."""
        found: dict[str, Any] = {}
        for name, callback in self.callbacks.items():
            if name not in self.started:
                if name in self.loaded:
                    found[name] = self.loaded[name]
            elif getattr(callback.state_dict, "__func__", None) is not Callback.state_dict:
                state = callback.state_dict()
                found[name] = {"ranks": self.of_ranks.get(name, [state])} if callback.on_each_rank else state
        return found

    def gather(self, gather_objects: Callable[[Any], list[Any]]) -> None:
        """Collect the states that a checkpoint keeps of each rank. A collective."""
        for name, callback in self.callbacks.items():
            if callback.on_each_rank and name in self.started:
                self.of_ranks[name] = gather_objects(callback.state_dict())

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the state of the callbacks that the checkpoint knows."""
        self.loaded = states
        for name, state in self._of_this_rank(states).items():
            if state:
                load_part(self.callbacks[name], "callback", self._shown(name), state)

    def empty(self, states: Mapping[str, Any]) -> dict[str, str]:
        """Go back to the states that are empty. Return why a callback does not take it, by its name."""
        empty = [name for name, state in self._of_this_rank(states).items() if not state]
        return refusals({self._shown(name): self.callbacks[name] for name in empty})

    def _of_this_rank(self, states: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: states[name] for name in self.callbacks if name in states}
        for name, state in found.items():
            if state and self.callbacks[name].on_each_rank:
                found[name] = state["ranks"][self.world.rank % len(state["ranks"])]
        return found

    def _shown(self, name: str) -> str:
        return f"callbacks.{name} ({type(self.callbacks[name]).__name__})"


class Histograms(Callback):
    """Shows the distribution of parameters, and of their gradients, in TensorBoard.

    Args:
        parameters: patterns of parameter names, "layer1.*".
        every_steps: steps between two histograms; 0: none.
        gradients: whether to show the gradients, too.
    """

    def __init__(self, parameters: str | Sequence[str] = "*", every_steps: int = 100, gradients: bool = True) -> None:
        self.parameters, self.every_steps, self.gradients = listed(parameters), every_steps, gradients

    def on_step(self, run: RunView) -> None:
        """Show them when it is time."""
        if not is_due(run.step, self.every_steps):
            return
        for name, parameter in run.model.named_parameters():
            if is_chosen([name], self.parameters):
                run.histogram(f"weights/{name}", parameter)
                if self.gradients and parameter.grad is not None:
                    run.histogram(f"gradients/{name}", parameter.grad)


class Unfreeze(Callback):
    """Trains parameters that `trainer.freeze` has frozen, once some epochs are done.

    Args:
        after_epochs: epochs in which they stay frozen.
        parameters: patterns of their names.
        lr: the optimizer's own rate for them; None: the rate of the others, or of the group that the
            optimizer's function gives them.
    """

    def __init__(self, after_epochs: int, parameters: str | Sequence[str] = "*", lr: float | None = None) -> None:
        self.after_epochs, self.parameters, self.lr = after_epochs, listed(parameters), lr
        self.due = self.done = False

    def on_start(self, run: RunView) -> None:
        """Unfreeze them where the run had ended with the epoch, and goes on."""
        if self.due and not self.done and run.step < run.total_steps:
            self.done = True
            run.unfreeze(self.parameters, self.lr)

    def on_validation(self, run: RunView) -> None:
        """Unfreeze them after the epoch."""
        self.due = run.epoch >= self.after_epochs
        self.on_start(run)

    def state_dict(self) -> dict[str, bool]:
        """Return whether it is due and done."""
        return {"due": self.due, "done": self.done}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Restore whether it is due and done."""
        self.due, self.done = state.get("due", False), state["done"]


class WallClock(Callback):
    """Saves a checkpoint and stops at a time of day, by the clock of rank 0's host.

    Args:
        at: that time, "07:30".

    Raises:
        ConfigError: it is not a time of day.
    """

    def __init__(self, at: str) -> None:
        try:
            time = datetime.strptime(str(at), "%H:%M").time()
        except ValueError:
            raise ConfigError(f"at={at!r} is not a time of day: give hours and minutes, '07:30'") from None
        now = datetime.now().astimezone()
        days = (datetime.combine(now.date() + timedelta(days), time) for days in range(2))
        # A night in which the clocks change may have this time twice, or not at all: then it is an hour later.
        ends = [(day, day.replace(fold=fold).astimezone()) for day in days for fold in (0, 1)]
        self.end = min(end for day, end in ends if end > now and end.replace(tzinfo=None) >= day)

    def on_step(self, run: RunView) -> None:
        """Stop when it is time."""
        if run.rank == 0 and datetime.now().astimezone() >= self.end:
            run.stop(f"it is {self.end:%H:%M}", done=False)
