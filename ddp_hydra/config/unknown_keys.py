"""Refuses unknown keys and values of a wrong kind; the messages name known keys."""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from ddp_hydra.config import experiments, redact
from ddp_hydra.config.checkpoint_config import as_typed
from ddp_hydra.config.hydra_compat import ENV_COPY, ENV_SET, is_of_options, typed_words, uncopied
from ddp_hydra.config.references import is_read, meet
from ddp_hydra.config.schema import SCHEMAS, TOP, Config, allowed, unresolved
from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError

_USUAL = ("optimizer.lr", "optimizer.weight_decay", "data.batch_size", "data.workers", "cluster.n_workers", "seed")
"""Keys that no schema has, and that options of other programs mean."""
_MEANT = (*_USUAL, "trainer.epochs", "trainer.max_steps")
"""Keys that a value of the same name at the top of a file is meant for."""


def values_of_option(repository: Any, path: str) -> dict[str, Any]:
    """Return the values that an option sets for its group, with those that it is based on."""
    found = repository.load_config(path)
    if found is None:
        return {}
    own: Any = found.config if found.header.get("package") is None else {}
    parts: list[Any] = [OmegaConf.create({})]
    is_in = False
    for entry in found.defaults_list:
        is_here = entry.package == "" and hasattr(entry, "group")  # as "base@_here_: images"
        option = f"{entry.group}/{entry.value}" if is_here else getattr(entry, "path", None)
        if entry.is_self():
            parts, is_in = [*parts, own], True
        elif isinstance(option, str) and not entry.is_override():
            base = option[1:] if option.startswith("/") else f"{path.rpartition('/')[0]}/{option}".lstrip("/")
            parts = [*parts, OmegaConf.create(values_of_option(repository, base))]
    values: Any = OmegaConf.to_container(OmegaConf.merge(*parts, {} if is_in else own))
    return dict(values)


log = logging.getLogger(__name__)
_GLOBAL = "a file that sets keys of other groups needs the line `# @package _global_` at its top"
_NOT_OVERRIDDEN = re.compile(rf"In '(.+?)': Could not override '([^'@]*)@({'|'.join(experiments.GROUPS)})\b")
_MERGING = "Error merging override "
_MERGING_FILE = re.compile(r"In '(.+?)': \w+ raised while composing config:\n")
OF_DATA_LOADER = {
    "shuffle": "give sampler.shuffle={value}",
    "drop_last": "give sampler.drop_last={value}",
    "num_workers": "give data.workers={value}",
    **dict.fromkeys(
        ("sampler", "batch_sampler"), "choose a sampler=<option>, or give sampler._target_=<module>.<class>"
    ),
    "collate_fn": "write a method collate(self, samples) in the class of the data set",
    "worker_init_fn": "write a method share(self, workers) in the class of the data set: each of data.workers calls it",
    "generator": "give seed=<number>, by which samples are shuffled and drawn",
}
"""Arguments of torch's DataLoader that a config of data may hold by habit, and what takes their place; those that
change no batch may stay."""
_OF_NODES = ("metrics", "callbacks")
"""Groups of which each key is a node, or null for none."""
OUR_DATA_KEYS = (
    "name", "batch_size", "global_batch", "train", "val", "prefetch", "memory_mb", "workers", "n_samples", "shard_by"
)  # fmt: skip


def check(cfg: DictConfig) -> None:
    """Refuse keys that no schema has, arguments that nothing passes on, and nodes without a `_target_`."""
    raw: Any = OmegaConf.to_container(cfg)
    for _, said in _inner_mistakes(raw):  # keys at the top were judged with Hydra's part, which may read them
        raise ConfigError(said)
    _check_data(raw)
    nodes = [(name, key, one) for name in _OF_NODES for key, one in (raw.get(name) or {}).items() if one is not None]
    sets = ((key, raw["data"].get(key)) for key in ("train", "val"))
    nodes += [("data", key, value) for key, value in sets if isinstance(value, str | dict) and value]
    for group, key, value in nodes:
        node = value
        if isinstance(value, str):
            try:
                node = cfg[group][key]  # the text may be the interpolation of a node
            except OmegaConfBaseException:
                continue  # `resolved` says why
        if not isinstance(node, Mapping | DictConfig) or "_target_" not in node:
            class_name = value if isinstance(value, str) and "${" not in value else "<module>.<class>"
            given = f"{'' if group == 'data' else '+'}{group}.{key}._target_={class_name}"
            shown = redact.without([f"{group}.{key}={value}"])[0]
            raise ConfigError(f"{shown}: a _target_ is missing: give {given}")


