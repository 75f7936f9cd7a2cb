"""Resolves every text that names a module, an object or a file of ours: no import statement sees them."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, blocks

ROOT = Path(__file__).parents[1]
ROOTS = ("ddp_hydra", "data", "models", "hydra_plugins", "benchmarks")
DOTTED = re.compile(rf"(?<![\w./-])((?:{'|'.join(ROOTS)})(?:\.[A-Za-z_]\w*)+)(?::([A-Za-z_]\w*))?(?![\w/])")
FILE = re.compile(
    r"(?<![\w./-])((?:ddp_hydra|hydra_plugins|models|benchmarks|tests|docs|conf)/[\w/.-]*\.(?:py|md|yaml|png))"
)
IN_THE_RUN = ("data.", "models.")
"""Roots that are also the beginning of config keys: of these only `_target_`s are looked at."""
MADE_UP = re.compile(
    r"(conf/\w+|models|data)[./](mine|flowers|mlp|classifier|rings|moons|events|quantiles|watch|layerwise)\b"
)
"""Files of a user's own, in examples; those that a page writes are known without it."""
WRITTEN = tuple(
    name
    for path in (block.mark.removeprefix("file ") for block in blocks() if block.mark.startswith("file "))
    for name in (path, path.removesuffix(".py").replace("/", "."))
)


def texts() -> Iterator[tuple[str, str]]:
    """Yield (where, text): strings of the code, whole configs and pages."""
    for folder in ("ddp_hydra", "hydra_plugins", "models", "data", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for path in [*sorted((ROOT / "conf").rglob("*.yaml")), *PAGES]:
        yield str(path.relative_to(ROOT)), path.read_text()
    for name in ("CONTRIBUTING.md", "Makefile", "mkdocs.yml", "pyproject.toml"):
        yield name, (ROOT / name).read_text()


@functools.cache
def named() -> dict[str, list[str]]:
    """Return the places that name each "package.module", "package.module:name" and path."""
    places: dict[str, list[str]] = {}
    for where, what in pairs():
        if not MADE_UP.match(what) and not what.startswith(WRITTEN):
            places.setdefault(what, []).append(where)
    return places


def pairs() -> Iterator[tuple[str, str]]:
    """Yield (where, what is named)."""
    for where, text in texts():
        for match in DOTTED.finditer(text):
            begin = text[max(0, match.start() - 10) : match.start()]
            if not match[1].startswith(IN_THE_RUN) or begin.endswith("_target_: "):
                yield where, match[0]
        yield from ((where, match[1]) for match in FILE.finditer(text))


def exists(dotted: str) -> bool:
    """Whether a dotted name leads to a module, or from a module to an attribute of it."""
    path, _, name = dotted.partition(":")
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:count])
        if folder.with_suffix(".py").exists() or (folder / "__init__.py").exists():
            found = importlib.import_module(".".join(parts[:count]))
            for attribute in (*parts[count:], *filter(None, [name])):
                if not hasattr(found, attribute):
                    return False
                found = getattr(found, attribute)
            return True
    return False


@pytest.mark.medium
def test_all_that_is_named_exists():
    found = named().keys()
    assert {"ddp_hydra.training.loop:train", "ddp_hydra.rank.dask_preload", "ddp_hydra.rank.process"} <= found
    assert "ddp_hydra.data.transforms.TrainTransform" in found
    missing = {
        what: places
        for what, places in named().items()
        if not ((ROOT / what).exists() if "/" in what else exists(what))
    }
    assert missing == {}


def test_what_shows_that_a_rank_waits_for_others_is_a_file_of_ours():
    from ddp_hydra.dispatch.health import WAITS
    from ddp_hydra.training import consensus

    assert WAITS.search(consensus.__file__)


def test_all_that_the_fork_server_loads_of_ours_can_be_imported():
    from ddp_hydra.rank.fork_server import PRELOAD

    ours = [name for name in PRELOAD if name.startswith("ddp_hydra")]
    assert len(ours) == 3
    for name in ours:
        importlib.import_module(name)
