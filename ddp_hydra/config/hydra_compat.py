"""Hides the differences between Hydra 1.3 and Hydra 1.4."""

from __future__ import annotations

import functools
import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeGuard, cast

import hydra
from hydra import utils
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config.redact import HIDDEN
from ddp_hydra.console import text

IS_1_3 = hydra.__version__.startswith("1.3")
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if IS_1_3 else {}
"""Arguments of `hydra.main` and the like: Hydra 1.3 warns if version_base is missing, 1.4 warns if it is given."""

_EVERY_TARGET = getattr(utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", None)
# 1.4 asks which targets may be called. A config is its user's own code, and so are the modules that it names.
_ALLOWED: dict[str, Any] = {} if _EVERY_TARGET is None else {"_execution_whitelist_": _EVERY_TARGET}
MAIN: dict[str, Any] = VERSION_BASE if _EVERY_TARGET is None else {"execution_whitelist": _EVERY_TARGET}
"""Arguments of our own `hydra.main`."""
CONFIG_DIR = "--config-dir"
"""The option, and what we name the folder that it adds, in Hydra's list of sources."""
ENV_SET = "hydra.job.env_set"
"""The key of the variables of the environment that Hydra sets for a job."""
ENV_COPY = "hydra.job.env_copy"
"""The key of the names of variables whose values Hydra copies into `ENV_SET`."""

logging.getLogger(utils.__name__).addFilter(lambda record: not record.getMessage().startswith("Error getting "))
"""Hydra logs each name that it doesn't find as what it was looked for first, also where the next look finds it."""


def register(name: str, node: Any) -> None:
    """Make a schema or config known to Hydra, unless it is already: 1.4 warns about a second time.

    It is known already if this process took over the state of another one before it imported this.
    """
    store = ConfigStore.instance()
    if store.get_type(f"{name}.yaml") == ObjectType.NOT_FOUND:
        group, _, last = name.rpartition("/")
        store.store(last, node, group=group or None, provider="ddp_hydra")


def name_overrides(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Write `hydra.job.override_dirname`, which Hydra 1.4 resolves when it is read."""
    if IS_1_3:
        from hydra._internal.config_loader_impl import get_overrides_dirname

        naming = config.hydra.job.config.override_dirname
        config.hydra.job.override_dirname = get_overrides_dirname(
            list(overrides), naming.exclude_keys, naming.item_sep, naming.kv_sep
        )


@contextmanager
def hydra_config_of(config: DictConfig) -> Iterator[None]:
    before = HydraConfig.instance().cfg
    HydraConfig.instance().cfg = cast(Any, config)  # `set_config` would copy Hydra's part
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before


@contextmanager
def outside_of_app() -> Iterator[None]:
    """Let Hydra compose another config inside the block while this process runs a Hydra app, which goes on after it."""
    if (app := GlobalHydra.instance().hydra) is None:
        yield
        return
    name, base = JobRuntime.instance().get("name"), hydra.version.getbase() if IS_1_3 else None
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().initialize(app)
        JobRuntime.instance().set("name", name)
        if IS_1_3:
            hydra.version.VersionBase.instance().version_base = base


def typed_words(hydra_cfg: Any) -> list[str]:
    """Return the overrides of a job as they were typed: a config would resolve the interpolations in them."""
    words: Any = OmegaConf.to_container(hydra_cfg.overrides.task)
    return [str(word) for word in words]


def typed_sources(hydra_cfg: Mapping[Any, Any]) -> list[str]:
    """Return the words that chose where the configs of a command came from, with whole paths, and its `ENV_SET`.

    Args:
        hydra_cfg: Hydra's part of a config that was saved, as plain data, which others may have written.
    """
    job, runtime = (found if isinstance(found := hydra_cfg.get(name), dict) else {} for name in ("job", "runtime"))
    name, listed = job.get("config_name"), runtime.get("config_sources")
    sources = [source for source in listed if isinstance(source, dict)] if isinstance(listed, list) else []
    words = [f"--config-name={name}"] if isinstance(name, str) and name != "config" else []
    searched = []
    for source in sources:
        place = str(source.get("path"))
        if source.get("schema") == "file":  # else it is a package
            place = os.path.normpath(Path(str(runtime.get("cwd")), place))
        if source.get("provider") == CONFIG_DIR:
            words.append(f"{CONFIG_DIR}={place}")
        elif source.get("provider") == "hydra.searchpath in command-line":
            searched.append(text.quoted(f"{source.get('schema')}://{place}"))
    words += [f"hydra.searchpath=[{','.join(searched)}]"] if searched else []
    given = _typed_for_hydra(hydra_cfg)
    copies = found if isinstance(found := job.get("env_copy"), list) else []
    copied = found if isinstance(found := job.get("env_set"), dict) else {}  # Hydra has put the values there
    names = [str(name) for name in copies if name in copied]
    set_again = [f"++{ENV_SET}.{name}={text.quoted(str(copied[name]))}" for name in names]
    # A run before may have got these words, too. Else the shell's values would win; a secret is kept nowhere.
    if names or _has_typed_copies(given):
        secrets = (text.quoted(name) for name in names if HIDDEN in str(copied[name]) and name in os.environ)
        set_again.append(f"{ENV_COPY}=[{','.join(secrets)}]")
    return [*words, *set_again, *filter(sets_variables, given)]


def uncopied(error: BaseException) -> str | None:
    """Return the name of the variable of `ENV_COPY` that is not set, if Hydra has raised this error for one."""
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, KeyError) else []
    is_of_loader = len(frames) > 1 and Path(frames[-2].filename).stem == "config_loader_impl"
    return str(error.args[0]) if is_of_loader and error.args[0] not in os.environ else None


def is_of_options(error: BaseException) -> bool:
    """Return whether Hydra has raised this error for options that don't go together, as `-m` and `--cfg`."""
    frames = traceback.extract_tb(error.__traceback__) if type(error) is ValueError else []
    return bool(frames) and frames[-1].name == "_run_hydra"


def _typed_for_hydra(hydra_cfg: Mapping[Any, Any]) -> list[str]:
    overrides = found if isinstance(found := hydra_cfg.get("overrides"), dict) else {}
    typed = found if isinstance(found := overrides.get("hydra"), list) else []
    return [word for word in typed if isinstance(word, str)]


def _has_typed_copies(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0].lstrip("+") == ENV_COPY for word in words)


def sets_variables(word: str) -> bool:
    key = word.partition("=")[0].lstrip("+~")
    return key == ENV_SET or key.startswith(f"{ENV_SET}.")


def reads_variable(config: DictConfig, name: str) -> bool:
    """Return whether a config, without Hydra's own part, reads a variable of the environment: `${oc.env:NAME}`."""
    own = OmegaConf.to_yaml(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
    return re.search(rf"\$\{{oc\.env:\s*{re.escape(name)}\b", own) is not None


def variables_set(hydra_cfg: Mapping[Any, Any]) -> dict[str, str]:
    """Return the variables of `ENV_SET`, those of `ENV_COPY` included, with their values as they are written.

    Args:
        hydra_cfg: as for `typed_sources`.
    """
    job = found if isinstance(found := hydra_cfg.get("job"), dict) else {}
    given = found if isinstance(found := job.get("env_set"), dict) else {}
    return {str(name): str(value) for name, value in given.items()}


def variables_of_job(job: Any) -> dict[str, str]:
    """Return the environment variables that a job's config names, as they are here while Hydra runs the job."""
    names = (*(job.get("env_copy") or ()), *(job.get("env_set") or ()))
    return {name: os.environ[name] for name in names if name in os.environ}


def variables_of(words: Sequence[str]) -> dict[str, Any]:
    """Return what overrides put into `ENV_SET`, as far as Hydra can read them; None for what they remove from it."""
    found: dict[str, Any] = {}
    for word in words:
        name = word.partition("=")[0].lstrip("+~").removeprefix(ENV_SET)[1:]
        with suppress(HydraException):
            value = parse_override(word).value() if sets_variables(word) else {}
            found |= {name: value} if name else value if isinstance(value, dict) else {}
    return found


@functools.lru_cache(maxsize=256)
def parse_override(word: str) -> Override:
    """Parse an override of the command line, once. Jobs of a sweep have most of theirs in common."""
    return OverridesParser.create().parse_override(word)


def are_words(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value of a file is a list of overrides. The last word of one that was cut off may be null."""
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def config_of(values: Mapping[str, Any]) -> DictConfig:
    """Return a config of values that are resolved: a `${` that was escaped begins no interpolation again."""
    config: DictConfig = OmegaConf.create(escaped(dict(values)))
    return config


def escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: escaped(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(escaped, value))
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def instantiate(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the `_target_` of a node of the user's config; raise what it raises, which Hydra 1.3 would wrap.

    Args:
        node: a config, or a dict of values that are resolved.
    """
    is_config = OmegaConf.is_config(node)
    if (r"\${" in str(OmegaConf.to_container(node))) if is_config else "${" in str(node):
        values: Any = OmegaConf.to_container(node, resolve=True) if is_config else node
        node = config_of(_for_1_3(values, kwargs.get("_convert_", "none")) if IS_1_3 else values)
    try:
        return utils.instantiate(node, *args, **_ALLOWED, **kwargs)
    except InstantiationException as error:
        if error.__cause__ is None or not str(error).startswith("Error in call to target"):
            raise
        raised = error.__cause__
    raise raised


def _for_1_3(value: Any, convert: Any, is_nested: bool = False) -> Any:
    """Escape texts for Hydra 1.3, which resolves them twice, and once more inside containers that stay configs."""
    if isinstance(value, dict):
        is_built, convert = "_target_" in value, value.get("_convert_", convert)
        if is_built and not value.get("_recursive_", True):
            return escaped(value)
        nested = {key: not is_built or isinstance(one, dict | list) for key, one in value.items()}
        return {key: _for_1_3(one, convert, nested[key]) for key, one in value.items()}
    if isinstance(value, list):
        return [_for_1_3(one, convert, is_nested) for one in value]
    stays_config = is_nested and str(getattr(convert, "value", convert)).lower() == "none"
    return escaped(escaped(value) if stays_config else value)


def targets_allowed_by(context: Any) -> Any:
    """Return the targets that another app's `HydraContext` lets its configs call; None for Hydra 1.3."""
    return getattr(context, "execution_whitelist", None)


def allowing(targets: Any) -> AbstractContextManager[Any]:
    """Restrict `instantiate` inside the block to what `targets_allowed_by` returned, maybe in another process."""
    if targets is None or not hasattr(utils, "execution_whitelist"):
        return nullcontext()
    return utils.execution_whitelist(targets, reset=True)
