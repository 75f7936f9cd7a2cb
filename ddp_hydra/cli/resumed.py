"""Reads what a run or sweep was typed with: its overrides, folders of configs and variables.

A command that resumes it, or is given `run=<run>`, has these, too. What is typed now has priority.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hydra._internal.utils import get_args_parser
from hydra.core import utils
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_hydra.cli.words import (
    MODES,
    ONE_RUN,
    full_key_of,
    is_removed,
    is_sweep,
    joined,
    key_of,
    places_of,
    value_of,
)
from ddp_hydra.config import env_values, experiments, redact, schema
from ddp_hydra.config.hydra_compat import (
    CONFIG_DIR,
    ENV_SET,
    are_words,
    parse_override,
    sets_variables,
    typed_sources,
    variables_of,
)
from ddp_hydra.config.redact import HIDDEN
from ddp_hydra.console import text
from ddp_hydra.errors import ConfigError
from ddp_hydra.job.run_dir import is_resumed, kept_environment
from ddp_hydra.storage.run_ref import RunRef

Saved = TypeVar("Saved", dict[str, Any], list[Any])
GPUS = "CUDA_VISIBLE_DEVICES"
OWN_CONFIGS = "a command that is given a run has the run's own configs"


def with_resumed_overrides(arguments: list[str]) -> list[str]:
    """Add to `resume=<run>` the overrides that the run was started with; those typed now have priority."""
    resumed = resumed_run(arguments)
    saved = _overrides_of(resumed)
    if saved is None:
        return arguments
    _refuse_other_weights(arguments, saved, resumed)
    hydra_cfg = hydra_of(resumed)
    arguments = with_sources(arguments, hydra_cfg, f"resume={resumed}: the run")
    # Faults are not injected twice, and the command waits for the run, unless the user types these again.
    once = ("resume", "dry_run", "faults", "detach", "trainer.pause_after_validations")
    given, before = set(once), list[str]()
    run_dirs = [Path(value_of(word)) for word in arguments if word.startswith("hydra.run.dir=")]
    if any(is_resumed(run_dir, resumed) for run_dir in run_dirs):
        saved = [word for word in saved if word not in arguments]
        # A run that it has resumed before: this one, which comes later, wins.
        before = [word for word in saved if key_of(word) == "resume" and redact.HIDDEN not in word]
    # If a group is chosen again (cluster=inline), the old changes in it (cluster.n_workers=4) are dropped.
    given |= {"debug"} if "debug=faults" in saved else set()
    given |= {"results.root"} if "results.handler=client" in arguments else set()
    reset = _resets(arguments, saved)
    arguments = [word for word in arguments if word not in reset]
    kept, arguments = joined(saved, arguments, given | set(map(full_key_of, reset)))
    _refuse_hidden(kept, f"resume={resumed}: the run", arguments)
    folder = _folder_of(hydra_cfg)
    if folder not in ("", str(Path.cwd())):
        config = OmegaConf.create(saved_config(resumed) or {})
        kept = [_with_whole_paths(word, folder, config) for word in kept]
    return [*kept, *before, *arguments]


def _refuse_other_weights(words: Sequence[str], saved: Sequence[str], resumed: str) -> None:
    # A job that is started again has the words of its run.
    from ddp_hydra.job import job_config

    typed, own = (
        {value_of(one) for one in some if full_key_of(one) == "model.weights" and "=" in one} for some in (words, saved)
    )
    for given in sorted(typed - own):
        if job_config.weights_path(OmegaConf.create({"model": {"weights": given}})) is not None:
            what = f"resume={resumed} takes the run's weights: leave one of the two out"
            raise ConfigError(text.printable(f"model.weights={given}: {what}"))


def resumed_run(words: Sequence[str]) -> str:
    """Return the run that words resume, of several the last one, as Hydra does; "" without one."""
    return next((value_of(word) for word in reversed(words) if word.startswith("resume=")), "")


def _resets(arguments: Sequence[str], saved: Sequence[str]) -> list[str]:
    """Return the words `~key` whose key every job has: it gets the value again that it has without the saved words."""
    removed = [word for word in arguments if word.startswith("~") and full_key_of(word) in schema.OF_EVERY_JOB]
    for word in removed:
        group, _, name = full_key_of(word).rpartition(".")
        within = [one for one in saved if group and full_key_of(one) == group and not one.startswith("~")]
        if whole := next((one for one in within if name in _entries(one)), ""):
            what = f"the run was begun with {redact.without([whole])[0]}, of which no part is dropped"
            raise ConfigError(f"{word}: {what}: give {group}.{name}=<value>")
    return [word for word in removed if any(full_key_of(word) in places_of(one) for one in saved)]


def _entries(word: str) -> Mapping[Any, Any]:
    with contextlib.suppress(HydraException):  # Hydra says later what is wrong with it
        value = parse_override(word).value()
        return value if isinstance(value, dict) else {}
    return {}


def with_one_run(arguments: list[str], typed: Sequence[str]) -> list[str]:
    """Let `resume=<run>` go on with one run where its config makes sweeps, unless what is typed now may make one."""
    resumed = resumed_run(typed)
    may_sweep = {*MODES, *experiments.GROUPS} & set(map(key_of, typed)) or any(map(is_sweep, typed))
    return arguments if may_sweep or _overrides_of(resumed) is None else [*arguments, ONE_RUN]


def with_sources(arguments: list[str], hydra_cfg: Mapping[Any, Any], what: str) -> list[str]:
    """Add the main config, the folders of configs and the variables of `what`, a run or sweep; those typed now win."""
    given, _ = get_args_parser().parse_known_args(arguments)
    options = {"--config-name": given.config_name, CONFIG_DIR: given.config_dir}
    typed = {name for name, value in options.items() if value is not None} | set(map(full_key_of, arguments))
    added = [word for word in typed_sources(hydra_cfg) if sets_variables(word) or word.partition("=")[0] not in typed]
    added = _with_known_variables(added, arguments, what)
    gone = [word for word in added if word.startswith(f"{CONFIG_DIR}=") and not Path(value_of(word)).is_dir()]
    for word in gone:  # it may not be needed; Hydra names an option that is lacking
        said = f"{what} was given {CONFIG_DIR} {value_of(word)}, which is not there: it goes on without; else type"
        print(f"ddp_hydra: {said} {CONFIG_DIR} <where it is now>", file=sys.stderr)  # noqa: T201
    return [*(word for word in added if word not in gone), *arguments]


def _with_known_variables(words: list[str], arguments: Sequence[str], what: str) -> list[str]:
    """Leave variables out that are typed anew with +, and secrets, which are kept nowhere."""
    typed, anew = variables_of(arguments), variables_of([word for word in arguments if word.startswith("+")])
    given = variables_of(words)
    lost = {name for name, value in given.items() if HIDDEN in str(value)}
    for name, value in given.items():
        if name in lost - typed.keys():
            _note_lost_variable(name, f"{what} was given {ENV_SET}.{name}, a secret, which is kept nowhere")
        elif name not in typed and value is not None:  # it is None where the run has removed it
            _note_other_variable(name, value, _resolved(str(value)), what.rpartition(": ")[2])
    left_out = {*lost, *anew}
    kept: list[str] = []
    for word in words:
        variables = variables_of([word])
        if left_out.isdisjoint(variables):
            kept.append(word)
            continue
        for name, value in variables.items():
            if name not in left_out:  # Hydra takes no dict apart
                kept.append(f"+{ENV_SET}.{name}=" + text.quoted(str(value)).replace(r"\${", "${"))
    return kept


def _resolved(value: str) -> str:
    with contextlib.suppress(OmegaConfBaseException):  # it may be of a key of the config
        return str(OmegaConf.create({"value": value}).value)
    return value


def _note_lost_variable(name: str, what: str) -> None:
    if name not in os.environ:
        said = f"{what}: it goes on without; else set {name}=<value> in front of the command"
        print(f"ddp_hydra: {said}", file=sys.stderr)  # noqa: T201


def _note_other_variable(name: str, written: object, value: str, who: str, can_type: bool = True) -> None:
    """Say that a variable has the value of `who`, not the shell's, unless that value is made of the shell's."""
    ours = os.environ.get(name, value)
    if ours == value or re.search(rf"\$\{{oc\.env:\s*{re.escape(name)}\s*[,}}]", str(written)):
        return
    shown, shown_ours = (text.printable(redact.without({name: one})[name]) for one in (value, ours))
    said = f"{name}={shown}, as {who} had it, and not {shown_ours} of the shell"
    if can_type:
        word = f"{ENV_SET}.{name}={text.quoted(ours)}"
        if text.quoted(ours) == ours and str(variables_of([word])[name]) != ours:  # Hydra reads true, null and 1e3
            word = f'{ENV_SET}.{name}="{ours}"'
        is_hidden = HIDDEN in shown_ours
        said += f": type {f'{ENV_SET}.{name}=<value>' if is_hidden else text.printable(shlex.quote(word))} for that"
    print(f"ddp_hydra: {said}", file=sys.stderr)  # noqa: T201


def without_variables(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the other words, and those that set or remove variables, as `hydra.job.env_set.NAME=<value>`.

    Raises:
        ConfigError: such a word can't be read.
    """
    of_variables = [word for word in words if sets_variables(word)]
    for word in of_variables:
        if any(isinstance(value, dict | list) for value in variables_of([word]).values()):
            raise ConfigError(
                f"{text.printable(redact.without([word])[0])}: a variable is a text: put its value in quotes"
            )
        with contextlib.suppress(HydraException):
            given = parse_override(word)
            is_known = given.value() is None if given.is_delete() else not given.is_sweep_override()
            if is_known and (full_key_of(word) != ENV_SET or isinstance(given.value(), dict)):
                continue
        ways = f"{ENV_SET}.<name>=<value>, {ENV_SET}={{<name>: <value>}} or ~{ENV_SET}.<name>"
        raise ConfigError(f"{text.printable(redact.without([word])[0])} sets no variable: give {ways}")
    return [word for word in words if word not in of_variables], of_variables


