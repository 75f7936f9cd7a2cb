"""`parallel=fsdp2`: torch's `fully_shard`. Each rank keeps a share of each parameter, gradient and optimizer state."""

from __future__ import annotations

import importlib
import math
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import get_object
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed import tensor as distributed_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_hydra.console import text
from ddp_hydra.data.draws import StateGuard
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.tasks import Step, Task
from ddp_hydra.training import plain_state
from ddp_hydra.training.data_description import shown
from ddp_hydra.training.finite import GradientNorms
from ddp_hydra.training.parallel import Load, Named, Parallel, PartStep, parameter_groups, weights
from ddp_hydra.training.parallel.sent_buffers import SentBuffers
from ddp_hydra.training.parallel.units import MIN_PARAMS, blocks_of, compile_each, owns_its_parameters, units_of
from ddp_hydra.training.parallel.weights import Ema, local
from ddp_hydra.training.train_step import TrainStep, trained_loss

KIND = "parallel=fsdp2"
CALLED = (
    f"{KIND}: the task's step did not call the model itself: call model(...) in each step, also where nothing counts; "
    "its parts and methods can't be called alone"
)
MIXED = "mixed torch.Tensor and DTensor"
EXPLAINED = {
    re.escape(MIXED): (
        "a block's parameters are whole only while it computes: call parts of the model by their forward, and let no "
        "part use parameters of another one; or give parallel.min_params=null, or parallel=ddp"
    ),
    "on device meta is not on the expected device": (
        "a parameter is used that the model holds outside of its attributes, as in a list: keep an nn.ParameterList"
    ),
    "TypeError: Cannot convert expression to float": (
        "torch's compiler fails at blocks of several sizes: leave out trainer.compile, or give parallel=ddp"
    ),
    "expects uniform original parameter dtype": (
        "parameters of a block need one type, and so do all that are outside of blocks: convert them, or name the "
        "classes of the others in parallel.blocks"
    ),
}
"""Errors of torch, and what to do."""
LOW = "have the same dtype|type .* should be the same|expected scalar type"
"""The same where a model computes in bf16."""
CONVERT = (
    "with trainer.precision=bf16 parameters are bf16, and buffers stay as they are: convert them where they are used "
    "(self.mask.to(x.dtype)), or give parallel=ddp"
)


