from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ddp_hydra.dispatch.torchrun_attempt import reason_of
from ddp_hydra.dispatch.torchrun_gang import outcome_of, write_error_file
from ddp_hydra.errors import ConfigError, Failure, Interrupted, RankFailed
from ddp_hydra.rank.torchrun_channel import Outcome


def test_a_failure_is_told_without_its_traceback():
    failure = Failure("raised", 3, "h", "ValueError: no", "Traceback ...", 12.5, step=7, place="models/mine.py:3")
    outcome = outcome_of(RankFailed("long", failure))
    assert outcome == Outcome("failed", 3, "rank 3 on h: ValueError: no (in step 7; models/mine.py:3)", 12.5)
    assert outcome.exit_code == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Interrupted("saved"), "interrupted", 130),
        (KeyboardInterrupt(), "interrupted", 130),
        (ConfigError("x"), "failed", 1),
    ],
)
def test_all_ranks_end_with_the_exit_code_of_the_job(error, status, code):
    assert (outcome_of(error).status, outcome_of(error).exit_code) == (status, code)
    assert Outcome("done").exit_code == 0


@pytest.mark.parametrize("data", [{}, {"status": ["done"], "rank": "3", "time_s": None, "message": 5}])
def test_an_outcome_that_nobody_understands_is_a_failure(data):
    assert Outcome.of(data).exit_code == 1


def test_torchrun_finds_the_earliest_failure_at_the_rank_that_caused_it(tmp_path, monkeypatch):
    outcome = Outcome("failed", 3, "rank 3 on h: ValueError: no", 12.9)
    told = {}
    for rank in (0, 3):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank)))
        write_error_file(rank, outcome)
        told[rank] = json.loads((tmp_path / str(rank)).read_text())["message"]
    assert told[3] == {"message": outcome.message, "extraInfo": {"py_callstack": outcome.message, "timestamp": "12"}}
    assert told[0]["message"] == "this rank was stopped, because rank 3 had failed: rank 3 on h: ValueError: no"
    assert told[0]["extraInfo"]["timestamp"] == "13"


def test_a_job_that_did_not_fail_has_no_error_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for status in ("done", "interrupted"):
        write_error_file(0, Outcome(status))
    assert not list(tmp_path.iterdir())


def test_sigterm_is_a_preemption():
    assert [reason_of(number) for number in (2, 15, 1)] == ["interrupt", "preemption", "interrupt"]


def test_a_rank_that_is_interrupted_at_its_very_start_runs_nothing_of_its_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nfrom ddp_hydra.dispatch.torchrun_gang import forked\n"
        "from ddp_hydra.rank.spec import RankSpec\n"
        "fork = os.fork\n"
        "def interrupted() -> int:\n"
        "    pid = fork()\n    if pid == 0:\n        os.kill(os.getpid(), signal.SIGINT)\n    return pid\n"
        "os.fork = interrupted\n"
        "try:\n"
        "    with forked(RankSpec(0, 1, 0, 1, 0, '', '127.0.0.1'), print) as task:\n"
        "        print('ended by', -os.waitid(os.P_PID, task.rank.pid, os.WEXITED | os.WNOWAIT).si_status)\n"
        "finally:\n    print('end of this process', flush=True)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("ended by -2\nend of this process\n", "")
