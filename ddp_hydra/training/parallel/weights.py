"""What is done with each parameter and buffer of a model: ranks share them, copies are kept, states loaded."""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_hydra.data.draws import StateGuard
from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.rank.world import World, is_dense
from ddp_hydra.training import plain_state
from ddp_hydra.training.finite import STATISTICS, is_finite
from ddp_hydra.training.plain_state import local

SENT = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}
"""Types that gloo and NCCL both send."""
READ_ROWS = "read_rows"
"""A model may have this attribute, a function(name, begin, end) that returns rows of one of its parameters from a file.

Then its parameters get their values by it, on each rank the rows of its shard, whatever they were built with.
"""


def are_sharded(tensors: Iterable[Tensor]) -> bool:
    return any(hasattr(tensor, "to_local") for tensor in tensors)


def can_be_sent(tensor: Tensor) -> bool:
    return tensor.dtype in SENT and tensor.layout is torch.strided and not overlaps(tensor)


def overlaps(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return is_expanded(tensor) or tensor.numel() > 1 + sum((size - 1) * stride for size, stride in axes)


def is_expanded(tensor: Tensor) -> bool:
    # No operation writes into such a tensor.
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def left_out(module: nn.Module) -> dict[str, Tensor]:
    frozen = [(name, value) for name, value in module.named_parameters() if not value.requires_grad]
    return {name: value for name, value in [*module.named_buffers(), *frozen] if not can_be_sent(value)}


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], world: World) -> None:
    # A collective. Sparse tensors stay as they are: all ranks have built the same, and no layer changes them in place.
    for tensor in tensors if world.size > 1 else ():
        if can_be_sent(tensor) and is_dense(tensor):  # gloo sends the memory from the first element on, gaps included
            world.send_from_rank_0(tensor)
        elif tensor.layout is torch.strided and not overlaps(tensor):
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            world.send_from_rank_0(content)
            tensor.copy_(content.view(tensor.dtype).reshape(tensor.shape))


def broadcast_buffers(world: World, *modules: nn.Module) -> None:
    # A collective.
    broadcast((buffer for module in modules for buffer in module.buffers()), world)


def statistics(model: nn.Module) -> Iterator[Tensor]:
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            yield from (buffer for buffer in (layer.running_mean, layer.running_var) if buffer is not None)


def average(tensors: Iterable[Tensor], world: World) -> None:
    # A collective.
    for tensor in tensors:
        content = tensor if is_dense(tensor) else tensor.contiguous()  # gaps: see `broadcast`
        world.reduce(content)
        content /= world.size
        if content is not tensor:
            tensor.copy_(content)


def tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def names(model: nn.Module, loss: nn.Module | None = None, prefix: str = "loss.") -> dict[nn.Parameter, str]:
    found = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in loss.named_parameters() if loss is not None else ():
        found.setdefault(parameter, f"{prefix}{name}")
    return found


def sizes(model: nn.Module) -> tuple[int, int]:
    # Numbers in all parameters, and in those that are trained.
    found = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in found), sum(size for size, is_trained in found if is_trained)


def n_bytes(model: nn.Module) -> int:
    # Of the parameters that a checkpoint has.
    without = unsaved(model)
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if name not in without)


def bytes_on_rank(model: nn.Module) -> int:
    return sum(local(parameter).nbytes for parameter in model.parameters())


def devices(model: nn.Module) -> list[torch.device]:
    return [parameter.device for parameter in model.parameters()]


def lay_out(model: nn.Module, channels_last: bool | None) -> bool:
    # It returns whether channels are last now. By default, they are in weights of convolutions of images, as torch
    # advises, unless the model calls `view`: `x.view(len(x), -1)`, which many models end with, refuses images of this
    # layout. Other parameters of four axes stay, as one that the model takes as complex numbers.
    layers = [model]
    if channels_last is None:
        layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
        has_images = any(isinstance(module, nn.Conv2d) for module in layers)
        channels_last = has_images and not any(map(_calls_view, {type(module) for module in model.modules()}))
    elif channels_last and (deep := [name for name, one, _ in _tensors(model) if one.ndim == 5]):
        raise ConfigError(
            f"trainer.channels_last=true is for tensors of four axes, and {deep[0]} of the model has five: leave it "
            "out, then weights of 2-d convolutions have the channels last"
        )
    for layer in layers if channels_last else ():
        layer.to(memory_format=torch.channels_last)
    return channels_last


