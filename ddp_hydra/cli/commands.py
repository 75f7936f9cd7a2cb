"""The commands attach, init and warm, and how the words of small commands are read."""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.cli.resumed import OWN_CONFIGS
from ddp_hydra.config import project
from ddp_hydra.console import text
from ddp_hydra.console.text import printable
from ddp_hydra.errors import ConfigError, Interrupted
from ddp_hydra.job.remote.status import LOST_S
from ddp_hydra.rank import fork_client
from ddp_hydra.storage.files import new_folder, writing
from ddp_hydra.storage.run_ref import RunRef

ATTACH_USAGE = """ddp-hydra attach run=<URL or run directory> [stop=true] [lost_timeout_s=20]"""


@dataclass
class AttachOptions:
    """The options of this command.

    Args:
        run: URL of the results, or a run directory that points to them.
        stop: have the run save a checkpoint and end.
        lost_timeout_s: a driver that has not updated its status for so long is considered lost, in seconds.
    """

    run: str = MISSING
    stop: bool = False
    lost_timeout_s: float = LOST_S


def attach(words: Sequence[str]) -> None:
    from ddp_hydra.job.remote.client import Attached  # the other commands start without it

    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    options = parse_all(AttachOptions, words, ATTACH_USAGE)
    store = RunRef.named(options.run).store()
    attached = Attached(store, options.lost_timeout_s)
    try:
        attached.begin()
        if options.stop:
            attached.stop()
        attached.follow()
    except ConnectionError as error:
        raise ConfigError(f"{error}; the run does not need this command: try again later") from None
    except KeyboardInterrupt as error:
        if isinstance(error, Interrupted):
            raise
        run = shlex.quote(f"run={store.url}")
        raise Interrupted(f"the run goes on; to end it: ddp-hydra attach {run} stop=true") from None


TEMPLATE = Path(__file__).parent / "template"
MAIN_CONFIG = "conf/config.yaml"
INIT_USAGE = """ddp-hydra init <folder>             # a project that trains: a model, a data set, configs, a test
ddp-hydra init --minimal <folder>   # conf/config.yaml alone; nothing is overwritten in either case"""


def init(words: Sequence[str]) -> None:
    if {"-h", "--help"} & set(words):
        print(INIT_USAGE)  # noqa: T201
        return
    folders = [word for word in words if word != "--minimal"]
    if len(folders) != 1 or folders[0].startswith("-"):
        raise ConfigError(f"init {' '.join(words)}: give one folder, ddp-hydra init my_project")
    write_project(Path(folders[0]), "--minimal" in words)
    where = "" if Path(folders[0]).resolve() == Path.cwd() else f"cd {shlex.quote(folders[0])} && "
    print(f"{folders[0]} has a project now. To train: {where}ddp-hydra")  # noqa: T201


def write_project(folder: Path, minimal: bool = False) -> None:
    if minimal:
        files = {MAIN_CONFIG: (project.starter() / MAIN_CONFIG).read_text(encoding="utf-8")}
    else:
        files = _template(folder.resolve().name)
    if there := [name for name in files if (folder / name).exists()]:
        raise ConfigError(f"{folder} has {', '.join(there[:3])} already: name another folder, ddp-hydra init <folder>")
    written: list[Path] = []
    with contextlib.ExitStack() as folders:
        try:
            for path, text in ((folder.absolute() / name, text) for name, text in files.items()):
                folders.enter_context(new_folder(path.parent))
                with writing(path), path.open("x", encoding="utf-8") as file:
                    written.append(path)
                    file.write(text)
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise


