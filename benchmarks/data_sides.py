"""Starts the scripts of both sides of the data benchmark, each as a process of its own, and hears what it measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks import commands, environments
from benchmarks.commands import ROOT
from benchmarks.object_store import corpus
from ddp_hydra.rank.environment import ALLOCATOR

Result = dict[str, float]

# Without dependencies: torch, and what else ours has, is shared. litdata needs the middle line, wids the last one.
PACKAGES = (
    "--no-deps",
    *("boto3==1.*", "botocore==1.*", "s3transfer", "jmespath", "dask-pytorch-ddp==0.2.2"),
    *("s3torchconnector==1.5.0", "s3torchconnectorclient==1.5.0"),
    *("litdata==0.2.76", "lightning-utilities", "filelock", "tifffile", "zstd", "fsspec"),
    *("webdataset==0.2.111", "braceexpand"),
)
_LIMIT_S = 300
# Nobody's settings, proxies or roles: boto3 and its likes look for them in many places.
ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "no-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


class Sides:
    """Both sides; a folder for their caches, which the end of the `with` block removes."""

    def __init__(self) -> None:
        self.python = environments.python("data", *PACKAGES)
        self.folder = corpus.FOLDER / "caches"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def ours(self, part: str, *options: object) -> list[Result]:
        """Run a part of ours.

        Args:
            part: which, see `data_ours`.
            options: of the command.
        """
        return self.own("data_ours", part, *options)

    def own(self, module: str, *options: object) -> list[Result]:
        """Run a module of ours.

        Args:
            module: its name in this package.
            options: of the command.
        """
        command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, options)]
        with tempfile.TemporaryDirectory(dir=self.folder) as cache:
            return _hear(command, {"XDG_CACHE_HOME": cache, "TMPDIR": str(self.folder)})

    def peer(self, script: str, *options: object) -> list[Result]:
        """Run a script of `peers/` in the environment of the peers.

        Args:
            script: its file.
            options: of the command.
        """
        command = [self.python, str(ROOT / "benchmarks" / "peers" / script), *map(str, options)]
        return _hear(command, {"PYTHONPATH": "", "TMPDIR": str(self.folder)})


def _hear(command: list[str], variables: Mapping[str, str]) -> Any:
    """Run a command, and read the JSON of its last line."""
    environment = commands.with_ours({**ACCOUNT, **commands.ONE_THREAD, **ALLOCATOR, **variables})
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"{' '.join(command)}\ntook more than {_LIMIT_S} s")
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
