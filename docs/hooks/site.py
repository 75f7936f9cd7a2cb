"""Hooks of mkdocs: add the pages that are not files below docs/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.hooks import pages

GENERATED = {
    "index.md": lambda: pages.from_the_root("README.md"),
    "reference/config.md": pages.config_page,
    "reference/commands.md": pages.commands_page,
    "project/changelog.md": lambda: pages.from_the_root("CHANGELOG.md"),
    "project/contributing.md": lambda: pages.from_the_root("CONTRIBUTING.md"),
    "project/security.md": lambda: pages.from_the_root("SECURITY.md"),
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are generated, and the pages of the checkout's root."""
    for name, text in GENERATED.items():
        files.append(File.generated(config, name, content=text()))
    return files
