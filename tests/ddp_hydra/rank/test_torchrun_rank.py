from __future__ import annotations

import os
import socket
import sys

import msgspec
import pytest

from ddp_hydra import heartbeat
from ddp_hydra.data.workers import helper
from ddp_hydra.rank import process, torchrun_rank
from ddp_hydra.rank.spec import GangSettings, JobSpec, RankSpec, TorchrunLaunch
from ddp_hydra.rank.torchrun_meeting import Choices


class FullDisk:
    """An output that can't be written."""

    def write(self, text: str) -> None:
        raise OSError(28, "No space left on device")

    flush = write


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_rank_takes_the_helper_of_its_workers_before_it_has_threads():
    """So their progress within a batch reaches the page that the parent watches."""
    spec = RankSpec(0, 1, 0, 1, 0, "", "")
    job = JobSpec(gang="g", attempt=0, ranks=(spec,), settings=GangSettings(data_workers=2))
    here, control = socket.socketpair()
    with here, control:
        pid = os.fork()
        if pid == 0:
            try:
                here.close()
                process.report_end = lambda work: 7 if helper._current and helper._current.owner == os.getpid() else 8
                status = heartbeat.SharedStatus(bytearray(128))
                os._exit(torchrun_rank.run(spec, control, status))
            finally:
                os._exit(99)
        control.close()
        here.sendall(msgspec.json.encode(TorchrunLaunch(job=job, outbox="")) + b"\n")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


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


def test_a_rank_reads_the_switches_and_numbers_that_a_restart_changes():
    changed = {"trainer.gradient_accumulation_steps": 2, "parallel.static_graph": False}
    spec = RankSpec(0, 1, 0, 1, 0, "", "")
    launch = TorchrunLaunch(job=JobSpec(gang="g", attempt=1, ranks=(spec,)), outbox="", numbers=changed)
    assert msgspec.json.decode(msgspec.json.encode(launch), type=TorchrunLaunch).numbers == changed
    choices = Choices(numbers=changed)
    assert msgspec.json.decode(msgspec.json.encode(choices), type=Choices).numbers == changed