def _calls_view(kind: type) -> bool:
    own = [one for one in kind.__mro__ if not one.__module__.startswith("torch.")]
    functions = [inspect.unwrap(getattr(one, "__func__", one)) for kind in own for one in vars(kind).values()]
    codes = [code for function in functions if (code := getattr(function, "__code__", None)) is not None]
    for code in codes:  # those of lambdas and comprehensions lie inside
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return any("view" in code.co_names for code in codes)


def without_shape(model: nn.Module) -> list[str]:
    return [name for name, one in (*model.named_parameters(), *model.named_buffers()) if is_lazy(one)]


def give_memory(model: nn.Module) -> None:
    whole: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            strided = buffer.layout == torch.strided
            expanded = strided and any(step == 0 < n - 1 for step, n in zip(buffer.stride(), buffer.shape, strict=True))
            if expanded or (strided and (buffer.is_conj() or buffer.is_neg())):
                own = buffer.resolve_conj().resolve_neg()
                whole.setdefault(id(buffer), own.clone(memory_format=torch.contiguous_format))
                module._buffers[name] = whole[id(buffer)]


def built_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    # Parameters have no memory. All else is as ever, so a model that draws more than values of its parameters, or needs
    # these, is built on the CPU.
    before = StateGuard()
    with before:
        handle = register_module_parameter_registration_hook(_on_meta)  # type: ignore[arg-type]
        operations = _Operations()
        try:
            with operations:
                model: nn.Module | None = make()
        except Exception:  # it has read a parameter, or fails on the CPU, too
            model = None
        finally:
            handle.remove()
        needs_values = operations.have_failed or before.has_moved()
        if model is not None and not needs_values and not any(one.is_meta for one in _other_tensors(model)):
            return model
    return make()


class _Operations(TorchDispatchMode):
    # Notes whether one has failed, as without values. Torch's parametrizations go on then, with other buffers.
    have_failed = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return function(*args, **(kwargs or {}))
        except Exception:
            self.have_failed = True
            raise


def _on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if type(parameter) is not nn.Parameter or parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def _other_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.buffers()
    yield from (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))


def on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def give_parameters_memory(model: nn.Module, device: torch.device) -> None:
    # They stay the same objects, so what is tied stays tied.
    for parameter in model.parameters():
        if parameter.is_meta:
            memory = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, memory)


@torch.no_grad()
def read_rows(model: nn.Module) -> None:
    # Of a parameter, a rank reads the rows of its shard.
    read: Any = getattr(model, READ_ROWS, None)
    parameter: Any
    for name, parameter in model.named_parameters() if read is not None else ():
        own, begin = local(parameter), 0
        if are_sharded([parameter]):
            mesh = parameter.device_mesh
            begin = mesh.get_local_rank(mesh.ndim - 1) * math.ceil(len(parameter) / mesh.size(mesh.ndim - 1))
        rows = read(name, begin, begin + len(own)) if own.ndim else read(name, 0, 0)
        if rows.shape != own.shape:
            raise ConfigError(
                f"{type(model).__name__}.{READ_ROWS}({name!r}, {begin}, {begin + len(own)}) returned "
                f"{tuple(rows.shape)}, and the model has {tuple(own.shape)}"
            )
        own.copy_(rows)


