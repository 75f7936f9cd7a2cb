from __future__ import annotations

import subprocess
import sys

import pytest

READ = """
from msgspec import _utils, json

from ddp_hydra.data.shards.index import _Dataset
from ddp_hydra.rank.device_leases import Lease
from ddp_hydra.rank.spec import JobSpec, RankLaunch
from ddp_hydra.record import Record
from ddp_hydra.run_state import Status, Summary
from ddp_hydra.storage.manifest import Manifest


def refuse(obj):
    raise RuntimeError(f"{obj} is read when it is decoded")


_utils.get_class_annotations.__code__ = refuse.__code__
for kind in (Record, Summary, Status, Manifest, JobSpec, RankLaunch, Lease, _Dataset):
    json.Decoder(kind)
"""


@pytest.mark.medium
def test_what_threads_decode_is_read_as_its_module_is_imported():
    """Two threads that decode a struct for the first time crash the process: msgspec reads its annotations then."""
    subprocess.run([sys.executable, "-c", READ], check=True)
