from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [
    # 1: what everything may use
    ("errors", "config", "versions", "words", "text", "objective", "redact", "stored", "keys"),
    # 2: pure parts
    (
        "placement", "outcome", "values", "samplers", "schedules", "metrics", "results", "checkpoint", "manifest",
        "project", "loader", "stopwatch", "data_report", "bound", "pulse", "faults", "agreement", "nonfinite",
        "restarts", "vitals", "roster", "processes", "losses", "book", "shipped", "probe", "options",
        "room", "run_dir", "targets", "tracebacks",
        "finite",
        "resize",
    ),
    # 3: on the worker; and what writes and reads results, wherever that is
    (
        "training", "insight", "rank_host", "rank", "script", "build", "buckets", "evaluate", "train", "trained",
        "generate", "dry_run", "writers", "bucket", "store", "mirror",
    ),
    # 4: on the client
    (
        "cluster", "clusters", "reservation", "needs", "transfer", "crew", "attempt", "reader", "interrupts",
        "output", "run_dir", "dispatch", "unread", "inline", "launched", "rehearsal",
    ),
    # 5: a job, many jobs, the command line
    ("job", "sweep", "shared", "driver", "attach", "arguments", "completion", "output", "cli", "__main__"),
]  # fmt: skip
"""As in DESIGN.md; `project` is on the second floor, for workers unpack what the client packs."""
FLOOR = {name: number for number, names in enumerate(FLOORS, start=1) for name in names}
OURS = ("ddp_hydra", "models", "data", "hydra_plugins")


def modules(package: str) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / package).rglob("*.py"))
    }


EVERY = {name: path for package in OURS for name, path in modules(package).items()}


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, anywhere but for type checkers and when run as a program."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and (
            "TYPE_CHECKING" in ast.unparse(node.test) or "__main__" in ast.unparse(node.test)
        ):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in EVERY else str(node.module)


def part(module: str) -> str:
    """`ddp_hydra.rank.task` -> `rank_host`."""
    return [*module.split("."), ""][1]


def test_imports_are_seen(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "import torch.nn\nfrom ddp_hydra import results, __version__\nfrom ddp_hydra.storage.files import place\n"
        "def f():\n    import data.images\n"
        "if TYPE_CHECKING:\n    import models\nelse:\n    import json\nif __name__ == '__main__':\n    import os\n"
    )
    assert sorted(imports(file)) == [
        "ddp_hydra.data.images", "ddp_hydra", "ddp_hydra.results", "ddp_hydra.storage.files", "json", "torch.nn",
    ]  # fmt: skip


def test_every_module_has_a_floor():
    assert {part(module) for module in modules("ddp_hydra")} - {""} == set(FLOOR)


@pytest.mark.parametrize("module", [module for module in modules("ddp_hydra") if part(module)])
def test_a_floor_knows_nothing_of_those_above(module):
    above = {
        name for name in imports(EVERY[module]) if name in EVERY and FLOOR.get(part(name), 0) > FLOOR[part(module)]
    }
    assert above == set()


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("ddp_hydra", {"models", "data", "hydra_plugins"}),
        ("models", {"ddp_hydra", "data", "hydra_plugins"}),
        ("data", {"ddp_hydra", "models", "hydra_plugins"}),
        ("hydra_plugins", {"models", "data"}),
    ],
)
def test_packages_that_do_not_know_each_other(package, others):
    known = {module: {name.partition(".")[0] for name in imports(path)} for module, path in modules(package).items()}
    assert known
    assert {module: names & others for module, names in known.items() if names & others} == {}


TORCH_FREE = sorted(
    module
    for module in modules("ddp_hydra")
    if FLOOR.get(part(module), 1) in (1, 4, 5)
    or part(module)
    in (
        "placement",
        "outcome",
        "values",
        "samplers",
        "results",
        "manifest",
        "project",
        "pulse",
        "faults",
        "restarts",
        "vitals",
        "options",
        "redact",
        "room",
        "rank_host",
        "writers",
        "bucket",
        "store",
        "mirror",
    )
)


@pytest.mark.integration
def test_the_client_side_imports_no_torch():
    assert {"ddp_hydra.cli", "ddp_hydra.rank.task", "ddp_hydra.writers.tensorboard"} <= set(TORCH_FREE)
    script = (
        "import importlib, json, sys\n"
        "guilty = None\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    guilty = guilty or (name if 'torch' in sys.modules else None)\n"
        "print(json.dumps(guilty))"
    )
    command = [sys.executable, "-c", script, *TORCH_FREE, "hydra_plugins.ddp_hydra_launcher"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) is None, f"{json.loads(told.stdout)} brings torch in"
