"""Commands, keys, Python and YAML of README and docs/: commands are composed, and blocks that are marked are run."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from ddp_hydra import dispatch, results
from ddp_hydra.cli.compose import with_faults
from ddp_hydra.cli.main import COMMANDS
from ddp_hydra.config import schema, unknown_keys
from ddp_hydra.config.hydra_compat import VERSION_BASE
from docs.hooks import config_keys
from tests.docs.blocks import PAGES, ROOT, Block, blocks

BLOCKS = blocks()
MADE_UP = re.compile(
    r"(model|data|task|cluster|optimizer|[\w@.]*transform)="
    r"(mine|flowers|classifier|rings|moons|events|quantiles|two|two_rates|two_parts)$"
    r"|(model|data\.\w+)\.(centres|inputs|_target_)=|optimizer.body_lr="
)
"""Options and keys of a user's own, in examples."""
FLAGS = ("-m", "--multirun", "--help", "--cfg", "job", "-sc", "install=bash")
KEY = re.compile(r"(?<![\w/.+-])((?:trainer|dispatch|results|objective|sampler|scheduler|parallel|cluster|data)"
                 r"\.[a-z_]\w*(?:\.\w+)*)(?:=|`)")  # fmt: skip
"""Keys in the text of a page."""
CALLS = {*(f"dispatch.{name}" for name in dispatch.__all__), *(f"results.{name}" for name in vars(results))}
"""What looks like a key and is a function."""
OF_OTHERS = {"trainer.devices", "trainer.max_epochs"}
"""Keys of lightning-hydra-template."""
KNOWN = {key.name for option in config_keys.options(ROOT / "conf") for key in option.keys}


def ids(block: Block) -> str:
    return block.where


def plain(word: str) -> str:
    """Return an override with values in place of what a reader has to fill in."""
    return re.sub(r"<[^<>]+>", "x", word).replace("…", "x")


def single(word: str) -> str:
    """Return the override of one job of a sweep."""
    override = OverridesParser.create().parse_override(word)
    if not override.is_sweep_override():
        return word
    if override.is_choice_sweep():
        return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"
    return f"{override.get_key_element()}=1"