def environment_of(
    run: str, trust: bool = False, typed: Sequence[str] | None = ()
) -> AbstractContextManager[dict[str, str]]:
    """Set the variables of a run's `hydra.job.env_set` inside the block, as Hydra did for its job; return them.

    They win over the shell's, except for the numbers of the GPUs, which are this machine's.

    Args:
        trust: do so for a lone checkpoint or a URL, too: a variable may name code.
        typed: words of `without_variables`, which win over the run's; None: whoever calls takes none.
    """
    hydra_cfg: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    own = variables_of(typed or ())
    is_trusted = trust or RunRef.own(run).is_own
    try:
        hydra_cfg = hydra_of(run, follows=True)
        saved = (saved_config(run) or {}) if is_trusted and (own or _env_set(hydra_cfg)) else {}
    except (ConfigError, OSError) as error:
        if is_trusted:
            said = f"run={run}: its variables ({ENV_SET}) can't be read, and are not set: {error}"
            print(f"ddp_hydra: {said}", file=sys.stderr)  # noqa: T201
        hydra_cfg = {}
    if not is_trusted:
        for name in _env_set(hydra_cfg).keys() - own:
            said = (
                f"run={run} was given {ENV_SET}.{name}, which is not set here: give it, or trust=true if you trust it"
            )
            print(f"ddp_hydra: {text.printable(said)}", file=sys.stderr)  # noqa: T201
        hydra_cfg = {}
    given = {**_env_set(hydra_cfg), **own}
    if GPUS in os.environ and GPUS not in own:
        given.pop(GPUS, None)
    cfg = OmegaConf.create({**saved, "hydra": {**hydra_cfg, "job": {**_job(hydra_cfg), "env_set": given}}})
    found: dict[str, str] = {}
    for name, written in given.items():
        try:
            if name in own and written is None:  # it is removed
                continue
            if HIDDEN in str(written):
                _note_lost_variable(name, f"run={run}: the run was given {ENV_SET}.{name}, a secret, kept nowhere")
                continue
            found[name] = str(cfg.hydra.job.env_set[name])
        except OmegaConfBaseException as error:
            word = text.printable(redact.without([f"{ENV_SET}.{name}={written}"])[0])
            if name in own:
                raise ConfigError(f"{word}: {schema.why_unresolved(error)}") from None
            _note_lost_variable(name, f"run={run}: {word} of the run has no value here")
            continue
        if name not in own:
            _note_other_variable(name, written, found[name], run if typed is None else "the run", typed is not None)
    return _environment(found)


