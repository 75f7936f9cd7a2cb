"""Read the code blocks of README and docs/: their commands, their Python, their YAML, and what is marked to be run.

A comment before a block says what the tests do with it:

    <!-- test: run -->             run its lines that start ddp_hydra; of Python, the whole block as a script
    <!-- test: run, not WORD -->   the same without lines that have this word
    <!-- test: run, in FOLDER -->  the same in a folder that an earlier block has made
    <!-- test: job, WORDS -->      run its commands in tests/docs/test_recipes.py, with more words
    <!-- test: python -->          run it as a script there
    <!-- test: file NAME -->       write it to a file, for the blocks below it on the page
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "mistakes.md"})]
"""All pages but docs/mistakes.md, which tests/integration/test_mistakes.py makes."""
FENCE = re.compile(r"(?:<!-- test: (?P<mark>.*?) -->\n *)?```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.M)
STARTS = (["ddp-hydra"], ["python", "-m", "ddp_hydra"])


@dataclass(frozen=True)
class Block:
    """Hold a code block.

    Args:
        page: its page, from the checkout's root.
        line: number of its first line.
        language: as it stands behind the fence; empty for commands and listings.
        text: what is in it.
        mark: what the comment before it says; empty without one.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        """Return the page and the line, as editors take them."""
        return f"{self.page}:{self.line}"

    def lines(self) -> list[str]:
        """Return its commands: continued lines as one, and only those behind a prompt if there are any."""
        lines = self.text.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        return prompted or [line.strip() for line in lines]

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command of ours, without the program's name."""
        if self.language:
            return
        for line in self.lines():
            if "ddp-hydra" not in line and "ddp_hydra" not in line:
                continue
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a listing
                continue
            for command in split(words, "&&"):
                if (arguments := after_program(command)) is not None:
                    yield arguments


def split(words: list[str], separator: str) -> Iterator[list[str]]:
    """Yield the parts between separators."""
    part: list[str] = []
    for word in words:
        if word == separator:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def after_program(words: list[str]) -> list[str] | None:
    """Return the arguments of a command of ours; None of another command."""
    if words[:1] == ["torchrun"] and "ddp_hydra" in words:
        return words[words.index("ddp_hydra") + 1 :]
    return next((words[len(start) :] for start in STARTS if words[: len(start)] == start), None)


def blocks() -> list[Block]:
    """Return all code blocks of all pages."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("text")) + 1
            content = textwrap.dedent(match["text"])
            found.append(
                Block(path.relative_to(ROOT).as_posix(), line, match["language"], content, match["mark"] or "")
            )
    return found
