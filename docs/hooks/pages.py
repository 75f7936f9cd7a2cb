"""Write the pages of the site that are made from the program itself: config keys, and commands with their help."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_type_hints

from docs.hooks.config_keys import Key, Option, options, split_comment

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "ddp-hydra": "",
    "ddp-hydra evaluate": "evaluate",
    "ddp-hydra predict": "predict",
    "ddp-hydra generate": "generate",
    "ddp-hydra export": "export",
    "ddp-hydra attach": "attach",
    "ddp-hydra runs": "runs",
    "ddp-hydra warm": "warm",
    "ddp-hydra init": "init",
}
MODULES = {
    "python -m ddp_hydra.data.shards": "ddp_hydra.data.shards",
    "python -m ddp_hydra.compat.wids": "ddp_hydra.compat.wids",
}
CONFIG_INTRO = """# Config keys

*This page is made from the files and comments in `conf/` when the site is built. `ddp-hydra --cfg job` shows what a
command line composes to, and `ddp-hydra --help` lists the groups.*

- Choose an option of a group with `group=option`: `optimizer=adamw`.
- Change a key with `key=value`: `optimizer.lr=0.1`. Add one that is not listed with `+`: `+optimizer.maximize=true`.
- `???` is a key that you must give. `null` is no value; the text says what happens then.
- An option with *Builds* calls that class or function with its keys as arguments.

"""
COMMANDS_INTRO = """# Commands

*This page is made from each command's own `--help` when the site is built.* `ddp-hydra` and `python -m ddp_hydra` are
one program. It trains, unless its first word is one of the commands below.

"""


def config_page() -> str:
    """Return the page with all groups, options and keys."""
    found = list(options(ROOT / "conf"))
    types = schema_types()
    defaults = next(option for option in found if option.name == "job")
    parts = [CONFIG_INTRO, "## Groups\n\n", groups_table(found)]
    parts += ["## The job itself\n\n", keys_table([key for key in defaults.keys if key.name[:6] != "hydra."], types)]
    grouped = sorted((option for option in found if option.group), key=lambda option: option.group)
    for group, members in groupby(grouped, key=lambda option: option.group):
        parts.append(f"## {group}\n\n")
        parts += [option_text(option, types) for option in members]
    return "".join(parts)


def groups_table(found: list[Option]) -> str:
    """Return a table of all groups: what they are for, the default, and the options."""
    text = (ROOT / "conf/job.yaml").read_text() + (ROOT / "conf/config.yaml").read_text()
    rows = []
    for line in text.splitlines():
        bare, comment = split_comment(line)
        match = re.fullmatch(r"  - ([\w/]+): (\S+)", bare)
        if match and comment:
            names = [option.name for option in found if option.group == match[1]]
            choices = ", ".join(f"[`{name}`](#{anchor(match[1], name)})" for name in names)
            rows.append(f"| `{match[1]}` | {comment} | `{match[2]}` | {choices} |\n")
    return "| group | chooses | default | options |\n| --- | --- | --- | --- |\n" + "".join(rows) + "\n"


def anchor(group: str, name: str) -> str:
    """Return the anchor of an option's heading."""
    return f"{group}-{name}".replace("/", "-")


def option_text(option: Option, types: dict[str, str]) -> str:
    """Return the part of the page about one option."""
    parts = [f"### `{option.group}={option.name}` {{#{anchor(option.group, option.name)}}}\n\n"]
    if option.text:
        parts.append(f"{escaped(option.text)}\n\n")
    if option.target:
        parts.append(f"Builds `{option.target}`.\n\n")
    includes = [include for include in option.includes if include != "_self_" and not include.startswith("/base_")]
    if includes:
        parts.append("Takes over: " + ", ".join(f"`{include}`" for include in includes) + ".\n\n")
    keys = [key for key in option.keys if key.comment or "${" not in key.default]
    return "".join(parts) + keys_table(keys, types)


