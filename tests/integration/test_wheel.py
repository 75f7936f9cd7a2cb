"""What a user installs: the wheel beside its dependencies, in folders without a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

import ddp_hydra

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
STARTER = ("conf", "models", "data")
PACKED = ("ddp_hydra", "hydra_plugins", "benchmarks", "docs", "tests", *STARTER)
TOP = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "CITATION.cff",
    "SECURITY.md",
    "mkdocs.yml",
)
SHORT = ("trainer.epochs=1", "trainer.threads=1")


def build(source: Path, out: Path, *options: str) -> Path:
    """Build what the options say, and return the file."""
    command = [sys.executable, "-m", "build", *options, "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Built from a copy, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in TOP:
        shutil.copy(ROOT / name, source / name)
    return build(source, tmp_path_factory.mktemp("sdist"), "--sdist")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built from the sdist, as an index or a distribution does."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build(source, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_the_framework_and_of_the_starter_and_no_other(names):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    packages = {name for name in tracked if name.startswith(("ddp_hydra/", "hydra_plugins/"))}
    starter = {f"ddp_hydra/starter/{name}" for name in tracked if name.startswith(tuple(f"{one}/" for one in STARTER))}
    assert names == packages | starter
    assert {"ddp_hydra/py.typed", "ddp_hydra/starter/conf/config.yaml", "ddp_hydra/cli/template/gitignore"} <= names


def test_the_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        parts = {
            name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name
        }
    assert "ddp-hydra = ddp_hydra.__main__:main" in parts["entry_points.txt"]
    assert f"\nVersion: {ddp_hydra.__version__}\n" in parts["METADATA"]
    assert "\nLicense-Expression: BSD-3-Clause\n" in parts["METADATA"]
    assert "Redistribution and use" in parts["LICENSE"]


def test_the_sdist_holds_what_its_tests_need(sdist):
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in tracked if not name.startswith(".")} <= held


def test_twine_accepts_both(sdist, wheel):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Installed:
    """An environment with the wheel and its dependencies, and a folder where commands are typed."""

    python: Path
    folder: Path

    def __call__(self, *words: str, **variables: str) -> str:
        """Run a command that has to succeed, and return what it printed."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DDP_HYDRA_PROJECT")}
        home = {"HOME": str(self.folder.parent / "home"), "COLUMNS": "200"}
        command = [str(self.python.parent / words[0]), *words[1:]]
        done = subprocess.run(
            command, cwd=self.folder, env={**kept, **home, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def at(self, name: str) -> Installed:
        """Return the same for another folder."""
        return Installed(self.python, self.folder / name)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Installed:
    """The dependencies are those of this environment, but its editable installation of the checkout is not seen."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    site.joinpath("dependencies.pth").write_text("\n".join({sysconfig.get_path("purelib"), *_paths()}))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", "--disable-pip-version-check", str(wheel)], check=True)
    (folder / "empty").mkdir()
    there = Installed(python, folder / "empty")
    assert Path(there("python", "-c", "import ddp_hydra; print(ddp_hydra.__file__)").strip()).is_relative_to(site)
    return there


def _paths() -> list[str]:
    """Return the folders of installed packages that this process imports from."""
    return [path for path in sys.path if path.endswith("site-packages")]


def test_an_empty_folder_is_enough_for_the_demo_and_for_evaluate(installed):
    there = installed.at("demo")
    there.folder.mkdir()
    there("ddp-hydra", "experiment=digits", *SHORT, "trainer.max_steps=2", "cluster.n_workers=1", "hydra.run.dir=run")
    assert "val/accuracy 0." in there("ddp-hydra", "evaluate", "run=run")
    assert sorted(path.name for path in there.folder.iterdir()) == ["run"]


@pytest.mark.slow
def test_a_new_project_trains_sweeps_and_passes_its_test(installed):
    installed("ddp-hydra", "init", "my_project")
    there = installed.at("my_project")
    there("ddp-hydra", "-m", "optimizer.lr=0.1,0.01", *SHORT, "hydra.sweep.dir=sweep")
    assert "optimizer.lr" in (there.folder / "sweep" / "sweep.md").read_text()
    assert "2 passed" in there("python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    # What ships can be chosen beside what is the project's own.
    (there.folder / "names.json").write_text('["rex", "bella", "max", "luna"]')
    words = ("data=pet_names", "data.source=names.json", "data.batch_size=4", "model=lstm", "cluster=inline")
    there("ddp-hydra", *words, *SHORT, "hydra.run.dir=names")
    assert len(there("ddp-hydra", "generate", "run=names", "n=3").splitlines()) <= 3


def test_configs_come_from_where_the_command_says(installed):
    there = installed.at("elsewhere")
    (there.folder / "more" / "model").mkdir(parents=True)
    (there.folder / "more" / "model" / "resnet18.yaml").write_text("_target_: models.mine.Net\n")
    (there.folder / "more" / "other.yaml").write_text("defaults:\n  - job\n  - _self_\nseed: 7\n")
    seed = ("--cfg", "job", "-p", "seed")
    assert there("ddp-hydra", "--config-dir", "more", "--config-name", "other", *seed).strip() == "7"
    model = ("--cfg", "job", "-p", "model._target_")
    assert there("ddp-hydra", "--config-dir=more", *model).strip() == "models.mine.Net"
    assert there("ddp-hydra", *model).strip() == "models.resnet.resnet18"
    own = there.folder / "project"
    (own / "conf").mkdir(parents=True)
    (own / "conf" / "config.yaml").write_text("defaults:\n  - job\n  - _self_\nseed: 8\n")
    assert there("ddp-hydra", *seed, DDP_HYDRA_PROJECT="project").strip() == "8"


EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        print(output.get("text") or output.get("data", {}).get("text/plain", ""))
"""


@pytest.mark.slow
def test_the_notebook_of_the_docs_runs_in_a_kernel(installed):
    there = installed.at("notebook")
    there.folder.mkdir()
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    shutil.copy(ROOT / "docs" / "notebook.ipynb", there.folder)
    path = f"{there.python.parent}{os.pathsep}{os.environ['PATH']}"
    temporary = there.folder / "temporary"
    temporary.mkdir()
    variables = {"PATH": path, "TMPDIR": str(temporary), "JUPYTER_PLATFORM_DIRS": "1"}
    said = there("python", "-W", "ignore", "-c", EXECUTE, "notebook.ipynb", **variables)
    for part in (
        "<Run outputs/",
        "val/accuracy",
        "tensor([[",
        "<Connection: 2 workers at tcp://127.0.0.1:",
        "'interrupted'",
    ):
        assert part in said
    assert "epoch 1/4  train/loss" in said  # a line of text: only the bar is a widget
    assert "go on with resume=outputs/" in said
    assert "\x1b" not in said


@pytest.mark.slow
def test_a_script_of_dask_pytorch_ddp_learns_names_and_makes_new_ones(installed):
    """Its results are in the user's own folder logs/, and the model is sent again after each epoch."""
    there = installed.at("script")
    there.folder.mkdir()
    shutil.copy(ROOT / "tests" / "integration" / "compat" / "pet_names.py", there.folder)
    assert there("python", "pet_names.py", "results").split()[:2] == ["names", "50"]
    for rank in (0, 1):
        files = [there.folder / "results" / "logs" / f"data_{rank}_{epoch}.json" for epoch in range(10)]
        losses = [json.loads(file.read_text())["loss"] for file in files]
        assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ddp-hydra", "attach", "--help"), "run="),
        pytest.param(("ddp-hydra", "evaluate", "--help"), "run=", marks=pytest.mark.slow),
        pytest.param(("ddp-hydra", "init", "--help"), "--minimal", marks=pytest.mark.slow),
        pytest.param(("ddp-hydra", "-sc", "install=bash"), "complete", marks=pytest.mark.slow),
        pytest.param(("python", "-m", "ddp_hydra.data.shards", "--help"), "shards", marks=pytest.mark.slow),
        (("python", "-m", "ddp_hydra", "--help"), "experiment: digit_tokens, digits"),
    ],
)
def test_every_command_answers_in_an_empty_folder(words, said, installed):
    assert said in installed(*words)