def check_new(cfg: DictConfig, hydra_cfg: Any, loader: Any) -> None:
    """Refuse new keys that nothing reads, in schemas and at the top: Hydra accepts them after `+` and in files.

    What files alone have at the top is a mistake only where it is like a known key.
    """
    raw, tops = _with_hydra(cfg, hydra_cfg), {key.partition(".")[0] for key in _new_keys(hydra_cfg)}
    for key, said in (*_inner_mistakes(raw), *_top_mistakes(raw), *_top_mistakes(raw, tops)):
        place = _place(key, hydra_cfg, loader)
        if key in tops and place and not _is_mistake(key, raw[key]):
            continue  # what is typed adds to a node of a file
        raise ConfigError(f"{place}{said}")
    for name, value in (raw["hydra"]["job"].get("env_set") or {}).items():
        if isinstance(value, dict | list):  # Hydra judges the values of single keys only
            raise ConfigError(f"{ENV_SET}.{name} is no text: give a text, in quotes")


def _new_keys(hydra_cfg: Any) -> list[str]:
    """Return the keys that are typed with `+`, without groups, whose options are chosen."""
    new = [word.partition("=")[0].lstrip("+") for word in typed_words(hydra_cfg) if word.startswith("+")]
    return [key for key in new if key not in hydra_cfg.runtime.choices]


