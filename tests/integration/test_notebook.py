"""The stop button of a real Jupyter kernel. The notebook of the documentation is run in test_wheel.py."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from ddp_hydra.api import Run
from ddp_hydra.cli import commands

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Jupyter's packages
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> Iterator[None]:
    """Kernels have their files below the test's folder, and no project of the environment."""
    for name in ("HOME", "TMPDIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    monkeypatch.delenv("DDP_HYDRA_PROJECT", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    return


@pytest.mark.slow
def test_the_stop_button_saves_a_checkpoint(kernel, tmp_path):
    commands.write_project(tmp_path / "project")
    cell = "import ddp_hydra\nrun = ddp_hydra.run(['trainer.epochs=100000', 'cluster=inline', 'hydra.run.dir=run'])"
    notebook = new_notebook(cells=[new_code_cell(cell)])
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path / "project")}})
    run_dir = tmp_path / "project" / "run"

    def press() -> None:
        while not (run_dir / "metrics.jsonl").exists():
            time.sleep(0.1)
        asyncio.run(client.km.interrupt_kernel())

    with client.setup_kernel():
        button = threading.Thread(target=press)
        button.start()
        with pytest.raises(Exception, match="go on with resume=run"):
            client.execute_cell(notebook.cells[0], 0)
        button.join()
    assert (run_dir / "checkpoints" / "last.pt").exists()


@pytest.mark.slow
def test_the_shutdown_of_a_kernel_stops_a_run_in_the_background(kernel, tmp_path):
    commands.write_project(tmp_path / "project")
    words = ["trainer.epochs=100000", "cluster.n_workers=1", "hydra.run.dir=run"]
    lines = [
        "import ddp_hydra, time",
        f"run = ddp_hydra.run({words!r}, wait=False)",
        "while not run.records():",
        "    assert not run.done(), run.wait()",
        "    time.sleep(0.05)",
    ]
    notebook = new_notebook(cells=[new_code_cell("\n".join(lines))])
    client = NotebookClient(
        notebook, timeout=200, shutdown_kernel="graceful", resources={"metadata": {"path": str(tmp_path / "project")}}
    )
    with client.setup_kernel():
        client.km.shutdown_wait_time = 200
        client.execute_cell(notebook.cells[0], 0)
    run = Run(tmp_path / "project" / "run")
    assert (run.status, run.summary["interrupted"]) == ("interrupted", "interrupt")
    assert (run.dir / "checkpoints" / "last.pt").exists()