class BufferCopy:
    """A copy of the buffers of modules, as a model and its loss, which can be put back.

    A forward pass may write into a buffer, or give it another tensor, as `self.mean = 0.9 * self.mean + …` does.

    Args:
        saved: copy only those that checkpoints have. A model may keep in an attribute what it has made another one for.
        removes_new: remove buffers that checkpoints have and that were made since; always with `saved`.
    """

    def __init__(self, *modules: nn.Module, saved: bool = False, removes_new: bool = False) -> None:
        self.saved, self.removes_new = saved, saved or removes_new
        self.owners = [part for module in modules for part in module.modules() if self.removes_new or part._buffers]
        self.buffers: list[dict[str, Tensor | None]] = []
        self.copies: dict[int, Tensor] = {}  # of each tensor, by its id; modules may share one
        self.save()

    @torch.no_grad()
    def save(self) -> None:
        earlier, buffers = self.copies, list(map(self._of, self.owners))
        self.copies = {}
        for tensor in (one for own in buffers for one in own.values() if one is not None and not is_expanded(one)):
            if id(tensor) not in self.copies:
                copied = earlier.get(id(tensor))  # new memory would cost more than the copy
                is_fit = copied is not None and (copied.shape, copied.dtype) == (tensor.shape, tensor.dtype)
                self.copies[id(tensor)] = copied.copy_(tensor) if copied is not None and is_fit else tensor.clone()
        self.buffers = buffers  # not before: while the earlier tensors are held, no other has the id of one

    def _of(self, module: nn.Module) -> dict[str, Tensor | None]:
        left_out = module._non_persistent_buffers_set if self.saved else ()
        return {name: buffer for name, buffer in module._buffers.items() if name not in left_out}

    @torch.no_grad()
    def put_back(self) -> None:
        for module, buffers in zip(self.owners, self.buffers, strict=True):
            made = module._buffers.keys() - module._non_persistent_buffers_set - buffers.keys()
            for name in made if self.removes_new else ():
                del module._buffers[name]
            for name, tensor in buffers.items():
                if tensor is not None and id(tensor) in self.copies:
                    tensor.copy_(self.copies[id(tensor)])
                module._buffers[name] = tensor


@contextmanager
def restored_buffers(*modules: nn.Module) -> Iterator[None]:
    kept = BufferCopy(*modules)
    try:
        yield
    finally:
        kept.put_back()


@contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    # Buffers, what `get_extra_state` of a module returns, and what its attributes are bound to.
    bound = [(module, dict(vars(module))) for module in model.modules()]
    clone = plain_state.once(lambda tensor, _: tensor.detach().clone(), {})
    kept = [
        (module, plain_state.encode(module.get_extra_state(), f"model: {name}._extra_state", clone))
        for name, module in with_extra_state(model)
    ]
    try:
        with restored_buffers(model):
            yield
    finally:
        for module, before in bound:
            own = vars(module)
            for name in own.keys() - before.keys():
                del own[name]
            for name, value in before.items():
                if name in own or not hasattr(module, name):  # else it is a buffer or a module now
                    own[name] = value
        for module, state in kept:
            module.set_extra_state(plain_state.decode(state))


def with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    # Those that take it back, too: torch's own `set_extra_state` raises.
    methods = ("get_extra_state", "set_extra_state")
    return [
        (name, module)
        for name, module in model.named_modules()
        if all(getattr(type(module), method) is not getattr(nn.Module, method) for method in methods)
    ]


def unsaved(model: nn.Module) -> frozenset[str]:
    # Names of parameters that no checkpoint has: an adapter is trained in their place, and they are loaded from the
    # files of a pretrained model whenever the model is built.
    return getattr(model, "loaded_names", frozenset())


def keep_loaded(model: nn.Module, names: Iterable[str]) -> None:
    # These were loaded from something else than the pretrained model's files, so checkpoints have them.
    if loaded := unsaved(model):
        model.loaded_names = loaded.difference(names)  # type: ignore[assignment]


def state_of(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = model.state_dict()
    for name in unsaved(model):
        for key in [name, *(key for key in state if key.startswith(f"{name}."))]:  # a quantised weight has several
            state.pop(key, None)
    return state


def base_of(model: nn.Module) -> dict[str, str]:
    # The pretrained model that a checkpoint leaves out.
    source = getattr(model, "pretrained", None)
    return {"path": source.path, "fingerprint": source.fingerprint} if source and unsaved(model) else {}


def modules_of(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[0] or name for name in names})