def _template(name: str) -> dict[str, str]:
    paths = [path for path in sorted(TEMPLATE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    texts = {path.relative_to(TEMPLATE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    texts[".gitignore"] = texts.pop("gitignore")
    texts["README.md"] = texts["README.md"].replace("{name}", name)
    return texts


WARM_USAGE = """ddp-hydra warm          # the fork servers of this machine that have torch imported for the next job
ddp-hydra warm stop     # end them; one that has ranks ends after the last of them"""
STOP_S = 5.0
"""Seconds that a server without ranks may take to end."""


def warm(words: Sequence[str]) -> None:
    if {"-h", "--help"} & set(words):
        print(WARM_USAGE)  # noqa: T201
        return
    if list(words) not in ([], ["stop"]):
        raise ConfigError(f"warm {' '.join(words)}: give ddp-hydra warm, or ddp-hydra warm stop")
    found = {
        address: status for address in server_sockets() if (status := fork_client.ask(address, "status")) is not None
    }
    if not found:
        print("no fork server runs")  # noqa: T201
    for address, status in found.items():
        print(describe_server(status))  # noqa: T201
        if words:
            print(f"  {stop_server(address)}")  # noqa: T201


def server_sockets() -> list[Path]:
    with contextlib.suppress(OSError):  # there is none, or a server that ends removes it, or it is another's
        return sorted(path for path in fork_client.runtime_folder().iterdir() if path.suffix == ".sock")
    return []


def describe_server(status: dict[str, Any]) -> str:
    if not status:
        return "a fork server that does not answer: it is importing torch, or it is suspended"
    ends_in_s = status["ends_in_s"]
    use = (
        f"in use, {text.counted(status['ranks'], 'rank')}" if ends_in_s is None else f"idle, ends in {ends_in_s:.0f} s"
    )
    size = f"{status['memory'] / 2**20:.0f} MiB"
    return f"process {status['pid']}: {use}, {status['age_s']:.0f} s old, {size}, {status['python']}"


def stop_server(address: Path) -> str:
    status = fork_client.ask(address, "stop")
    if status and status["ends_in_s"] is None:
        return "ends after its last rank"
    deadline = time.monotonic() + STOP_S
    while fork_client.ask(address, "status") is not None:
        if time.monotonic() > deadline:
            return "has not ended yet"
        time.sleep(0.02)
    return "has ended"


T = TypeVar("T")


def parse(options: type[T], arguments: Sequence[str], usage: str, groups: Collection[str] = ()) -> tuple[T, list[str]]:
    """Return the options, and the other "key=value" words, which are overrides of the run's config.

    A text is taken as it was typed: YAML would make numbers of tag=1.10 and run=007.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)  # noqa: T201
        sys.exit(0)
    see = f"type {' '.join(usage.split()[:2])} --help"
    schema = OmegaConf.structured(options)
    keys = [str(key) for key in schema]
    for word in arguments:
        if word.startswith("-"):
            why = f"options of Hydra, as --config-dir, are for a training, and {OWN_CONFIGS}"
            raise ConfigError(f"{printable(word)}: leave it out: {why}; the keys are {', '.join(keys)}; {see}")
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{printable(word)!r} is not key=value: the keys are {', '.join(keys)}; {see}")
    own = [word for word in arguments if word.partition("=")[0] in keys]
    texts = {key for key, kind in get_type_hints(options).items() if kind in (str, str | None)}
    given: dict[str, Any] = {}
    for key, _, value in (word.partition("=") for word in own):
        parsed = value if key in texts else OmegaConf.from_dotlist([f"{key}={value}"])[key]
        given[key] = None if value in ("", "null") else parsed
    try:
        found = OmegaConf.to_object(OmegaConf.merge(schema, given))
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        if given.get(key) is not None:
            raise ConfigError(f"{key}={given[key]}: give {_WANTED[get_type_hints(options)[key]]}; {see}") from error
        wanted = re.search(rf"\b{key}=(<[^>]+>|'[^']+'|[^\]\s]+)", usage)
        near = "".join(text.meant(word.partition("=")[0], [key]) for word in arguments if word not in own)
        raise ConfigError(f"{wanted[0] if wanted else key} is missing{text.after(near, see)}") from error
    others = [word for word in arguments if word not in own]
    for word in others:
        if "." not in (key := word.lstrip("+~").partition("=")[0]) and key not in groups:
            and_groups = f", and the run's {', '.join(groups)}" if groups else ""
            listed = f"the keys are {', '.join(keys)}{and_groups}; {see}"
            raise ConfigError(
                f"{printable(word)}: there is no such key{text.after(text.meant(key, [*keys, *groups]), listed)}"
            )
    return cast("T", found), others


_WANTED: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list[int] | None: "whole numbers, [3,224,224]",
}


def parse_all(options: type[T], arguments: Sequence[str], usage: str) -> T:
    found, others = parse(options, arguments, usage)
    if others:
        raise ConfigError(f"{printable(others[0])}: there is no such key; the keys are {', '.join(vars(found))}")
    return found
