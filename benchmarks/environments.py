"""Python environments of peers that cannot live in ours: made once, below the checkout, and used again."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks import report
from benchmarks.commands import ROOT


def python(name: str, *requirements: str) -> str:
    """Return the interpreter of an environment with these packages; others, like torch, come from ours.

    Args:
        name: of the environment, in the folder `.venv-<name>`.
        requirements: as pip takes them. Other ones than the last time make the environment anew.
    """
    folder = ROOT / f".venv-{name}"
    interpreter, ready = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join([sys.executable, *requirements])
    if not ready.is_file() or ready.read_text() != wanted:
        report.progress(f"making {folder.name} with {', '.join(requirements)}")
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        # Ours comes last on the path, and without its own .pth files, so that our launcher is not found there. It comes
        # first in time, so that pip does not install another torch.
        theirs = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
        (theirs / "zz_ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _run(str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
        ready.write_text(wanted)
    return str(interpreter)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
