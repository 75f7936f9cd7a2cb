from __future__ import annotations

from typing import Any

import pytest
from msgspec import convert

from ddp_hydra.errors import DdpHydraError, Interrupted
from ddp_hydra.job.torchrun import refuse_restart
from ddp_hydra.run_state import Summary


def failed(message: str = "RuntimeError: no", step: int = 3, kind: str = "raised") -> dict[str, Any]:
    return {"failure": {"kind": kind, "rank": 1, "host": "h", "message": message, "step": step}}


def test_what_fails_twice_alike_is_not_tried_again():
    said = "rank 1 on h: RuntimeError: at 0xf2: the same failure in step 3 in two attempts running: it was not tried"
    attempts = [failed("RuntimeError: at 0xa1"), failed("RuntimeError: at 0xf2")]
    with pytest.raises(DdpHydraError, match=said):
        refuse_restart(convert({"attempts": attempts}, Summary), 2)
    refuse_restart(convert({"attempts": attempts}, Summary), 1)  # the first is of an earlier job in this run directory


@pytest.mark.parametrize(
    "attempts",
    [
        [],
        [failed()],
        [failed(), failed(step=4)],
        [failed(), failed("ValueError: no")],
        [failed(kind="lost"), failed(kind="lost")],
        [{"failure": None}, {}],
    ],
)
def test_other_failures_are_tried_again(attempts):
    refuse_restart(convert({"attempts": attempts}, Summary), 2)


def test_what_has_ended_on_purpose_stays_ended():
    with pytest.raises(Interrupted, match=r"time_limit_s is up; saved at step 5: torchrun has started it again"):
        refuse_restart(Summary(interrupted="time_limit", steps=5), 1)
    refuse_restart(Summary(interrupted="preemption", steps=5), 1)
