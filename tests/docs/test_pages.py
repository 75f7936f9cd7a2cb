"""The pages of the site that are made from the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import ddp_hydra
from ddp_hydra.cli import commands
from ddp_hydra.cli.main import COMMANDS
from ddp_hydra.data.images.decode import IMAGE_EXTENSIONS
from docs.hooks import config_keys, pages

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = {(option.group, option.name): option for option in config_keys.options(CONF)}


def leaves(node: Any, prefix: str) -> set[str]:
    """Return the names of all keys below a node, other than its own class."""
    if not isinstance(node, dict) or not node:
        return {prefix}
    found = set()
    for key, value in node.items():
        if key != "defaults":
            found |= leaves(value, f"{prefix}.{key}" if prefix else key)
    return found


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.relative_to(CONF).as_posix())
def test_each_key_of_each_config_is_found_with_its_value(path):
    group = path.parent.relative_to(CONF).as_posix().strip(".")
    if group.startswith("hydra/"):
        assert (group, path.stem) not in OPTIONS
        return
    content = yaml.safe_load(path.read_text())
    is_global = "@package _global_" in path.read_text()
    option = OPTIONS[group, path.stem]
    prefix = "" if is_global else config_keys.package(group, path.stem)
    wanted = leaves(content, prefix) - {f"{prefix}._target_", prefix} if content else set()
    inline = tuple(f"{key.name}." for key in option.keys if key.default.startswith("{"))
    missing = wanted - {key.name for key in option.keys}
    assert not {name for name in missing if not name.startswith(inline)}
    assert ("_target_" in (content or {})) == bool(option.target)


def test_comments_are_those_of_the_files():
    keys = {key.name: key for key in OPTIONS["trainer", "default"].keys}
    assert keys["trainer.clip_norm"].comment == "longest gradient, as the norm over all parameters; null: no limit"
    assert keys["trainer.clip_norm"].section == "the optimizer's step"
    assert OPTIONS["dispatch", "default"].text == "How the gang is placed, watched and restarted."
    warm_for = next(key for key in OPTIONS["dispatch", "default"].keys if key.name == "dispatch.keep_warm_s")
    assert "for the next job; 0: not at all; null: 300 on this machine's own cluster (or" in warm_for.comment
    assert warm_for.comment.endswith("else 0; see docs/clusters.md")
    source = next(key for key in OPTIONS["data", "pet_names"].keys if key.name == "data.source")
    assert source.comment == "JSON list of lower-case names: URL, path or s3://bucket/key"
    faults = next(key for key in OPTIONS["debug", "faults"].keys if key.name == "faults")
    assert faults.default.startswith("kill,rank=1,step=8, worker,")


def test_the_page_has_each_option_and_the_types_of_the_schema():
    page = pages.config_page()
    for group, name in OPTIONS:
        assert not group or f"### `{group}={name}` {{#{pages.anchor(group, name)}}}" in page
    assert "| `trainer.precision` | `fp32` | *fp32, tf32, bf16, fp16, fp8*; tf32 (matrix products" in page
    assert "| `trainer.max_steps` | `null` | *whole number or null*; optimizer steps; null: only epochs count |" in page
    assert "| `seed` | `0` | *whole number*; seed of all random numbers |" in page
    assert "hydra.help" not in page


def test_the_page_of_commands_has_each_of_them():
    assert {word for word in pages.COMMANDS.values() if word} == set(COMMANDS)


def test_each_command_has_a_help(capsys):
    commands.warm(["--help"])
    assert capsys.readouterr().out.startswith("ddp-hydra warm ")


@pytest.mark.slow
def test_the_help_of_each_command():
    page = pages.commands_page()
    for title in (*pages.COMMANDS, *pages.MODULES):
        assert f"## {title}\n\n```text\n" in page


def test_the_citation_names_this_version():
    cited = yaml.safe_load((CONF.parent / "CITATION.cff").read_text())
    assert cited["version"] == ddp_hydra.__version__


def test_the_page_of_data_names_the_images_that_torchvision_leaves_out():
    folder = pytest.importorskip("torchvision.datasets.folder")
    (line,) = (
        line for line in (CONF.parent / "docs/data.md").read_text().split("\n- ") if "torchvision leaves" in line
    )
    assert set(re.findall(r"`(\.\w+)`", line)) == (IMAGE_EXTENSIONS | {".avif"}) - set(folder.IMG_EXTENSIONS)
    assert set(folder.IMG_EXTENSIONS) <= IMAGE_EXTENSIONS
