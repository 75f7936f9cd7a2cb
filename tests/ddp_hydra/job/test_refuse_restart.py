from __future__ import annotations

import pytest
from msgspec import convert

from ddp_hydra.errors import DdpHydraError, Interrupted
from ddp_hydra.job import run
from ddp_hydra.rank import torchrun
from ddp_hydra.run_state import Summary


@pytest.fixture
def refuse(monkeypatch, tmp_path):
    def refuse(**summary: object) -> None:
        monkeypatch.setattr(torchrun, "remembered", lambda: tmp_path)
        monkeypatch.setattr(run, "read_summary", lambda folder: convert({"status": "failed", **summary}, Summary))
        run.refuse_restart(tmp_path)

    return refuse


def test_what_has_failed_for_good_or_ended_on_purpose_stays_ended(refuse):
    with pytest.raises(DdpHydraError, match="rank 1 on h: no: torchrun has started it again, but its own attempts are"):
        refuse(failure={"kind": "raised", "rank": 1, "host": "h", "message": "no"})
    with pytest.raises(Interrupted, match=r"time_limit_s is up; saved at step 5: torchrun has started it again"):
        refuse(interrupted="time_limit", steps=5)


def test_what_was_interrupted_or_has_lost_a_host_goes_on(refuse, tmp_path):
    refuse()
    refuse(interrupted="interrupt", steps=5)
    refuse(failure={"kind": "lost", "rank": 1, "host": "h", "message": "no"})


def test_only_a_job_of_this_torchrun_is_refused(refuse, tmp_path, monkeypatch):
    refuse()
    monkeypatch.setattr(
        run, "read_summary", lambda folder: convert({"status": "failed", "failure": {"kind": "raised"}}, Summary)
    )
    run.refuse_restart(tmp_path / "other")