def jobs() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (where, overrides) of each different command that trains."""
    seen = set()
    for block in BLOCKS:
        for words in block.commands():
            if words[:1] and words[0] in COMMANDS:
                continue
            kept = [plain(word) for word in words if word not in (*FLAGS, "…") and not MADE_UP.match(word)]
            if kept and tuple(kept) not in seen:
                seen.add(tuple(kept))
                yield block.where, tuple(kept)


def test_there_are_many():
    assert len(list(jobs())) > 60
    assert len([block for block in BLOCKS if block.language == "python"]) > 15
    assert {block.page for block in BLOCKS if block.mark} >= {"README.md", "docs/coming-from/torchrun.md"}


@pytest.fixture(scope="module")
def hydra_here() -> Iterator[None]:
    schema.register()
    with initialize_config_dir(str(ROOT / "conf"), **VERSION_BASE):
        yield


def test_the_words_of_each_command_are_options_and_keys():
    """Cheap; the next test composes them."""
    options = {f"{option.group}={option.name}" for option in config_keys.options(ROOT / "conf")}
    groups = {option.partition("=")[0] for option in options}
    for where, words in jobs():
        for key, _, value in (word.partition("=") for word in words):
            if key in groups:
                chosen = value.strip("[]").split(",") if key != "hparams_search" else [value]
                assert {f"{key}={name}" for name in chosen} <= options, (where, key, value)
            elif "." in key and not key.startswith(("+", "hydra.", "data.sets.")):
                assert key in KNOWN or any(name.startswith(f"{key}.") for name in KNOWN), (where, key)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.medium if page == "README.md" else pytest.mark.slow)
        for page in sorted({where.partition(":")[0] for where, _ in jobs()})
    ],
)
def test_each_command_composes(hydra_here, page):
    for where, words in jobs():
        if where.partition(":")[0] != page:
            continue
        try:
            typed = [single(word) for word in with_faults(list(words))]
            cfg = compose("config", overrides=typed, return_hydra_config=True)
            unknown_keys.check(OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]))
        except Exception as error:
            error.add_note(f"{where}: {' '.join(words)}")
            raise


@functools.cache
def usage(command: str) -> str:
    """Return the usage of a command, without importing it."""
    tree = ast.parse((ROOT / f"ddp_hydra/cli/{COMMANDS[command].partition('.')[0]}.py").read_text())
    names = ("USAGE", f"{command.upper()}_USAGE")
    texts = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.targets[0].id in names
    ]
    return texts[0] if texts else "ddp-hydra init <folder> --minimal"


def test_each_other_command_takes_its_words():
    for block in BLOCKS:
        for command, *words in filter(None, block.commands()):
            if command not in COMMANDS:
                continue
            if command in ("runs", "warm"):
                assert not words or f"ddp-hydra {command} {words[0]}" in usage(command), block.where
                continue
            for word in words:
                key = word.partition("=")[0]
                is_of_config = "." in key or key in ("data", "cluster", "metrics")
                known = is_of_config or word == "…" or f"{key}=" in usage(command) or command == "init"
                assert known, f"{block.where}: {command} {word}"


def test_each_make_target_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = re.findall(r"^make ([\w-]+)|`make ([\w-]+)", page.read_text(), re.MULTILINE)
        assert {first or second for first, second in named} <= targets, page


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_key_exists(page):
    found = set(KEY.findall(page.read_text())) - CALLS - OF_OTHERS - KNOWN
    found = {key for key in found if not key.startswith("data.sets.")}  # sets of a mixture have names of the user's
    assert {key for key in found if not any(name.startswith(f"{key}.") for name in KNOWN)} == set()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=ids)
def test_python_compiles(block):
    compile(block.text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=ids)
def test_yaml_is_yaml(block):
    assert yaml.safe_load(block.text)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.mark.startswith("run")}))
@pytest.mark.integration
@pytest.mark.slow
def test_marked_blocks_run(page, tmp_path, monkeypatch):
    """As a reader would, in an empty folder, one block after the other."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, call in (("ddp-hydra", f"{sys.executable} -m ddp_hydra"), ("python", sys.executable)):
        (programs / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("DDP_HYDRA_PROJECT", raising=False)
    folder = tmp_path / "folder"
    folder.mkdir()
    for block in BLOCKS:
        if block.page != page:
            continue
        if block.mark.startswith("file "):
            path = folder / block.mark.removeprefix("file ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.mark.startswith("run"):
            place = folder / block.mark.partition(" in ")[2]
            for call in calls(block, folder):
                done = subprocess.run(call, cwd=place, capture_output=True, text=True, timeout=300, check=False)
                assert done.returncode == 0, f"{block.where}: {call}\n{done.stdout}{done.stderr}"
    check_names_in_files(folder)


def check_names_in_files(folder: Path) -> None:
    """Compare the names in the files of all runs below a folder with those that the reference lists."""
    pages = {name: (ROOT / f"docs/reference/{name}.md").read_text() for name in ("metrics", "files")}
    listed = {name: set(re.findall(r"`([\w/]+)`", text)) for name, text in pages.items()}
    for summary in folder.rglob("summary.json"):
        assert set(json.loads(summary.read_text())) <= listed["files"]
        for line in (summary.parent / "metrics.jsonl").read_text().splitlines():
            assert set(json.loads(line)) <= listed["metrics"]
        manifest = json.loads((summary.parent / "checkpoints/manifest.json").read_text())
        for entry in manifest["checkpoints"].values():
            assert {*manifest, *entry, *(key for part in entry["parts"] for key in part)} <= listed["files"]


def calls(block: Block, folder: Path) -> Iterator[list[str]]:
    """Yield the processes that run a marked block."""
    if block.language == "python":
        script = folder / f"block_{block.line}.py"
        script.write_text(block.text)
        yield [sys.executable, str(script)]
        return
    left_out = block.mark.partition("not ")[2]
    for line in block.lines():
        is_ours = line.startswith(("ddp-hydra", "python -m ddp_hydra"))
        if is_ours and not re.search("[<…]", line) and not (left_out and left_out in line):
            yield ["bash", "-euc", line]