def _inner_mistakes(raw: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield new keys of groups that have a schema, and callbacks and metrics without a name, each with a sentence."""
    for group, schema in SCHEMAS.items():
        node, known = raw.get(group), [field.name for field in fields(schema)]  # type: ignore[arg-type]
        for name in node if isinstance(node, dict) else ():  # a config of one's own may lack a group
            if str(name) not in known and not is_read(key := f"{group}.{name}", raw):
                yield key, text.unknown(key, known)
    for group in _OF_NODES:
        node = raw.get(group)
        if isinstance(node, dict) and (class_name := node.get("_target_")) is not None:
            key, there = f"{group}._target_", f"put it below one, `score: {{_target_: {class_name}}}`"
            yield key, f"{key}={class_name}: a {group.removesuffix('s')} needs a name: {there}"


def _top_mistakes(raw: Mapping[Any, Any], tops: Container[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield new keys at the top that are mistakes, or in `tops`, each with a sentence."""
    known = [field.name for field in fields(Config)]
    for key, value in ((str(key), value) for key, value in raw.items()):
        is_new = key not in known and key != "hydra"
        if not is_new or not (key in tops or _is_mistake(key, value)) or is_read(key, raw):
            continue
        inside = list(value) if isinstance(value, dict) else []
        others = [] if inside else _keys_named(key)
        said = _did_you_mean(key, others) if others else text.unknown(key, known)
        if key in experiments.GROUPS and isinstance(value, dict):
            said = f"{'.'.join((key, *map(str, inside[:1])))}: nothing reads it: {_GLOBAL}"
        yield key, said


def _is_mistake(key: str, value: Any) -> bool:
    """Return whether a key at the top of a file is misspelt, belongs into a group, or shows that a package lacks."""
    is_misspelt = len(key) > 4 and difflib.get_close_matches(key, [field.name for field in fields(Config)], 1, 0.88)
    is_of_group = not (isinstance(value, dict) and value) and {*_keys_named(key)} & {*_MEANT}
    return bool(is_misspelt or is_of_group) or key in experiments.GROUPS


def _with_hydra(cfg: DictConfig, hydra_cfg: Any) -> dict[str, Any]:
    """Return a config with Hydra's part, but for its texts of help: they name keys and options by interpolations."""
    raw: Any = OmegaConf.to_container(cfg)
    own: Any = OmegaConf.to_container(hydra_cfg)
    return {**raw, "hydra": {key: value for key, value in own.items() if key not in ("help", "hydra_help")}}


def _keys_named(name: str) -> list[str]:
    """Return the keys of groups with this name: trainer.epochs for epochs."""
    keys = [*(f"{group}.{one.name}" for group in SCHEMAS for one in fields(SCHEMAS[group])), *_USUAL]  # type: ignore[arg-type]
    return [key for key in keys if key.rpartition(".")[2] == name]


def _did_you_mean(key: str, keys: Iterable[str]) -> str:
    return f"{key}: there is no such key: did you mean {' or '.join(keys)}?"


def _check_data(raw: Mapping[Any, Any]) -> None:
    """Refuse arguments of torch's DataLoader, which nothing passes on, as keys of the data."""
    given = {key: value for key in OF_DATA_LOADER if (value := raw["data"].get(key)) is not None}
    as_it_is = {name: (raw.get("sampler") or {}).get(name) for name in ("shuffle", "drop_last")}
    as_it_is["num_workers"] = raw["data"].get("workers") or 0
    for key, value in given.items():
        if value != as_it_is.get(key) and not is_read(f"data.{key}", raw):
            raise ConfigError(
                f"data.{key}={as_typed(value)}: no DataLoader gets it: "
                f"{OF_DATA_LOADER[key].format(value=as_typed(value))}, and leave data.{key} out; an argument of the "
                f"data set itself is data.train.{key}"
            )


def explain(error: BaseException, can_sweep: bool = True) -> str | None:
    """Return a sentence for an error of Hydra, OmegaConf or YAML about a config; None for another error.

    Args:
        error: was raised.
        can_sweep: whether `-m` may be typed, as for a training at the terminal.
    """
    typed, cause = str(error), error.__cause__
    if isinstance(error, ConfigCompositionException) and (in_file := _MERGING_FILE.match(typed)):
        cause = cause or error.__context__  # Hydra gives a file's error no cause
        said = _explain_value(cause, typed)
        if said is None and isinstance(cause, OmegaConfBaseException):
            said = ": ".join(filter(None, (str(cause.full_key or ""), _first_line(cause))))
        return said and f"{in_file[1]}.yaml: {said}"
    if isinstance(error, ConfigCompositionException) and (lost := _NOT_OVERRIDDEN.match(typed)):
        return f"{lost[1]}.yaml: `override /{lost[2]}` finds nothing in {lost[3]}: {_GLOBAL}"
    if variable := uncopied(error):
        advice = f"type {variable}=<value> in front of the command, or leave it out of {ENV_COPY}"
        return f"{ENV_COPY}: {variable} is not set: {advice}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_option(error)
    if isinstance(error, OverrideParseException):
        word = str(error.override)
        key, is_given, value = word.partition("=")
        reason = typed.removeprefix(f"Error parsing override '{word}'\n").splitlines()[0]
        quoted = text.typed(key, value).replace(r"\${", "${")  # interpolations stay
        advice = f"quote the value, {quoted}" if is_given else f"give {word}=<value>"
        if plain_list := re.fullmatch(r"\[([^][{}'\"]+)\]", value):
            items = ",".join(text.quoted(item.strip()) for item in plain_list[1].split(","))
            advice = "quote the items, " + shlex.quote(f"{key}=[{items}]")
        if "/" in key and "." in key:
            advice = f"give {key.replace('/', '.')}={value}"
        return f"{word}: this is no override ({reason}): {advice}"
    if several := re.match(r"Ambiguous value for argument '(.*?)=(.*)'\n", typed):
        key, value = several.groups()
        meanings = f"{key}=[{value}] for a list, \"{key}='{value}'\" for a text"
        sweep = ", or -m for a sweep over them" if can_sweep else "; a sweep over them is typed, as ddp-hydra -m"
        return f"{key}={value}: these are several values: type {meanings}{sweep}"
    if isinstance(error, InterpolationResolutionError) and error.full_key:
        return unresolved(error)
    if isinstance(error, YAMLError):
        mark = getattr(error, "problem_mark", None)
        place = f"{os.path.relpath(mark.name)}, line {mark.line + 1}: " if mark is not None else ""
        return f"{place}this is no YAML: {getattr(error, 'problem', None) or typed}"
    if missing := re.match(r"Could not delete from config\. '(.*)' does not exist", typed):
        advice = "leave it out, or type ddp-hydra --cfg job, which shows the keys"
        return f"~{missing[1]}: there is no such key, or it is null; {advice}"
    if unchosen := re.match(r"Could not delete '(.*)'\. No match in the defaults list", typed):
        advice = f"leave it out, or remove its keys, '~{unchosen[1].rpartition('@')[2]}.<key>'"
        return f"~{unchosen[1]}: no option of this group is chosen; {advice}"
    if typed.startswith(f"{_MERGING}~") and "does not support deletion" in str(cause):
        key = typed.removeprefix(f"{_MERGING}~")
        return f"~{key}: every job has this key: leave it out, or give {key}=<value>"
    if is_of_options(error):
        return typed
    if type(error) is ValueError and typed.startswith("Config group override"):
        return f"{error}: give the name of an option, or '~<group>' to leave a group out. ddp-hydra --help lists them"
    return _explain_value(cause, typed)


def _explain_value(cause: BaseException | None, typed: str) -> str | None:
    """Return a sentence for OmegaConf's error about a value that is typed or in a file."""
    of_variable = "a text, in quotes" if str(getattr(cause, "full_key", "")).startswith(ENV_SET) else ""
    if isinstance(cause, ValidationError) and (given := of_variable or allowed(str(cause.full_key))):
        where = (
            typed.removeprefix(_MERGING) if typed.startswith(_MERGING) else f"{cause.full_key}: {_first_line(cause)}"
        )
        return f"{where}: give {given}"
    if not isinstance(cause, ConfigAttributeError | ConfigKeyError) or not isinstance(cause.parent_node, DictConfig):
        return None
    key, node = str(cause.full_key), cause.parent_node
    nodes = {str(group): node._get_node(group) for group in node}
    keys = {group: set(one.keys()) for group, one in nodes.items() if isinstance(one, DictConfig)}  # of null: none
    groups = [f"{group}.{key}" for group, known in keys.items() if key in known]
    if groups and node._get_parent() is None:
        return _did_you_mean(key, groups)
    more = ""
    if "_target_" in node and key.rpartition(".")[0] not in ("hydra.launcher", "hydra.sweeper"):  # these have all
        more = f"; another argument of {node['_target_']} is given with +{key}=<value>"
    if key.startswith(f"{ENV_SET}."):
        more = f"; a new variable is given with +{key}=<value>"
    return text.unknown(key, map(str, node), more)


def _first_line(error: OmegaConfBaseException) -> str:
    return str(error.msg or error).splitlines()[0]


def no_option(word: str) -> str:
    """Return a sentence for `--epochs`, which other programs take."""
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    found = _keys_named(name) or ["trainer.epochs"]
    return f"{word}: there is no such option: keys are typed without dashes, {found[0]}=<value>; type ddp-hydra --help"


def _no_option(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if error.missing_cfg_file == "hydra/sweeper/optuna":
        return "hydra/sweeper=optuna is in a package that is not installed: type pip install 'ddp-hydra[optuna]'"
    for folder in Path.cwd().parents:
        if (folder / "conf" / f"{error.missing_cfg_file}.yaml").is_file():
            there = f"DDP_HYDRA_PROJECT={text.quoted(str(folder))}"
            return f"{group}={name} is an option of the project in {folder}: type the command there, or {there}"
    if error.options:
        near = text.meant(name, error.options, f"{group}=")
        return f"{group}={name} is not an option{near or '.'} The options are {', '.join(error.options)}"
    return f"{group}={name} is not an option; ddp-hydra --help lists the options" if group else str(error)  # of a list


def check_typed(cfg: DictConfig, hydra_cfg: Any, loader: Any) -> None:
    """Refuse keys that nothing reads, texts for numbers and booleans, two sizes of a batch, and experiments that lose.

    Warn of new keys whose place is the user's own.
    """
    typed, repository = typed_words(hydra_cfg), getattr(loader, "repository", None)
    check_new(cfg, hydra_cfg, loader)
    _warn_of_unread(cfg, hydra_cfg)
    sizes = [word for word in typed if word.lstrip("+").startswith("data.batch_size=")]
    both = [OmegaConf.select(cfg, f"data.{key}") for key in ("batch_size", "global_batch")]
    if sizes and None not in both:
        raise ConfigError(
            f"{sizes[0]}: data.global_batch={both[1]} wins over it: give one of the two, and null for the other"
        )
    if repository is not None:
        experiments.check(cfg, hydra_cfg, loader)
        check_texts(cfg, typed, hydra_cfg.runtime.choices, repository)


def _place(key: str, hydra_cfg: Any, loader: Any) -> str:
    """Return the file that sets a key, `experiment/mine.yaml: `, if one does."""
    if getattr(loader, "repository", None) is None:
        return ""
    words = [*typed_words(hydra_cfg), *hydra_cfg.overrides.hydra]
    found = loader.compute_defaults_list(hydra_cfg.job.config_name, words, RunMode.RUN)
    for default in reversed(found.defaults):
        config = loader.repository.load_config(default.config_path)
        if config is None:
            continue
        content, prefix = OmegaConf.to_container(config.config), f"{default.package}." if default.package else ""
        if key == default.package or any(
            meet(key, own) for own, value in redact.leaves(content, prefix) if own == key or value != {}
        ):
            return f"{default.config_path}.yaml: "
    return ""


def check_texts(cfg: DictConfig, typed: Iterable[str], choices: Mapping[str, Any], repository: Any) -> None:
    for word in typed:
        key = word.partition("=")[0].lstrip("+")
        group, _, name = key.partition(".")
        # a cluster's number may become a text: memory_limit=4GB
        if not name or group in SCHEMAS or group == "cluster" or not choices.get(group):
            continue
        usual = dict(redact.leaves(values_of_option(repository, f"{group}/{choices[group]}"))).get(name)
        # Only the job knows what ${hydra:runtime.output_dir} and the like are.
        if not isinstance(usual, bool | int | float) or "${" in word:
            continue
        value = OmegaConf.select(cfg, key, throw_on_missing=False)
        # A model may take a list or a text in the place of a number, padding=same; torch's optimizers don't.
        is_text = isinstance(value, str) and (group != "model" or isinstance(usual, bool))
        if is_text or (isinstance(value, ListConfig) and group in ("optimizer", "scheduler")):
            kind = "true or false" if isinstance(usual, bool) else "a number"
            raise ConfigError(f"{key}={value}: give {kind}; {group}={choices[group]} has {str(usual).lower()}")


def _warn_of_unread(cfg: DictConfig, hydra_cfg: Any) -> None:
    """Warn of new keys that are neither arguments of a `_target_` nor used by an interpolation."""
    raw = _with_hydra(cfg, hydra_cfg)
    for top, value in raw.items():
        inside = [key for key in value if key in TOP] if isinstance(value, dict) else []
        others = [] if isinstance(value, dict) else _keys_named(str(top))
        if not (inside or others) or top in (*TOP, "hydra") or is_read(str(top), raw):
            continue
        if inside:
            log.warning("%s.%s: nothing reads it: %s", top, inside[0], _GLOBAL)
        else:
            log.warning("%s: nothing reads it: did you mean %s?", top, " or ".join(others))
    for key in _new_keys(hydra_cfg):
        group, _, name = key.partition(".")
        node = cfg.get(group) if name and "." not in name and group not in SCHEMAS else None
        if not isinstance(node, DictConfig) or "_target_" in node or name in OUR_DATA_KEYS or is_read(key, raw):
            continue
        is_left_out = group in _OF_NODES and node.get(name) is None
        if name in node and not is_left_out and not isinstance(node.get(name), DictConfig):
            others = [str(other) for other in node if other != name]
            log.warning("%s: nothing reads it%s", key, text.meant(name, others, f"{group}."))