class FSDP2(Parallel):
    """Shards a model over the ranks by torch's `fully_shard`. A process without a group has the whole model.

    conf/parallel/fsdp2.yaml describes the arguments.

    Raises:
        ConfigError: an argument has a value that is not allowed, or the model, task or precision can't be sharded.
    """

    shards = True

    def __init__(
        self,
        world: World = ALONE,
        *,
        replicas: int = 1,
        blocks: Sequence[str] | None = None,
        min_params: float | None = MIN_PARAMS,
        reshard_after_forward: bool | int = True,
        cpu_offload: bool = False,
        fn: str | None = None,
    ) -> None:
        super().__init__(world)
        if replicas < 1 or world.size % replicas:
            raise ConfigError(f"parallel.replicas={replicas} does not divide this job's {world.size} ranks")
        if not hasattr(importlib.import_module("torch.distributed.fsdp"), "fully_shard"):
            raise ConfigError(f"{KIND} needs torch 2.6 or newer, and this is {torch.__version__}")
        self.replicas, self.blocks, self.min_params, self.fn = replicas, blocks, min_params, fn
        self.reshard_after_forward, self.cpu_offload = reshard_after_forward, cpu_offload
        self.mesh: DeviceMesh | None = None
        self.cpu_mesh: DeviceMesh | None = None
        self.sharded: list[Any] = []  # modules of the model and its average
        self.keeps_whole = False

    def build(
        self,
        trainer: DictConfig,
        make: Callable[[], nn.Module],
        device: torch.device,
        load: Load | None = None,
        saved: Collection[str] = (),
        is_trained: bool = True,
    ) -> list[str]:
        # Only rank 0 has the whole model, on the CPU, with the bits of other kinds. It sends shards to the others. If
        # all values come from a state or a file, no rank has it.
        check_settings(trainer, device, self.cpu_offload)
        if self.world.group is None:
            return super().build(trainer, make, device, load, saved, is_trained)
        self.draws = StateGuard()
        model, sends = self._built(make, saved, reads_rows=load is None)
        check_parameters(model)
        if is_trained:
            weights.check_own_state(model)
        untouched: list[str] = []
        if load is not None and (self.world.rank == 0 or not sends):
            if not weights.on_meta(model):
                weights.read_rows(model)
            untouched = load(model, ALONE if sends else self.world)
        if is_trained:
            parameter_groups.freeze(model, trainer.freeze)
        whole = dict(model.named_parameters()) if sends and self.world.rank == 0 else {}
        self.make, self.trainer, self.device, self.mesh = make, trainer, device, self._mesh(device)
        self.cpu_mesh = self.mesh if device.type == "cpu" else self._mesh(torch.device("cpu"))
        name = type(model).__name__
        self.adopt(self._shard_modules(model, is_trained)).model_name = name  # torch puts a class of its own in front
        if load is None and not (sends or has_all(saved, self.model)):
            weights.read_rows(self.model)
        if sends:
            self._receive(whole)
        names: list[str] = self.world.from_rank_0(lambda: untouched)
        return names

    def _built(self, make: Callable[[], nn.Module], saved: Collection[str], reads_rows: bool) -> tuple[nn.Module, bool]:
        # A collective. It returns whether rank 0 sends the values, too. Each rank builds once, since constructors may
        # count in a global variable: the last rank tells rank 0 what to build.
        last = self.world.size - 1
        model, failure = None, None
        try:
            model = None if self.world.rank == 0 < last else self._outline(make)
        except Exception as error:  # rank 0 shall raise it, too, and not wait
            failure = error

        def rank_0_sends() -> bool:
            assert model is not None
            has_rows = reads_rows and hasattr(model, weights.READ_ROWS)
            return not (has_rows or has_all(saved, model) or self.fn is not None)

        sends: bool = self.world.send(lambda: failure is not None or rank_0_sends(), last)
        if failure is not None:
            raise failure
        if self.world.rank == 0 and (model is None or (sends and weights.on_meta(model))):
            model = make() if sends else self._outline(make)
        assert model is not None
        return model, sends

    def _outline(self, make: Callable[[], nn.Module]) -> nn.Module:
        return make() if self.fn is not None else weights.built_on_meta(make)

    @torch.no_grad()
    def _receive(self, whole: dict[str, nn.Parameter]) -> None:
        # A collective.
        parameter: Any
        for name, parameter in self.model.named_parameters():
            value = whole.pop(name) if whole else torch.empty(parameter.shape, dtype=parameter.dtype)
            moved = value.detach().to(parameter.device_mesh.device_type)
            own = distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=0)
            local(parameter).copy_(local(own))
        weights.broadcast_buffers(self.world, self.model)

    def _mesh(self, device: torch.device) -> DeviceMesh:
        shards = self.world.size // self.replicas
        if self.fn is not None and self.replicas == 1:
            # DTensor's exchanges and the vote can't be under way in one group of gloo.
            own: Any = dist.new_group(backend="gloo" if device.type == "cpu" else None)
            return DeviceMesh.from_group(own, device.type, mesh_dim_names=("shard",))
        axes = {"shard": shards} if self.replicas == 1 else {"replicate": self.replicas, "shard": shards}
        return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def _shard_modules(self, model: nn.Module, is_trained: bool = True) -> nn.Module:
        # The order of torchtitan: activation checkpointing, compile, shard, from the inner modules to the outer ones.
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        units = units_of(model, self.blocks, self.min_params)
        if is_trained:
            parameter_groups.activation_checkpointing(model, self.trainer.activation_checkpointing)
            if self.trainer.compile is not None:
                compile_each(blocks_of(model, self.blocks) or [model], self.trainer.compile)
        low = torch.bfloat16 if self.casts_to_bf16 else None
        given: dict[str, Any] = {
            "mesh": self.mesh,
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
            "ignored_params": self._shard_by_fn(model),
        }
        if low:  # statistics of batches are fp32, and a norm takes parameters of their type
            policy = MixedPrecisionPolicy(output_dtype=low, cast_forward_inputs=False)
            norms = [one for one in model.modules() if isinstance(one, _BatchNorm)]
            for norm in (one for one in norms if owns_its_parameters([one], model)):
                fully_shard(norm, mp_policy=policy, **given)
                units = [unit for unit in units if unit != [norm]]
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        for unit in units:  # a norm and the head are the first that the backward pass needs
            reshard = self.reshard_after_forward if len(unit) == 1 else False
            fully_shard(unit, mp_policy=policy, reshard_after_forward=reshard, **given)
        outputs = torch.float32 if low else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=outputs, output_dtype=outputs)
        fully_shard(model, mp_policy=policy, **given)
        weights.give_parameters_memory(model, torch.device("cpu") if self.cpu_offload else self.device)
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.sharded += sharded
        keeps = lambda: self.keeps_whole or torch.is_grad_enabled()  # noqa: E731
        model.register_forward_hook(lambda *_: None if keeps() else reshard_all(sharded))
        return model

    @contextmanager
    def many_passes(self, with_backward: bool = False) -> Iterator[None]:
        # What a pass keeps whole need not be gathered again for the next one. `with_backward`: a backward pass follows,
        # which reshards all.
        self.keeps_whole = True
        try:
            yield
        finally:
            self.keeps_whole = False
        if not with_backward:
            reshard_all(self.sharded)

    def _shard_by_fn(self, model: nn.Module) -> set[nn.Parameter]:
        # Return the parameters that it has made DTensors of, over the same ranks.
        if self.fn is None:
            return set()
        get_object(self.fn)(model, self.mesh)
        found: set[nn.Parameter] = {one for one in model.parameters() if isinstance(one, DTensor)}
        for parameter in found:  # they get the sum over the ranks, and others the mean
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / self.world.size)
        return found

    @property
    def share(self) -> int:
        return self.world.rank % (self.world.size // self.replicas) if self.is_sharded else 0

    @property
    def casts_to_bf16(self) -> bool:
        return self.is_sharded and self.trainer.precision in ("bf16", "fp8")

    def rebind(self, world: World) -> None:
        raise ConfigError(f"{KIND}: a rank has a share of the model only, so it can't go on in another world")

    def build_part(self, trainer: DictConfig, task: Task, update: str) -> PartStep:
        if update:
            raise ConfigError(f"{KIND} is for tasks with one update, and {type(task).__name__} has {update!r}")
        if (loss := trained_loss(task)) is not None:
            raise ConfigError(f"{KIND}: the loss {type(loss).__name__} has parameters: make it a part of the model")
        return super().build_part(trainer, task, update)

    def wrap(self, step: TrainStep) -> PartStep:
        return ShardedStep(step, self, self.mesh) if self.mesh else PartStep(step, uses_all=True)

    def compile(self, step: TrainStep, update: str, mode: str) -> None:
        if not self.is_sharded:
            super().compile(step, update, mode)

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        known = EXPLAINED | ({LOW: CONVERT} if self.casts_to_bf16 else {})
        try:
            with super().explain_errors():
                yield
        except (RuntimeError, AssertionError) as error:
            if advice := next((what for pattern, what in known.items() if re.search(pattern, str(error))), None):
                where = text.raised_at(error) or (str(error).splitlines() or [""])[0]
                raise ConfigError(f"{KIND}: {advice}. Torch said: {where}") from error
            raise

    # -- what walks the model ----------------------------------------------------------------------------------

    def nonfinite_names(self) -> list[str]:
        # A collective.
        of_ranks = self.world.gather_objects(super().nonfinite_names())
        return list(dict.fromkeys(name for names in of_ranks for name in names))

    def fingerprint(self) -> tuple[int, list[bool]]:
        reshard_all(self.sharded)  # a callback's forward pass with gradients leaves parameters whole
        return super().fingerprint()

    def build_average(self, decay: float) -> Ema:
        # A sharded model can't be copied, so it is built once more.
        if not self.is_sharded:
            return super().build_average(decay)
        with StateGuard():
            self.draws.put_back()  # what the model draws of other values than its parameters, the average draws, too
            model = self._outline(self.make)
        average = Ema(self.model, decay, self._shard_modules(model, is_trained=False))
        average.take(self.model)  # also what the model leaves out of its state
        average.steps = 0
        return average

    def copy_of(self, tensor: Tensor, name: str, whole: bool = False) -> Tensor:
        # A collective, if `whole`: then rank 0 gets all of the tensor, and the others get nothing.
        if not isinstance(tensor, DTensor):
            return super().copy_of(tensor, name)
        if not whole:
            return dtensor_of(plain_state.plain_copy(tensor.to_local(), name), tensor, self.cpu_mesh)
        full = tensor.full_tensor()
        return plain_state.plain_copy(full, name) if self.world.rank == 0 else full.new_empty(0, device="cpu")

    def empty_shard(self, parameter: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if not isinstance(parameter, DTensor) or parameter.shape != shape:
            return super().empty_shard(parameter, shape, dtype)
        return dtensor_of(torch.empty(parameter.to_local().shape, dtype=dtype), parameter, self.cpu_mesh)

    def shard_state(self, state: Any) -> Any:
        if not isinstance(state, Mapping):
            return state
        own = self.model.state_dict()
        return {name: shard_of(value, own.get(name)) for name, value in state.items()}

    def shard_slots(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        # A collective.
        if not self.is_sharded:
            return state
        parameters = dict(enumerate(one for group in optimizer.param_groups for one in group["params"]))
        found = {key: slots for key, slots in state["state"].items() if type(key) is int and key in parameters}
        whole = whole_slots([(parameters[key], slots) for key, slots in found.items()])
        made: dict[int, tuple[Tensor, Tensor]] = {}

        def sharded(slots: Any, parameter: Tensor) -> Any:
            def share(value: Tensor, path: str) -> Tensor:
                if path not in whole:
                    return shard_of(value, parameter)
                return value.full_tensor() if isinstance(value, DTensor) else value

            return plain_state.decode(plain_state.encode(slots, copy=plain_state.once(share, made)))

        return {**state, "state": state["state"] | {key: sharded(one, parameters[key]) for key, one in found.items()}}


def whole_slots(found: Iterable[tuple[Tensor, Any]]) -> set[str]:
    # Paths of tensors that no rank has a share of, though one may have the shape of its parameter, as a counter of one
    # element has. Other layouts don't say which these are: theirs is one shape, whatever the parameter's.
    shapes = defaultdict[str, set[tuple[torch.Size, torch.Size]]](set)
    for parameter, slots in found:

        def note(value: Tensor, path: str, of: torch.Size = parameter.shape) -> Tensor:
            shapes[path].add((value.shape, of))
            return value

        plain_state.encode(slots, copy=note)
    return {path for path, pairs in shapes.items() if _is_one_shape(pairs, path == "step")}


def _is_one_shape(pairs: set[tuple[torch.Size, torch.Size]], is_step: bool) -> bool:
    if len({own for own, _ in pairs}) > 1:
        return False
    # Where all parameters have one element, the name that torch knows decides.
    return any(own != of or (is_step and own.numel() == 1) for own, of in pairs)


def has_all(saved: Collection[str], model: nn.Module) -> bool:
    return bool(saved) and all(name in saved for name, _ in model.named_parameters())


def check_settings(trainer: DictConfig, device: torch.device, cpu_offload: bool) -> None:
    if trainer.precision == "fp16":
        raise ConfigError(f"{KIND} does not go with trainer.precision=fp16: give trainer.precision=bf16")
    if trainer.channels_last:
        raise ConfigError(f"{KIND} does not go with trainer.channels_last=true: leave it out")
    if cpu_offload and device.type == "cpu":
        raise ConfigError("parallel.cpu_offload=true is for GPUs: leave it out")


def check_parameters(model: nn.Module) -> None:
    if getattr(model, "is_quantized", False):  # its layers keep more than parameters, as the scales of blocks
        raise ConfigError(f"{KIND} can't share quantised weights: give parallel=ddp, or leave out model.load_in_4bit")
    kinds = {"no axis": lambda one: not one.ndim, "no element": lambda one: not one.numel()}
    kinds["memory that is not contiguous"] = lambda one: not one.is_contiguous()
    for kind, is_refused in kinds.items():
        if names := [name for name, one in model.named_parameters() if is_refused(one)]:
            raise ConfigError(
                f"{KIND} can't share parameters with {kind}: {shown(names, 6)}: make them by "
                "nn.Parameter(value.reshape(-1).contiguous()), or leave out empty ones; or give parallel=ddp"
            )
    if names := list(hidden_parameters(model)):
        raise ConfigError(
            f"{KIND} can't share parameters that are in no nn.ParameterList, ParameterDict or ModuleList: "
            f"{shown(names, 6)}: keep them in one, or give parallel=ddp, with which no optimizer trains them"
        )
    if names := [name for name, one in model.named_parameters() if one._backward_hooks]:
        raise ConfigError(
            f"{KIND} would not call the hooks of parameters: {shown(names, 6)}: change gradients in the forward pass, "
            "or give parallel=ddp"
        )


def hidden_parameters(model: nn.Module) -> Iterator[str]:
    # Names of attributes with parameters that torch does not know to be the model's.
    known = {id(one) for one in model.parameters()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            for one in values:
                tensors = one.parameters() if isinstance(one, nn.Module) else [one] if isinstance(one, Tensor) else []
                if any(one.requires_grad and one.is_leaf and id(one) not in known for one in tensors):
                    yield f"{path}.{name}".lstrip(".")
                    break


def reshard_all(modules: Iterable[Any]) -> None:
    # Torch keeps the model itself, and modules without `reshard_after_forward`, whole for a backward pass, which a
    # validation does not have. The optimizer and the average need shares.
    for module in modules:
        module.reshard()


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    # Optimizers of torchao make their state in the first step.
    is_of_torchao = type(optimizer).__module__.startswith("torchao.")
    values = (one for slots in optimizer.state.values() for one in slots.values() if isinstance(one, Tensor))
    has_low_moments = is_of_torchao and getattr(optimizer, "block_size", math.inf) < math.inf
    if has_low_moments or any(map(plain_state.is_wrapped, map(local, values))):
        raise ConfigError(
            f"{KIND}: {type(optimizer).__name__} keeps its state in tensors of its own, of whose shares a checkpoint "
            "can't be made: give optimizer=adamw or optimizer=sgd, or parallel=ddp"
        )


def shard_of(value: Any, like: Any) -> Any:
    # This rank's share of a tensor, which may be whole, on the device of `like`; other values as they are.
    if not isinstance(value, Tensor) or not isinstance(like, DTensor):
        return value
    moved = local(value).to(like.to_local().device)
    if isinstance(value, DTensor):
        return dtensor_of(moved, like, like.device_mesh)
    if value.shape == like.shape:
        return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
    return value


def dtensor_of(share: Tensor, like: Any, mesh: DeviceMesh | None) -> Tensor:
    shape = {"shape": like.shape, "stride": like.stride()}
    made: Tensor = DTensor.from_local(share, mesh, like.placements, run_check=False, **shape)
    return made


def is_of_shares(error: Exception) -> bool:
    # Torch's code of shares has raised it: it asserts much without a word. Not a lack of memory, or of a rank.
    if isinstance(error, (torch.OutOfMemoryError, dist.DistError)):
        return False
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return bool(frames) and Path(frames[-1]).is_relative_to(Path(distributed_tensor.__file__).parent)


class ShardedStep(PartStep):
    """A training step whose model is sharded."""

    part: Any
    is_outdated = False  # fully_shard looks at each step what is trained

    def __init__(self, step: TrainStep, parallel: FSDP2, mesh: DeviceMesh) -> None:
        super().__init__(step, uses_all=True, world=parallel.world)
        self.parallel, self.group = parallel, mesh.get_group("shard")
        self.buffers = SentBuffers(self.world, step)
        self.part.register_forward_pre_hook(self._note_call)
        step.constant = self._empty_loss

    def _note_call(self, *_: Any) -> None:
        self.was_called = True

    def compute(self, batch: Any) -> Any:
        self.was_called = False
        try:
            with self.parallel.many_passes(with_backward=True):  # a step may generate first, or have a teacher
                result = self.wrapped(batch)
        except RuntimeError as error:
            if self.was_called or MIXED not in str(error):
                raise
            raise ConfigError(CALLED) from error
        if not self.was_called:
            raise ConfigError(CALLED)
        return result

    def tensors_sent(self) -> list[Tensor]:
        # Not the frozen parameters of a loss.
        return [*weights.tensors_of(self.part), *self.step.buffers()]

    @contextmanager
    def sync_gradients(self, enabled: bool) -> Iterator[None]:
        self.part.set_requires_gradient_sync(enabled)
        self.part.set_is_last_backward(enabled)
        with super().sync_gradients(enabled):
            yield

    def _empty_loss(self, step: Step) -> Tensor:
        # The backward pass has to go through the model on all ranks.
        prediction = step.prediction
        if not step.loss.requires_grad or not isinstance(prediction, Tensor) or not prediction.requires_grad:
            raise ConfigError(
                f"{KIND}: nothing counts in this micro-batch, and the step's loss does not depend on the model: return "
                "Step(loss, n=0, prediction=…) with the loss and the output of the model"
            )
        prediction.register_hook(torch.zeros_like)
        return step.loss.where(torch.zeros((), dtype=torch.bool, device=step.loss.device), 0.0)

    def trained(self, optimizer: torch.optim.Optimizer) -> Named:
        check_optimizer(optimizer)
        return super().trained(optimizer)

    @contextmanager
    def explain_step_errors(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        is_first = not optimizer.state
        try:
            yield
            if is_first:
                check_optimizer(optimizer)
        except Exception as error:
            is_told = isinstance(error, (NotImplementedError, RuntimeError))
            if not (is_told and re.search("DTensor|[Ss]hard|placement", str(error))) and not is_of_shares(error):
                raise
            where = text.raised_at(error).partition("\n")[0].rstrip(": ")
            said = f"{error!s:.120}" or where or type(error).__name__
            raise ConfigError(
                f"{KIND}: {type(optimizer).__name__} can't compute with shares of parameters ({said}): give "
                "optimizer=adamw or optimizer=sgd, or parallel=ddp"
            ) from None

    def gradients(self, trained: Named) -> list[tuple[str, Tensor]]:
        return [(name, local(gradient)) for name, gradient in super().gradients(trained)]

    def norms(self, trained: Named, loss: Callable[[], float]) -> GradientNorms:
        shared: list[Any] = [gradient for _, gradient in super().gradients(trained)]
        size = dist.get_world_size(self.group)  # parallel.fn may leave a gradient whole
        copies = [1 if any(part.is_shard() for part in one.placements) else size for one in shared]

        def over_ranks(norms: Tensor) -> Tensor:
            squares = norms.double() ** 2
            if max(copies, default=1) > 1:
                squares /= torch.tensor(copies, device=squares.device)
            dist.all_reduce(squares, group=self.group)
            return squares.sqrt().to(norms.dtype)

        return GradientNorms(self.gradients(trained), loss, over_ranks)
