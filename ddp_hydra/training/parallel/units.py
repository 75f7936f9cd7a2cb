"""Chooses the modules of a model that are compiled by themselves, and whose parameters fsdp2 gathers together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_hydra.console.text import listed
from ddp_hydra.errors import ConfigError

MIN_PARAMS = 1e6
BY_BLOCK = "block"
"""Value of `trainer.compile` with which the model itself is not compiled."""
CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict
"""Modules that are not called."""


def units_of(model: nn.Module, classes: Sequence[str] | None, min_params: float | None) -> list[list[nn.Module]]:
    # Modules whose parameters are gathered together, the inner ones first: blocks, and where no classes are given,
    # large modules outside of them. A norm between the other units and the last one goes with that.
    units = [[block] for block in blocks_of(model, classes)]
    if classes is not None or min_params is None:
        return units
    blocks = {block for (block,) in units}
    large = [[one] for one in large_modules(model, blocks, min_params) if owns_its_parameters([one], model)]
    units += large
    last = list(units_and_leaves(model, {module for (module,) in units}))[-2:]
    if len(last) == 2 and last[1:] in large and not any(last[1].children()) and is_lone_norm(last[0], units, model):
        units[units.index(last[1:])] = last
    return units


def blocks_of(model: nn.Module, classes: Sequence[str] | None) -> list[nn.Module]:
    if classes is not None:
        classes = listed(classes)
        known = sorted({type(module).__name__ for module in model.modules()})
        if lacking := sorted(set(classes) - set(known)):
            raise ConfigError(f"parallel.blocks has {', '.join(lacking)}, but the model has {', '.join(known)}")
        wanted = [module for module in model.modules() if type(module).__name__ in classes]
    else:
        named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
        wanted = [module for module in model.modules() if type(module).__name__ in named]
        wanted = wanted or list(repeated_modules(model))
    return [module for module in reversed(wanted) if module is not model and owns_its_parameters([module], model)]


def compile_each(modules: Iterable[nn.Module], mode: str) -> None:
    # In place: the names in the model's state stay.
    for module in modules:
        module.compile(mode=torch_mode(mode))


def torch_mode(mode: str) -> str:
    return "default" if mode == BY_BLOCK else mode.replace("_", "-")


def repeated_modules(model: nn.Module) -> Iterator[nn.Module]:
    # The outermost modules with children that a list repeats.
    for child in model.children():
        kinds = Counter(type(one) for one in child.children() if any(one.children()))
        is_list = isinstance(child, nn.Sequential | nn.ModuleList)
        found = [one for one in child.children() if is_list and kinds[type(one)] > 1]
        yield from (one for one in found if next(one.parameters(), None) is not None)
        if not found:
            yield from repeated_modules(child)


def large_modules(model: nn.Module, blocks: set[nn.Module], least: float) -> list[nn.Module]:
    # Of a module, what is in other units does not count.
    found: list[nn.Module] = []

    def rest(module: nn.Module) -> dict[nn.Parameter, int]:
        if module in blocks:
            return {}
        left = {one: one.numel() for one in module.parameters(recurse=False)}
        for child in module.children():
            left |= rest(child)
        never_called = isinstance(module, CONTAINERS) or module in own
        if module is model or never_called or not left or sum(left.values()) < least:
            return left
        found.append(module)
        return {}

    # It computes with the parameters of its parts, which it does not call.
    own = {part for one in model.modules() if isinstance(one, nn.MultiheadAttention) for part in one.children()}
    rest(model)
    return found


def units_and_leaves(model: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    # What has parameters, in the order of the model's attributes.
    for child in model.children():
        if child in units or not any(child.children()):
            yield from [child] if any(True for _ in child.parameters()) else []
        else:
            yield from units_and_leaves(child, units)


def is_lone_norm(module: nn.Module, units: Sequence[Sequence[nn.Module]], model: nn.Module) -> bool:
    # A BatchNorm has another type than the head where the model computes in bf16.
    is_norm = "Norm" in type(module).__name__ and not isinstance(module, _BatchNorm)
    return is_norm and [module] not in units and owns_its_parameters([module], model)


def parameters_of(unit: Sequence[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in unit for parameter in module.parameters()}


def owns_its_parameters(unit: Sequence[nn.Module], model: nn.Module) -> bool:
    # A tied parameter has to be in one unit.
    def uses(*modules: nn.Module) -> Counter[int]:
        return Counter(id(one) for part in modules for _, one in part.named_parameters(remove_duplicate=False))

    everywhere, inside = uses(model), uses(*unit)
    return bool(inside) and all(everywhere[key] == number for key, number in inside.items())