def _job(hydra_cfg: Mapping[Any, Any]) -> dict[str, Any]:
    return found if isinstance(found := hydra_cfg.get("job"), dict) else {}


def _env_set(hydra_cfg: Mapping[Any, Any]) -> dict[str, Any]:
    return found if isinstance(found := _job(hydra_cfg).get("env_set"), dict) else {}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[dict[str, str]]:
    with utils.env_override(variables):
        yield variables


def tell_environment(run: str, cfg: DictConfig) -> None:
    """Say which values of a run's config the environment gave otherwise, where `cfg` writes them alike."""
    now = env_values.values_of(cfg)
    for line in env_values.changes(kept_environment(run, cfg) if now else {}, now):
        print(f"ddp_hydra: {line}: the environment is not the run's", file=sys.stderr)  # noqa: T201


def saved_config(run: str) -> dict[str, Any] | None:
    return saved_yaml(run, "config.yaml", dict, follows=True) or None


def _with_whole_paths(word: str, folder: str, saved: DictConfig) -> str:
    # A relative path is one in the folder where the run was typed. Of a key of one's own, the run's config says so.
    key = full_key_of(word)
    if key != "model.path" and not key.startswith("data."):
        return word
    from ddp_hydra.job import job_config

    given = parse_override(word).value()
    values = given if isinstance(given, list) else [given]
    whole = [job_config.whole_path(key, value, Path(folder)) for value in values]
    if whole == values or not are_words(values):
        return word
    if not job_config.is_path(key):
        kept = OmegaConf.select(saved, key, throw_on_resolution_failure=False)
        if (list(kept) if isinstance(kept, ListConfig) else [kept]) != whole:
            return word
    quoted = [text.quoted(value) for value in whole]
    return f"{word.partition('=')[0]}=" + (f"[{','.join(quoted)}]" if isinstance(given, list) else quoted[0])