def check_base(model: nn.Module, saved: Mapping[str, str] | None) -> None:
    own = base_of(model)
    if saved and not own:
        raise CheckpointError(
            f"the checkpoint holds an adapter of {saved['path']}: give adapter=lora, as it was trained"
        )
    if saved and own["fingerprint"] != saved["fingerprint"]:
        raise CheckpointError(
            f"the checkpoint holds an adapter of {saved['path']}, and the weights of model.path={own['path']} are "
            "others: give model.path=<the model that it was trained on>"
        )


def load_weights(model: nn.Module, content: Mapping[str, Any], split: Callable[[Any], Any] = lambda one: one) -> None:
    check_base(model, content.get("base"))
    try:
        load_copied(model, split(content["model"]))
    except (KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(line.strip() for line in str(error).splitlines()[:3])[:300]
        if unsaved(model):
            reason = f"give adapter.r and the other keys of its adapter as in its run ({reason})"
        elif late := late_buffer(model, content["model"]):
            reason = late
        raise CheckpointError(f"the checkpoint is not of this model: {reason}") from None


def late_buffer(model: nn.Module, saved: Any) -> str:
    # "" if anything but buffers differs. Torch's load_state_dict gives no buffer another shape.
    if not isinstance(saved, Mapping):
        return ""
    buffers: dict[str, Any] = {
        f"{prefix}.{key}".lstrip("."): buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key, buffer in module._buffers.items()
    }
    shapes: dict[str, Any]
    shapes, own = ({key: getattr(one, "shape", None) for key, one in all_.items()} for all_ in (saved, state_of(model)))
    other = [name for name in shapes.keys() | own.keys() if name not in shapes or shapes[name] != own.get(name)]
    if not other or not all(name in buffers and shapes.get(name) is not None for name in other):
        return ""
    name = min(other)
    built = "None" if buffers[name] is None else f"of shape {tuple(buffers[name].shape)}"
    return (
        f"it has the buffer {name} of shape {tuple(shapes[name])}, which is {built} where it is built. Build it "
        "with this shape, register it with persistent=False, or let its class's _load_from_state_dict make it"
    )


def load_copied(model: nn.Module, state: Mapping[str, Any]) -> None:
    # Parameters and buffers are copied by torch; what `set_extra_state` gets may be kept, so it is a copy, too. So is
    # what a hook of the model has renamed, which may be the share of a parameter.
    copied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    copied |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if not isinstance(state, Mapping):
        raise TypeError(f"it has a {type(state).__name__} in place of a model's state")
    decoded = plain_state.decode(state)
    clone = plain_state.once(lambda tensor, _: tensor.detach().clone(), {})
    for name, value in state.items():
        if name not in copied:
            decoded[name] = plain_state.decode(plain_state.encode(value, copy=clone))
    is_strict = not unsaved(model)
    # A strict load raises where names differ. What a model's own method accepts is right, whatever that returns.
    found = model.load_state_dict(decoded, **({"strict": is_strict} if _takes_strict(model) else {}))
    keep_loaded(model, decoded)
    if not is_strict and found is not None:
        own, unexpected = state_of(model), found.unexpected_keys
        missing = [name for name in found.missing_keys if name in own]
        if missing or unexpected:
            raise RuntimeError(f"it lacks {missing[:3]}, and has {unexpected[:3]}, which the model lacks")


def load_part(model: nn.Module, state: Mapping[str, Any]) -> None:
    # A model's own method may take a whole state only.
    if _takes_strict(model):
        model.load_state_dict(state, strict=False)
    else:
        model.load_state_dict({**model.state_dict(), **state})


def _takes_strict(model: nn.Module) -> bool:
    taken = inspect.signature(model.load_state_dict).parameters.values()
    return any(one.name == "strict" or one.kind is one.VAR_KEYWORD for one in taken)


def check_own_state(model: nn.Module) -> None:
    """Refuse a model that does not load its own state: it would train, and none of its checkpoints could be used.

    Methods of its own and hooks may change the names in a state. Torch's own methods need no check.

    Raises:
        ConfigError: it does not.
    """
    has_own = type(model).load_state_dict is not nn.Module.load_state_dict
    if on_meta(model) or (not has_own and state_of(model).keys() == _names_by_torch(model)):
        return
    try:
        trial = copy.deepcopy(model)  # loading may round or count
    except Exception:  # a lock, an open file
        return
    try:
        load_copied(trial, state_of(trial))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{type(model).__name__}.load_state_dict does not take what its state_dict returns ({reason:.300}), so no "
            "checkpoint of it could be loaded: define load_state_dict so that it does, as by "
            "super().load_state_dict(state, strict=False) where state_dict leaves names out"
        ) from error


