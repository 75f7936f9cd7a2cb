"""Runs a training script unchanged on each rank of a gang."""

from __future__ import annotations

import linecache
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ddp_hydra.errors import ConfigError


@dataclass(frozen=True)
class Script:
    """A script that is sent as it is in its file.

    It gets the environment that torchrun would give it, and makes its process group itself, with
    `torch.distributed.init_process_group()`, Lightning, Accelerate or whatever it uses.

    Args:
        path: of the file on the client.
        content: of the file.
        args: for its `sys.argv`.
    """

    path: str
    content: bytes
    args: tuple[str, ...] = ()

    def __call__(self) -> None:
        """Run the script as `__main__`, under its path, also where its file is edited meanwhile.

        A host without the file gets one in a temporary folder, for libraries that read it. Exit code 0 means success.
        """
        with ExitStack() as stack:
            path = Path(self.path)
            if not path.exists():
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp_hydra-"))) / path.name
                path.write_bytes(self.content)
            sys.argv = [str(path), *self.args]
            sys.path.insert(0, str(path.parent))
            try:
                self._run(str(path))
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise

    def _run(self, path: str) -> None:
        code = compile(self.content, path, "exec", dont_inherit=True)
        lines = self.content.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[path] = len(self.content), None, lines, path  # for tracebacks
        main, before = ModuleType("__main__"), sys.modules["__main__"]
        main.__file__ = path
        sys.modules["__main__"] = main
        try:
            exec(code, main.__dict__)  # noqa: S102, this is what it is for
        finally:
            sys.modules["__main__"] = before


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
        return Script(str(file), file.read_bytes(), tuple(map(str, args)))
    except OSError as error:
        raise ConfigError(
            f"the script {file} can't be read ({error.strerror}): give the path of a Python file"
        ) from None
