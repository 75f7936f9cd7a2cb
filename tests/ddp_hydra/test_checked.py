from __future__ import annotations

import subprocess
import sys

import pytest

READ = """
from msgspec import _utils, json

from {module} import {names}


def refuse(obj):
    raise RuntimeError("read when it is decoded")


_utils.get_class_annotations.__code__ = refuse.__code__
for kind in ({names},):
    json.Decoder(kind)
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("ddp_hydra.record", "Record"),
        ("ddp_hydra.run_state", "Summary, Status"),
        ("ddp_hydra.storage.manifest", "Manifest"),
        ("ddp_hydra.rank.spec", "JobSpec, RankLaunch"),
        ("ddp_hydra.rank.device_leases", "Lease"),
        ("ddp_hydra.data.shards.index", "_Dataset"),
    ],
)
def test_what_threads_decode_is_read_as_its_module_is_imported(module, names):
    """Two threads that decode a struct for the first time crash the process: msgspec reads its annotations then."""
    subprocess.run([sys.executable, "-c", READ.format(module=module, names=names)], check=True)
