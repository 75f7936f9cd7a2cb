"""Parses the options of the small commands, "key=value" words as everywhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TypeVar, cast, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.errors import ConfigError

T = TypeVar("T")


def parse(options: type[T], arguments: Sequence[str], usage: str, groups: Collection[str] = ()) -> tuple[T, list[str]]:
    """Return the options, and the other "key=value" words, which are overrides of the run's config.

    A text is taken as it was typed: YAML would make numbers of tag=1.10 and run=007.

    Args:
        options: a dataclass with a field `run`.
        arguments: the words of the command line.
        usage: printed for --help.
        groups: groups and keys of the run's config that are taken, too.

    Raises:
        ConfigError: a word is not key=value, a value has the wrong type, or `run` is missing.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)  # noqa: T201
        sys.exit(0)
    for word in arguments:
        if "=" not in word:
            raise ConfigError(f"{word!r} is not key=value; usage:\n{usage}")
    schema = OmegaConf.structured(options)
    keys = [str(key) for key in schema]
    own = [word for word in arguments if word.partition("=")[0] in keys]
    texts = {key for key, kind in get_type_hints(options).items() if kind in (str, str | None)}
    typed = {key: value for key, _, value in (word.partition("=") for word in own) if key in texts}
    others = OmegaConf.from_dotlist([word for word in own if word.partition("=")[0] not in texts])
    given = {key: None if value in ("", "null") else value for key, value in typed.items()}
    try:
        parsed = OmegaConf.to_object(OmegaConf.merge(schema, others, given))
    except OmegaConfBaseException as error:
        missing = "run=<run directory>" if error.full_key == "run" else f"{error.full_key}=<value>"
        reason = f"{missing} is missing" if "mandatory" in str(error) else str(error).splitlines()[0]
        raise ConfigError(f"{reason}; usage:\n{usage}") from error
    unknown = [
        word
        for word in arguments
        if word not in own and "." not in (key := word.partition("=")[0]) and key not in groups
    ]
    if unknown:
        and_groups = f", and the run's {', '.join(groups)}" if groups else ""
        raise ConfigError(f"{unknown[0]!r}: the keys are {', '.join(keys)}{and_groups}; usage:\n{usage}")
    return cast("T", parsed), [word for word in arguments if word not in own]
