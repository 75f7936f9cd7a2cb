from __future__ import annotations

import os
import sys

import pytest

from ddp_hydra.rank.spare_forks import become_rank


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the fork server has no threads
def test_a_fork_that_cannot_become_a_rank_says_why_in_the_output_of_the_rank(tmp_path):
    read, write = os.pipe()
    request = {"affinity": None, "environment": {}, "cwd": str(tmp_path / "gone"), "path": sys.path}
    pid = os.fork()
    if pid == 0:
        sys.stderr = os.fdopen(2, "w", closefd=False)  # pytest has another
        become_rank(request, [write] * 3)
    os.close(write)
    with os.fdopen(read) as output:
        said = output.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/gone'" in said
