"""Holds the code to the table of packages in docs/architecture.md."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("ddp_hydra", "models", "data", "hydra_plugins")


def table() -> list[tuple[str, ...]]:
    """The lines of the table, from the top down: the packages that each names."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = text.partition("```packages\n")[2].partition("```")[0].splitlines()
    return [tuple(line[:21].split()) for line in lines]


LEVEL = {name: level for level, names in enumerate(reversed(table())) for name in names}
MAY_IMPORT_DISTRIBUTED = ("cli", "compat", "sweep", "job", "dispatch", "cluster", "rank")
MAY_IMPORT_TORCH = ("training", "data", "tasks", "finetune")
TORCH_MODULES = (
    "ddp_hydra.rank.process",
    "ddp_hydra.rank.world",
    "ddp_hydra.rank.torchrun_store",
    "ddp_hydra.cli.export",
    "ddp_hydra.compat.dask_pytorch_ddp.data",
    "ddp_hydra.compat.wids",
)
"""Modules, and what is in them, that import torch in packages that otherwise do not."""


TEMPLATE = ROOT / "ddp_hydra" / "cli" / "template"
"""Files of a new project, which are not modules of ddp_hydra."""


def modules(package: str) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / package).rglob("*.py"))
        if TEMPLATE not in path.parents
    }


EVERY = {name: path for package in OURS for name, path in modules(package).items()}


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the modules that a file imports, anywhere in it."""
    return tuple(imports_of(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in EVERY else str(node.module)


def package(module: str) -> str:
    """`ddp_hydra.rank.task` -> `rank`."""
    return [*module.split("."), ""][1]


def test_the_table_names_every_package():
    assert {package(module) for module in modules("ddp_hydra")} - {"", "__main__"} == set(LEVEL)


@pytest.mark.medium
def test_imports_go_down():
    checked = [module for module in modules("ddp_hydra") if package(module) in LEVEL]
    assert len(checked) > 200
    assert {module: wrong for module in checked if (wrong := not_below(module))} == {}


def not_below(module: str) -> set[str]:
    """Return what a module imports of other packages that are not below its own."""
    own = package(module)
    others = {name for name in imports(EVERY[module]) if package(name) in LEVEL and name.startswith("ddp_hydra.")}
    return {name for name in others if package(name) != own and LEVEL[package(name)] >= LEVEL[own]}


def test_no_modules_import_each_other():
    graph = {name: set(imports(path)) & EVERY.keys() - {name} for name, path in EVERY.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize(
    ("root", "forbidden"),
    [
        ("ddp_hydra", {"models", "data", "hydra_plugins"}),
        ("models", {"data", "hydra_plugins"}),
        ("data", {"models", "hydra_plugins"}),
        ("hydra_plugins", {"models", "data"}),
    ],
)
def test_roots_that_do_not_know_each_other(root, forbidden):
    known = {module: {name.partition(".")[0] for name in imports(path)} for module, path in modules(root).items()}
    assert known
    assert {module: names & forbidden for module, names in known.items() if names & forbidden} == {}


TASKS = {"models.gan", "models.distillation"}
"""Modules of models/ that define a task or a callback."""


def test_models_know_nothing_of_ddp_hydra_but_where_they_define_a_task():
    found = {module for module, path in modules("models").items() if "ddp_hydra" in roots_of(path)}
    assert found == TASKS
    of_ours = {name for module in TASKS for name in imports(EVERY[module]) if name.startswith("ddp_hydra")}
    assert {".".join(name.split(".")[:2]) for name in of_ours} <= {"ddp_hydra.tasks", "ddp_hydra.training"}


def test_who_imports_distributed():
    found = {package(module) for module in modules("ddp_hydra") if "distributed" in roots_of(EVERY[module])}
    assert found <= set(MAY_IMPORT_DISTRIBUTED)


MAY_NAME_FILES_OF_TORCH = {"ddp_hydra.storage.manifest", "ddp_hydra.data.shards.tar_index"}
"""The names of checkpoints, and of files in a user's tars."""


@pytest.mark.medium
def test_one_module_knows_the_names_of_checkpoints():
    found = set()
    for name, path in EVERY.items():
        prose = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        texts = [node for node in nodes(path) if isinstance(node, ast.Constant) and id(node) not in prose]
        found |= {name for node in texts if isinstance(node.value, str) and re.search(r"\.pt\b", node.value)}
    assert found == MAY_NAME_FILES_OF_TORCH


WALKS = {"parameters", "named_parameters", "buffers", "named_buffers"}
MAY_WALK = {
    "builders": "parts of a task that no optimizer trains refuse gradients",
    "callbacks": "histograms of a user",
    "cost": "an outline without memory, and sizes of a transformer",
    "loss_state": "a loss with parameters",
    "optimizers": "the groups of an optimizer",
    "task_state": "the task's own modules",
    "train_step": "what DDP wraps, and a loss with parameters",
}
"""Modules of training/ that walk parameters or buffers outside of training/parallel, with the reason."""


def walks(path: Path) -> bool:
    calls = (node.func for node in nodes(path) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr in WALKS for called in calls)


def test_parallel_alone_walks_the_model():
    others = {name: path for name, path in modules("ddp_hydra").items() if ".training.parallel" not in name}
    found = {name for name, path in others.items() if ".training." in name and walks(path)}
    assert found == {f"ddp_hydra.training.{name}" for name in MAY_WALK}
    assert {name for name, path in others.items() if "torch.nn.parallel" in imports(path)} == set()


@pytest.mark.medium
def test_ddp_and_dp_are_known_in_their_own_files_only():
    wrappers = {"DistributedDataParallel", "DataParallel"}
    found = {name for name, path in modules("ddp_hydra").items() if wrappers & names_in(path)}
    assert found == {f"ddp_hydra.training.parallel.{name}" for name in ("ddp", "dp", "shared_memory")}


def names_in(path: Path) -> set[str]:
    return {node.id for node in nodes(path) if isinstance(node, ast.Name)}


SAME_NAME_ON_PURPOSE = {"MLP", "S3ImageFolder"}
"""A model of the starter and of a new project; a data set and the call of dask-pytorch-ddp."""


@pytest.mark.medium
def test_every_class_has_a_name_of_its_own():
    places = defaultdict(list)
    for root in OURS:
        for module, path in modules(root).items():
            for node in nodes(path):
                if isinstance(node, ast.ClassDef) and node.name not in SAME_NAME_ON_PURPOSE:
                    places[node.name].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def roots_of(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


@pytest.mark.integration
def test_the_client_imports_no_torch():
    free = [
        module
        for module in modules("ddp_hydra")
        if package(module) not in MAY_IMPORT_TORCH and not module.startswith(TORCH_MODULES)
    ]
    script = (
        "import importlib, json, sys\n"
        "guilty = None\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    guilty = guilty or (name if 'torch' in sys.modules else None)\n"
        "print(json.dumps(guilty))"
    )
    command = [sys.executable, "-c", script, *free, "hydra_plugins.ddp_hydra_plugins"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is None, f"{json.loads(done.stdout)} imports torch"
