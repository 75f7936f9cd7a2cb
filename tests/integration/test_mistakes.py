"""Ordinary mistakes, with what is printed: docs/mistakes.md is what these tests find.

`WRITE_MISTAKES=1 python -m pytest tests/integration/test_mistakes.py` writes the page anew.
"""

from __future__ import annotations

import linecache
import os
import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest

import ddp_hydra
from ddp_hydra import dispatch
from ddp_hydra.cli import commands
from ddp_hydra.errors import DdpHydraError
from tests.integration.support.mistakes import CHAPTERS, Mistake

pytestmark = [pytest.mark.integration, pytest.mark.medium]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mistakes.md"
INTRO = """# Ordinary mistakes

What is printed for sixty ordinary mistakes. Where your own code has raised, its lines follow: they are left out here.

*`tests/integration/test_mistakes.py` makes the mistakes in a project of `ddp-hydra init`, and this page of what comes.*
"""
FRAME_OF_OURS = re.compile(r'File "[^"]*ddp_hydra/')
DAY = re.compile(r"\b20\d\d-\d\d-\d\d/")  # the folder of today's runs
NAMED_OPERATOR = re.compile(r"(?<=RuntimeError: )addmm: ")  # torch 2.15 names it, older versions don't
SENTENCE_ENDS = re.compile(r"(?<=[a-z\])'\"])[.?](?=\s+[A-Z])")


@pytest.fixture(scope="module")
def mark(tmp_path_factory) -> Path:
    """A file that each scheduler that is started makes."""
    folder = tmp_path_factory.mktemp("mark")
    (folder / "preload.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'started')!r}).touch()\n")
    return folder / "started"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    commands.write_project(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path / "project"))
    return tmp_path / "project"


@pytest.fixture
def print_of(cli, home, mark, client2):
    """Make a mistake, and return what is printed."""

    def command(mistake: Mistake) -> str:
        words = shlex.split(mistake.typed)
        is_other = words[0] in ("evaluate", "evalute")
        where = [] if is_other or mistake.is_early else ["cluster=inline"] * ("cluster=" not in mistake.typed)
        cli.folder, cli.project = home, home
        mark.unlink(missing_ok=True)
        ended = cli.run(*words, *where, DASK_DISTRIBUTED__SCHEDULER__PRELOAD=str(mark.with_name("preload.py")))
        assert ended.returncode in (1, 2), f"{mistake.typed}\n{ended.stdout}"
        assert not mark.exists(), f"{mistake.typed} started a cluster"
        return ended.stderr

    def python(mistake: Mistake) -> str:
        space = {"ddp_hydra": ddp_hydra, "dispatch": dispatch, "client": client2}
        linecache.cache["cell.py"] = len(mistake.typed), None, mistake.typed.splitlines(keepends=True), "cell.py"
        with pytest.raises(DdpHydraError) as caught:
            exec(compile(mistake.typed, "cell.py", "exec"), space)
        return f"{caught.type.__name__}: {caught.value}\n"

    def make(chapter: str, mistake: Mistake) -> str:
        for name, content in mistake.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(content)
        said = (python if chapter == "Notebooks and Python" else command)(mistake)
        for name in mistake.files:
            (home / name).unlink()
        shutil.rmtree(home / "outputs", ignore_errors=True)
        said = NAMED_OPERATOR.sub("", said).replace(f"{home}/", "").replace(str(home), ".")
        return DAY.sub("2026-11-28/", said).replace("127.0.0.1", "here").rstrip()

    return make


def shown(said: str) -> str:
    lines = said.partition("\n\n")[0].splitlines()
    return "\n".join(textwrap.fill(line, 118, break_on_hyphens=False) if line[:1] != " " else line for line in lines)


def section_of(chapter: str, made: list[tuple[Mistake, str]]) -> str:
    is_python = chapter == "Notebooks and Python"
    parts = [f"## {chapter}\n"]
    for mistake, said in made:
        parts.append(f"**{mistake.what}**\n")
        for name, content in mistake.files.items():
            parts.append(f"`{name}`:\n\n```{'python' if name.endswith('.py') else ''}\n{content.rstrip()}\n```\n")
        typed = mistake.typed if is_python else f"ddp-hydra {mistake.typed}"
        parts.append(f"```{'python' if is_python else ''}\n{typed}\n```\n")
        parts.append(f"```text\n{shown(said)}\n```\n")
    return "\n".join(parts)


def sections() -> dict[str, str]:
    """The page's sections, by their titles."""
    text = PAGE.read_text(encoding="utf-8")
    return {part.splitlines()[0]: f"## {part}" for part in text.split("\n## ")[1:]}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_ordinary_mistakes_are_answered_as_the_page_says(print_of, chapter):
    assert len(CHAPTERS[chapter]) == 10
    made = [(mistake, print_of(chapter, mistake)) for mistake in CHAPTERS[chapter]]
    section, found = section_of(chapter, made), sections()
    if "WRITE_MISTAKES" in os.environ:
        found[chapter] = section
        ordered = [found[name].rstrip() + "\n" for name in CHAPTERS if name in found]
        PAGE.write_text("\n".join([INTRO, *ordered]), encoding="utf-8")
    for mistake, said in made:
        sentences = said.partition("\n\n")[0]
        assert not FRAME_OF_OURS.search(said), said
        assert len(SENTENCE_ENDS.findall(sentences)) <= 2, said
        assert len(sentences.splitlines()) <= 2, said
        assert "attempt" not in said, f"it was tried again: {mistake.typed}"
    assert found.get(chapter, "").rstrip() == section.rstrip(), "WRITE_MISTAKES=1 writes the page anew"