def _refuse_hidden(words: list[str], what: str, later: Sequence[str], where: str = "") -> None:
    following = [*words, *later]
    lost = [word for index, word in enumerate(words) if HIDDEN in word and not is_removed(word, following[index + 1 :])]
    if names := [word.partition("=")[0] for word in lost]:
        raise ConfigError(
            f"{what} was given {', '.join(names)}, a secret, which is kept nowhere: type {names[0]}=<value>{where}"
        )


def _overrides_of(run: str) -> list[str] | None:
    saved = saved_yaml(run, "overrides.yaml", list) if run else None
    return None if saved is None else list(map(str, saved))


def hydra_of(run: str, *, follows: bool = False) -> dict[str, Any]:
    """Return Hydra's part of the config of a run, see `saved_yaml`; an empty dict where the run has kept none."""
    found = (saved_yaml(run, "hydra.yaml", dict, follows=follows) or {}).get("hydra")
    return found if isinstance(found, dict) else {}


def saved_yaml(run: str, name: str, kind: type[Saved], *, follows: bool = False) -> Saved | None:
    """Return a file of a run's folder .hydra; None where there is none, or the run's store is away for now.

    Args:
        follows: read it where a folder points to that holds no results itself.

    Raises:
        ConfigError: the file is damaged; the message names it.
    """
    place = (RunRef.named if follows else RunRef.own)(run)
    try:
        content = place.read(f".hydra/{name}")
    except (FileNotFoundError, NotADirectoryError, ConnectionError):
        return None
    return _parsed(content, f"{place.place.rstrip('/')}/.hydra/{name}", kind)


