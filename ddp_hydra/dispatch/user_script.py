"""Runs a training script unchanged on each rank of a gang."""

from __future__ import annotations

import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ddp_hydra.errors import ConfigError


@dataclass(frozen=True)
class Script:
    """A script that is sent as text.

    It gets the environment that torchrun would give it, and makes its process group itself, with
    `torch.distributed.init_process_group()`, Lightning, Accelerate or whatever it uses.

    Args:
        path: of the file on the client.
        text: of the file.
        args: for its `sys.argv`.
    """

    path: str
    text: str
    args: tuple[str, ...] = ()

    def __call__(self) -> None:
        """Run the script as `__main__`; run this host's file if it is the same. Exit code 0 means success."""
        with tempfile.TemporaryDirectory(prefix="ddp_hydra-") as folder:
            path = Path(self.path)
            if not self.is_here():
                path = Path(folder) / path.name
                path.write_text(self.text)
            sys.argv = [str(path), *self.args]
            sys.path.insert(0, str(path.parent))
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise

    def is_here(self) -> bool:
        """Return whether this host has the same file, and this user can read it."""
        try:
            return Path(self.path).read_text() == self.text
        except (OSError, ValueError):  # ValueError: it is no text
            return False


def script(path: str | Path, *args: object) -> Script:
    """Read a script, for `dispatch.run(client, dispatch.script("train.py", "--epochs", 2))`.

    Args:
        path: of the file. What it imports must be installed on the workers, or lie beside it there.
        args: its arguments.

    Raises:
        ConfigError: there is no such file.
    """
    file = Path(path).absolute()
    try:
        return Script(str(file), file.read_text(), tuple(map(str, args)))
    except OSError as error:
        raise ConfigError(
            f"the script {file} can't be read ({error.strerror}): give the path of a Python file"
        ) from None
