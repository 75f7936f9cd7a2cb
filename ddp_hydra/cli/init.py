"""`ddp-hydra init my_project`: write a project that trains at once, to be changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ddp_hydra.config import project
from ddp_hydra.errors import ConfigError

TEMPLATE = Path(__file__).parent / "template"
MAIN_CONFIG = "conf/config.yaml"


class Parser(argparse.ArgumentParser):
    """Raises what is wrong with the words, so that it is reported as all other mistakes."""

    def error(self, message: str) -> NoReturn:
        """Refuse the words."""
        raise ConfigError(f"{message}; type ddp-hydra init my_project, or ddp-hydra init --help")


def main(words: Sequence[str]) -> None:
    """Write a project into the folder that the command names."""
    parser = Parser(
        prog="ddp-hydra init",
        description="Write a project that trains at once: a model, a data set, configs, a test and a readme.",
    )
    parser.add_argument("folder", help="where to write it; nothing is overwritten")
    parser.add_argument("--minimal", action="store_true", help="write conf/config.yaml alone")
    given = parser.parse_args(words)
    write(Path(given.folder), given.minimal)
    where = "" if Path(given.folder).resolve() == Path.cwd() else f"cd {given.folder} && "
    print(f"{given.folder} has a project now. To train: {where}ddp-hydra")  # noqa: T201


def write(folder: Path, minimal: bool = False) -> None:
    """Write a project.

    Args:
        folder: where to; it may exist, but none of the files that are written.
        minimal: whether to write conf/config.yaml alone.

    Raises:
        ConfigError: a file is there already, or the folder can't be written.
    """
    if minimal:
        files = {MAIN_CONFIG: (project.starter() / MAIN_CONFIG).read_text(encoding="utf-8")}
    else:
        files = _template(folder.resolve().name)
    if there := [name for name in files if (folder / name).exists()]:
        raise ConfigError(
            f"{folder} has {', '.join(there[:3])}{' …' if there[3:] else ''} already, and nothing is overwritten: name "
            "another folder, ddp-hydra init <folder>"
        )
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written ({error.strerror}: {error.filename}): name another") from None


def _template(name: str) -> dict[str, str]:
    """Return the text of each file of the template, by its path in the project."""
    paths = [path for path in sorted(TEMPLATE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    texts = {path.relative_to(TEMPLATE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    texts[".gitignore"] = texts.pop("gitignore")
    texts["README.md"] = texts["README.md"].replace("{name}", name)
    return texts