def _parsed(content: bytes, file: str, kind: type[Saved]) -> Saved | None:
    if not content.strip() and kind is dict:  # its writer was killed
        return None
    found: Any = None
    try:
        found = OmegaConf.to_container(OmegaConf.create(content.decode()))
        reason = f"it holds no {'list of words' if kind is list else 'keys'}"
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = str(getattr(error, "problem", None) or error).partition("\n")[0]
    if isinstance(found, kind) and (kind is dict or are_words(found)):
        return found
    raise ConfigError(f"{file} is damaged ({reason}): write it anew, or remove it and type what it held")


def _folder_of(hydra_cfg: Mapping[Any, Any]) -> str:
    """Return the folder that a run was typed in; "" where it has not kept it."""
    return str((hydra_cfg.get("runtime") or {}).get("cwd") or "")


def typed_elsewhere(error: Exception, words: Sequence[str]) -> str:
    """Say, of an option that is not there, in which other folder the run was typed that these words resume, if any."""
    resumed = resumed_run(words)
    if not isinstance(error, MissingConfigException) or not resumed:
        return ""
    options = [word.lstrip("+").replace("=", "/", 1) for word in _overrides_of(resumed) or ()]
    folder = _folder_of(hydra_of(resumed))
    if folder in ("", str(Path.cwd())) or error.missing_cfg_file not in options:  # else it was typed now
        return ""
    return f". The run that resume={resumed} continues was typed in {text.printable(folder)}: type the command there"


def with_resumed_sweep(arguments: list[str]) -> list[str]:
    """Add to `-m hydra.sweep.dir=<sweep>` the overrides that are saved there, so that it resumes the sweep."""
    keys = ("hydra.launcher.resume", "hydra.sweep.dir")
    folders = [value_of(word) for word in arguments if key_of(word) in keys and "=" in word]
    saved = Path(folders[0]) / "multirun.yaml" if folders else None
    of_jobs = [word for word in arguments if "=" in word or word.startswith("~")]
    typed = {key_of(word) for word in of_jobs if not key_of(word).startswith(("hydra", "-"))}
    multirun: Any = _parsed(saved.read_bytes(), str(saved), dict) if saved is not None and saved.is_file() else None
    if saved is None or not multirun:
        of_sweep = ("hydra.sweeper", "hydra/sweeper", "--config-name", "-cn", "~")
        is_whole = typed or any(word.lstrip("+").startswith(of_sweep) for word in arguments)
        if saved is not None and not is_whole and (saved.parent / "sweep.json").is_file():
            what = "an empty" if saved.is_file() else "no"
            raise ConfigError(f"{saved.parent} has a sweep, but {what} multirun.yaml: type the words of the sweep, too")
        return arguments
    hydra_cfg = found if isinstance(found := multirun.get("hydra"), dict) else {}
    overrides = found if isinstance(found := hydra_cfg.get("overrides"), dict) else {}
    of_hydra, of_task = (overrides.get(part) for part in ("hydra", "task"))
    # Hydra writes these keys behind the words.
    if not (are_words(of_hydra) and are_words(of_task) and {"job", "runtime"} & set(hydra_cfg)):
        raise ConfigError(
            f"{saved} is damaged (it holds no words, or not all): remove it, and type the words of the sweep, too"
        )
    arguments = with_sources(arguments, hydra_cfg, f"{saved.parent}: the sweep")
    given = [word for word in arguments if key_of(word) not in keys]
    if typed and (lacking := [word for word in of_task if key_of(word) not in typed]):
        what = f"{saved.parent}: the sweep was typed with {' '.join(lacking)}, and these jobs are not"
        print(f"ddp_hydra: {what}: type it again if they need it", file=sys.stderr)  # noqa: T201
    before = [word for word in (*of_hydra, *of_task) if not sets_variables(word)]
    kept, given = joined(before, given, keys)
    if typed:
        kept = []
    _refuse_hidden(kept, f"{saved.parent}: the sweep", given, where=" with the other words of the sweep")
    return [*kept, *given, f"hydra.sweep.dir={text.quoted(folders[0])}"]
