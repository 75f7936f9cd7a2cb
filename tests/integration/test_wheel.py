"""What a user installs: the framework alone, for top-level models, data or conf would overwrite other people's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, so that the checkout stays clean."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("ddp_hydra", "hydra_plugins", "models", "data", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.iterdir()
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_the_framework_and_the_plugin_and_nothing_else(wheel):
    info = next(name for name in wheel.namelist() if name.endswith("/METADATA")).partition("/")[0]
    assert {name.partition("/")[0] for name in wheel.namelist()} == {"ddp_hydra", "hydra_plugins", info}


def test_the_wheel_holds_every_module_of_the_framework_and_says_that_it_is_typed(wheel):
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in ("ddp_hydra", "hydra_plugins")
        for path in (ROOT / package).rglob("*.py")
    }
    assert wanted | {"ddp_hydra/py.typed"} <= set(wheel.namelist())


def test_the_namespace_of_plugins_stays_open_to_others(wheel):
    assert "hydra_plugins/__init__.py" not in wheel.namelist()


def test_the_wheel_brings_the_command_and_the_version(wheel):
    read = {name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "ddp-hydra = ddp_hydra.__main__:main" in read["entry_points.txt"]
    import ddp_hydra

    assert f"\nVersion: {ddp_hydra.__version__}\n" in read["METADATA"]
