from __future__ import annotations

import os
import socket
import sys

import pytest

from ddp_hydra.rank import torchrun_rank
from ddp_hydra.rank.spec import RankSpec


class FullDisk:
    """An output that can't be written."""

    def write(self, text: str) -> None:
        raise OSError(28, "No space left on device")

    flush = write


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # torchrun's process has no threads yet
def test_a_rank_ends_also_where_its_output_cannot_be_written_instead_of_going_on_as_its_parent():
    parent, (here, control) = os.getpid(), socket.socketpair()
    read, write = os.pipe()
    with here, control:
        pid = os.fork()
        if pid == 0:
            try:
                sys.stdout = sys.stderr = FullDisk()
                torchrun_rank.main(RankSpec(0, 1, 0, 1, 0, "", ""), parent, control, write, 0)
            finally:
                os._exit(99)
        os.close(write)
        os.close(read)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