def keys_table(keys: list[Key], types: dict[str, str]) -> str:
    """Return a table of keys, with a row of its own for the title of each section."""
    if not keys:
        return ""
    parts = ["| key | default | meaning |\n| --- | --- | --- |\n"]
    section = ""
    for key in keys:
        if key.section != section:
            section = key.section
            parts.append(f"| **{escaped(section)}** | | |\n")
        meaning = escaped(key.comment)
        if key.name in types:
            meaning = f"*{types[key.name]}*{'; ' if meaning else ''}{meaning}"
        default = f"`{key.default}`".replace("|", "\\|") if key.default else ""
        parts.append(f"| `{key.name}` | {default} | {meaning} |\n")
    return "".join(parts) + "\n"


def escaped(text: str) -> str:
    """Return a comment as Markdown: what looks like code is set as code, and nothing is taken for HTML."""
    text = re.sub(r"(?<![`\w])((?:pip install '[^']+')|(?:[\w.+-]+=[^\s,;:()]+[^\s,;:().]))(?![`\w])", r"`\1`", text)
    pieces = re.split(r"(`[^`]*`)", text)
    for place, piece in enumerate(pieces):
        if not piece.startswith("`"):
            pieces[place] = re.sub(r"([<>*\[\]_])", r"\\\1", piece)
    return "".join(pieces).replace("|", "\\|")


def schema_types() -> dict[str, str]:
    """Return the type of each key that has one: {"trainer.epochs": "int or null"}."""
    from ddp_hydra.config import schema

    found: dict[str, str] = {}

    def add(cls: Any, prefix: str) -> None:
        for name, hint in get_type_hints(cls).items():
            if dataclasses.is_dataclass(hint):
                add(hint, f"{prefix}{name}.")
            elif hint is not Any:
                found[f"{prefix}{name}"] = type_text(hint)

    add(schema.Config, "")
    return found


def type_text(hint: Any) -> str:
    """Return a type in words."""
    members = [member for member in get_args(hint) if member is not type(None)]
    if members and type(None) in get_args(hint):
        return f"{type_text(members[0])} or null"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(member.name for member in hint)
    if get_args(hint):
        inner = get_args(hint)[0]
        return "list" if inner is Any else f"list of {type_text(inner)}"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[hint]


def commands_page() -> str:
    """Return the page with the help of all commands."""
    calls = {title: [sys.executable, "-m", "ddp_hydra", *([word] if word else [])] for title, word in COMMANDS.items()}
    calls |= {title: [sys.executable, "-m", module] for title, module in MODULES.items()}
    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = list(pool.map(help_of, calls.values()))
    parts = [COMMANDS_INTRO]
    for title, text in zip(calls, texts, strict=True):
        if title == "ddp-hydra":
            text = re.sub(
                r"== Keys: .*?(?=== Examples)", "== Keys: see the page Config keys ==\n…\n\n", text, flags=re.S
            )
        parts.append(f"## {title}\n\n```text\n{text.strip()}\n```\n\n")
    return "".join(parts)


def help_of(call: list[str]) -> str:
    """Return what a command prints with --help.

    Raises:
        RuntimeError: it fails.
    """
    env = {**os.environ, "COLUMNS": "110", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*call, "--help"], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(call)} --help ends with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def from_the_root(name: str) -> str:
    """Return a page of the checkout's root as a page of the site: links lead to other pages."""
    text = (ROOT / name).read_text(encoding="utf-8")
    below = "" if name == "README.md" else "../"
    text = re.sub(r"\]\(docs/([^)]+)\)", rf"]({below}\1)", text)
    for target in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        text = text.replace(f"]({target})", f"]({'project/' if not below else ''}{target.lower()})")
    return text.replace("](README.md)", "](../index.md)").replace(
        "](LICENSE)", "](https://opensource.org/license/bsd-3-clause)"
    )
