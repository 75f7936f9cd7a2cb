"""What `ddp_hydra.data` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ddp_hydra.data


def test_all_names_can_be_imported_and_others_are_refused():
    for name in ddp_hydra.data.__all__:
        assert getattr(ddp_hydra.data, name).__name__ == name
    with pytest.raises(AttributeError, match=r"module 'ddp_hydra\.data' has no attribute 'Photos'"):
        ddp_hydra.data.Photos  # noqa: B018


@pytest.mark.integration
def test_the_package_alone_imports_no_torch():
    code = "import sys, ddp_hydra.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