def _names_by_torch(model: nn.Module) -> set[str]:
    # Of a state dict that no method and no hook of the model has changed.
    found = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules(remove_duplicate=False):
        buffers = {name for name, one in module._buffers.items() if one is not None}
        extra = {"_extra_state"} if type(module).get_extra_state is not nn.Module.get_extra_state else set()
        own = (buffers - module._non_persistent_buffers_set) | extra
        found |= {f"{path}.{name}".lstrip(".") for name in own}
    return found - unsaved(model)


def _needs_average(decay: float) -> tuple[str, str]:
    # What needs an average, and what to type to be without one.
    if decay:
        return "trainer.ema_decay", "trainer.ema_decay=null"
    return "an optimizer with eval() and train()", "optimizer=adamw"


class Ema:
    """An exponential moving average, which warms up (Polyak and Juditsky, 1992).

    Args:
        decay: the share of the average that a step keeps, at most; at first it is (1 + steps) / (10 + steps). 0: the
            optimizer knows the average, and `take` gets it.
        average: a model to keep the average in; None: a copy.

    Attributes:
        model: the average.
        steps: number of updates. It is not a tensor as in `torch.optim.swa_utils.AveragedModel`, because reading one
            from a GPU waits for the GPU.
        with_extra_state: modules of the average, by name, whose `get_extra_state` is taken from the model at each step.
        infinite: names of parameters that held infinite values from the beginning, as masks do.

    Raises:
        ConfigError: the model can't be copied.
    """

    def __init__(self, model: nn.Module, decay: float, average: nn.Module | None = None) -> None:
        self.decay = decay
        self.model: nn.Module = (_copied(model, decay) if average is None else average).requires_grad_(False)
        self.steps = 0
        self.with_extra_state = with_extra_state(self.model)
        self.infinite = {name for name, value in model.named_parameters() if not is_finite(value)}

    def take(self, model: nn.Module) -> None:
        self.steps = 0
        self.update(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        weight = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        for (_, kind), (averaged, current) in self._by_type(model).items():
            if not self.steps or kind == "copied":
                torch._foreach_copy_(averaged, current)
            elif kind == "averaged":
                torch._foreach_lerp_(averaged, current, weight)
            else:
                for old, new in zip(averaged, current, strict=True):  # an infinite value has no average
                    old.copy_(torch.where(old.isfinite(), torch.lerp(old, new, weight), new))
        for name, module in self.with_extra_state:
            module.set_extra_state(copy.deepcopy(self._module(model, name).get_extra_state()))
        self.steps += 1

    def _by_type(self, model: nn.Module) -> dict[tuple[torch.dtype, str], tuple[list[Tensor], list[Tensor]]]:
        groups: dict[tuple[torch.dtype, str], tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        for (_, averaged, _), (name, current, is_buffer) in self._pairs(model):
            group = groups[current.dtype, self._kind(name, current, is_buffer)]
            group[0].append(averaged)
            group[1].append(current)
        return groups

    def _pairs(self, model: nn.Module) -> Iterable[tuple[Named, Named]]:
        averaged, current = list(_tensors(self.model)), list(_tensors(model))
        if not _are_alike(averaged, current):
            self._take_buffers(model)
            averaged = list(_tensors(self.model))
            if [name for name, *_ in averaged] != [name for name, *_ in current]:
                raise self._other_modules(model)
        return zip(averaged, current, strict=True)

    def _take_buffers(self, model: nn.Module) -> None:
        # What the model has given another shape, as a memory bank that grows, or has made after the average, has no
        # average: it is as it is in the model. Modules share what they share there.
        taken: dict[int, Tensor] = {}  # of the average, by the id of the model's
        held: set[int] = set()
        for name, module in model.named_modules():
            own = self._module(self.model, name)
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in taken:
                    old = own._buffers.get(key)
                    is_fit = old is not None and id(old) not in held and _is_like(old, buffer)
                    taken[id(buffer)] = old if old is not None and is_fit else buffer.detach().clone()
                    held.add(id(taken[id(buffer)]))
                own._buffers[key] = None if buffer is None else taken[id(buffer)]
            for key in own._buffers.keys() - module._buffers.keys():
                del own._buffers[key]
            own._non_persistent_buffers_set = set(module._non_persistent_buffers_set)

    def _kind(self, name: str, tensor: Tensor, is_buffer: bool) -> str:
        is_number = (tensor.is_floating_point() and tensor.itemsize > 1) or tensor.is_complex()
        if not is_number or tensor.layout != torch.strided:
            return "copied"
        may_be_infinite = name in self.infinite or (is_buffer and name.rpartition(".")[2] not in STATISTICS)
        return "watched" if may_be_infinite else "averaged"

    def state_dict(self) -> dict[str, object]:
        return {"model": state_of(self.model), "steps": self.steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        load_copied(self.model, state["model"])  # type: ignore[arg-type]
        self.steps = int(state["steps"])  # type: ignore[call-overload]

    def _module(self, model: nn.Module, name: str) -> nn.Module:
        try:
            return model.get_submodule(name)
        except AttributeError:
            raise self._other_modules(model) from None

    def _other_modules(self, model: nn.Module) -> ConfigError:
        needs, without = _needs_average(self.decay)
        return ConfigError(
            f"{needs} averages the weights that {type(model).__name__} was built with, and it has other modules or "
            f"parameters now: build all of them in __init__, or give {without}"
        )


def _copied(model: nn.Module, decay: float) -> nn.Module:
    # A tensor that a layer has computed is no leaf, as in torch's first `weight_norm`, and can't copy itself.
    values = (value for module in model.modules() for value in vars(module).values())
    computed = {id(one): one.detach().clone() for one in values if isinstance(one, Tensor) and not one.is_leaf}
    try:
        return copy.deepcopy(model, computed)
    except Exception as error:  # a lock, an open file
        reason = " ".join(str(error).split())
        needs, without = _needs_average(decay)
        raise ConfigError(
            f"{needs} needs a copy of the model, and {type(model).__name__} can't be copied "
            f"({type(error).__name__}: {reason:.160}): give {without}"
        ) from error


Named = tuple[str, Tensor, bool]
"""A parameter or a buffer, with its name and whether it is a buffer."""


def _tensors(model: nn.Module) -> Iterator[Named]:
    yield from ((name, local(parameter), False) for name, parameter in model.named_parameters())
    yield from ((name, buffer, True) for name, buffer in model.named_buffers())


def _are_alike(averaged: Sequence[Named], current: Sequence[Named]) -> bool:
    # This is for each step, so only buffers are looked at: no parameter gets another shape.
    return len(averaged) == len(current) and all(
        name == other and (not is_buffer or _is_like(old, new))
        for (name, old, _), (other, new, is_buffer) in zip(averaged, current, strict=True)
    )


def _is_like(old: Tensor, new: Tensor) -> bool:
    return old.dtype == new.dtype and old.layout == new.layout and old.is_same_size(new)


def made_contiguous(model: nn.Module) -> nn.Module:
    # safetensors takes other layouts, but not under two names.
    for one in (*model.parameters(), *model.buffers()):
        if one.layout == torch.strided and not one.is_contiguous():
            one.data = one.data.contiguous()
    return model
