"""Read the keys of all configs in conf/, with their defaults and comments: the page "Config keys" is made of them.

A comment at the top of a file describes the option. A comment behind a key, or in lines of its own before it, describes
the key. `# -- text` begins a section.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

KEY = re.compile(r"(?P<indent> *)(?P<key>[\w@./-]+):(?: +(?P<value>.*))?$")
"""A line with a key, without its comment."""
PACKAGES = {"data/base": "data", "results/loggers": "results.{option}", "transform": "data.train.transform"}
"""Where the keys of a group are, if not at the group's name."""
SHARED = {"data/base/image_set": "data.train"}
"""The same for single files."""


@dataclass
class Key:
    """Describe one key.

    Args:
        name: with dots, as it is typed.
        default: as the file has it.
        comment: what it does; empty if the file says nothing.
        section: title of its section, empty outside one.
    """

    name: str
    default: str
    comment: str
    section: str = ""


@dataclass
class Option:
    """Describe a config file.

    Args:
        group: its folder below conf/, empty for the main configs.
        name: its name, without .yaml.
        text: the comment at its top.
        target: the class or function that it builds, empty if there is none.
        includes: other options whose keys it takes over, as in its defaults list.
        keys: its own keys.
    """

    group: str
    name: str
    text: str = ""
    target: str = ""
    includes: list[str] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)


def split_comment(line: str) -> tuple[str, str]:
    """Return a line without its comment, and the comment without its `#`."""
    quote = ""
    for place, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and line[:place].rstrip(" [{,:(-") != line[:place].rstrip():
            quote = char
        elif char == "#" and (not line[:place] or line[place - 1] == " "):
            return line[:place].rstrip(), line[place + 1 :].strip()
    return line.rstrip(), ""


def package(group: str, option: str) -> str:
    """Return where the keys of an option are in the whole config."""
    return SHARED.get(f"{group}/{option}") or PACKAGES.get(group, group.replace("/", ".")).format(option=option)


class Reader:
    """Read one file, line by line."""

    def __init__(self, group: str, name: str) -> None:
        self.option = Option(group, name)
        self.prefix = package(group, name)
        self.parents: list[tuple[int, str]] = []
        self.waiting: list[str] = []
        self.section = ""
        self.at_top = True
        self.skip_above: int | None = None

    def read(self, text: str) -> Option:
        """Return the option that a file describes."""
        for line in text.splitlines():
            bare, comment = split_comment(line)
            if self.skip_above is not None and (not bare or len(line) - len(line.lstrip()) > self.skip_above):
                continue
            self.skip_above = None
            if bare.strip():
                self.key(bare, comment)
                self.at_top = False
            elif comment:
                self.comment(line, comment)
            else:
                self.end_of_block()
        return self.option

    def end_of_block(self) -> None:
        """End the comment at the top, or drop one that belongs to no key."""
        if self.at_top and self.waiting:
            self.option.text = " ".join(self.waiting)
        self.at_top = False
        self.waiting = []

    def comment(self, line: str, comment: str) -> None:
        """Take a line that is a comment only."""
        if comment.startswith("@package"):
            self.prefix = "" if "_global_" in comment else self.prefix
        elif comment.startswith("-- "):
            self.section = comment[3:]
        elif line.startswith(" " * 12) and self.option.keys and not self.waiting:
            self.option.keys[-1].comment += f" {comment}"
        else:
            self.waiting.append(comment)

    def key(self, bare: str, comment: str) -> None:
        """Take a line with a key, an item of a list, or an item of the defaults list."""
        if self.at_top:
            self.end_of_block()
        indent = len(bare) - len(bare.lstrip())
        while self.parents and self.parents[-1][0] >= indent and not bare.lstrip().startswith("- "):
            self.parents.pop()
        if self.parents and self.parents[0][1] == "defaults" and bare.lstrip().startswith("- "):
            self.option.includes.append(bare.strip()[2:])
            return
        match = KEY.match(bare)
        if match is None:
            if self.option.keys:  # an item of a list
                known = self.option.keys[-1].default
                self.option.keys[-1].default = f"{known}, {bare.strip()[2:]}" if known else bare.strip()[2:]
            return
        value = match["value"] or ""
        if value in ("|", ">"):
            self.skip_above, value = indent, "(text)"
        name = ".".join(filter(None, [self.prefix, *(name for _, name in self.parents), match["key"]]))
        if match["key"] == "_target_" and not self.parents:
            self.option.target = value
        elif match["key"] != "defaults" or self.parents:
            comments = [*self.waiting, *([comment] if comment else [])]
            self.option.keys.append(Key(name, value, " ".join(comments), self.section))
        if not value:
            self.parents.append((indent, match["key"]))
        self.waiting = []


def options(conf: Path) -> Iterator[Option]:
    """Yield all options below conf/, the main configs first."""
    for path in sorted(conf.rglob("*.yaml"), key=lambda path: (len(path.parent.parts), path)):
        group = path.parent.relative_to(conf).as_posix().strip(".")
        if not group.startswith("hydra/"):
            option = Reader(group, path.stem).read(path.read_text(encoding="utf-8"))
            option.keys = [key for key in option.keys if key.default or key.comment]
            yield option
