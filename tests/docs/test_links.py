"""Links between pages as they are read in the checkout: README, CONTRIBUTING, docs. `make docs` checks anchors, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from docs.hooks.pages import from_the_root

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
GENERATED = ("docs/reference/config.md", "docs/reference/commands.md")
"""Pages that exist in the site only."""
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_link_leads_to_a_file(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target for target in LINK.findall(text) if not re.match(r"https?:|mailto:", target)]
    lost = [target for target in targets if not (page.parent / target).exists()]
    assert {str((page.parent / target).resolve().relative_to(ROOT)) for target in lost} <= set(GENERATED)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_readme_is_the_first_page_of_the_site():
    page = from_the_root("README.md")
    assert "](install.md)" in page
    assert "](project/changelog.md)" in page
    assert "](docs/" not in page
    assert "](../performance.md)" in from_the_root("CHANGELOG.md")


def test_each_page_is_in_the_navigation():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = set(re.findall(r"[\w/-]+\.md", str(nav)))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - listed == set(), "add it to nav of mkdocs.yml"


def test_each_moving_picture_is_recorded_by_the_script_and_shown_on_a_page():
    script = (ROOT / "docs" / "casts" / "record.py").read_text()
    recorded = set(re.findall(r'^    "(\w+)": Cast\(', script, re.MULTILINE))
    assert {path.stem for path in (ROOT / "docs" / "casts").glob("*.svg")} == recorded
    shown = set(re.findall(r"casts/(\w+)\.svg", "".join(page.read_text() for page in PAGES)))
    assert shown == recorded
