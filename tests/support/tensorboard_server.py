"""TensorBoard with our plugin on loopback, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = """
import sys
from tensorboard import default, program
from ddp_hydra.tensorboard.plugin import RunsPlugin
server = program.TensorBoard(plugins=[*default.get_static_plugins(), RunsPlugin])
server.configure(argv=[None, "--logdir", sys.argv[1], "--host", "127.0.0.1", "--port", "0", "--load_fast", "false"])
print(server.launch(), flush=True)
sys.stdin.read()
"""


@contextmanager
def serving(logdir: Path, cache: Path) -> Iterator[str]:
    """Start TensorBoard, and end it after the block.

    Args:
        logdir: of its `--logdir`.
        cache: the folder of the user's cache.

    Yields:
        Its address.
    """
    command = [sys.executable, "-c", SCRIPT, str(logdir)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with (cache.parent / "tensorboard.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), (cache.parent / "tensorboard.log").read_text()
        yield url
    finally:
        process.communicate()
