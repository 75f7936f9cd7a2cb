"""Types with limits for what users give, and the sentences that refuse what is beyond them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError

# Types with limits: OmegaConf takes the type, `check_limits` the limit, and the description says what to give.
AtLeast1 = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
AtLeast2 = Annotated[int, Meta(ge=2, description="a whole number of at least 2")]
AtLeast0 = Annotated[int, Meta(ge=0, description="0 or more")]
Number = Annotated[float, Meta(description="a number")]
PositiveSeconds = Annotated[float, Meta(gt=0, description="seconds, more than 0")]
NonNegativeSeconds = Annotated[float, Meta(ge=0, description="seconds, 0 or more")]
Switch = Annotated[bool, Meta(description="true or false")]
RanksPerWorker = Annotated[AtLeast1 | Literal["auto"], Meta(description="a whole number of at least 1, or auto")]


def limits_of(kind: Any) -> dict[str, Any]:
    return {name: found for name, found in get_type_hints(kind, include_extras=True).items() if described(found)}


def check_limits(
    prefix: str, values: Mapping[str, Any], limits: Mapping[str, Any], null: str = "null", strict: bool = True
) -> dict[str, Any]:
    """Refuse values that their types do not allow: "trainer.epochs=0: give a whole number of at least 1, or null".

    Args:
        strict: refuse texts that read as numbers or as true and false, as variables of the environment are.

    Returns:
        The values, with their types.
    """
    found = {}
    for key in filter(values.__contains__, limits):
        try:
            found[key] = msgspec.convert(value := values[key], limits[key], strict=strict)
        except msgspec.ValidationError:
            shown = f"{value:.12g}" if type(value) is float else value if prefix else repr(value)
            shown = json.dumps(value) if value is None or isinstance(value, bool) else shown
            raise ConfigError(f"{prefix}{key}={shown}: give {described(limits[key], null)}") from None
    return found


def check_known(group: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keys that a group lacks: Hydra accepts them after `+` and in files."""
    names = list(known)
    for key in given:
        if key not in names:
            raise ConfigError(text.unknown(f"{group}.{key}", names))


def check_gang(prefix: str, ranks: int | None, least: int | None, ports: Sequence[int] | None) -> None:
    if ranks is not None and least is not None and least > ranks:
        raise ConfigError(f"{prefix}min_ranks={least} is more than {prefix}ranks={ranks}: give {ranks} or less")
    if ports is not None and not (len(ports) == 2 and 0 < ports[0] <= ports[1] < 65536):
        raise ConfigError(f"{prefix}port_range={list(ports)}: give the first and the last port, e.g. [40000,40100]")


def described(kind: Any, null: str = "null") -> str:
    parts = (kind, *get_args(kind))
    allowed = next((meta.description for part in parts for meta in getattr(part, "__metadata__", ())), "")
    return f"{allowed}, or {null}" if allowed and type(None) in parts else allowed
