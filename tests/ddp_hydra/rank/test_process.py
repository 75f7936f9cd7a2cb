"""What a rank does by itself, in this process."""

from __future__ import annotations

import cloudpickle
import msgspec
import numpy as np
import torch

from ddp_hydra import heartbeat, results
from ddp_hydra.rank import process
from ddp_hydra.rank.world import ALONE
from tests.support.clocks import set_time


def test_a_rank_that_waits_for_room_in_its_spool_claims_progress_only_where_there_is_some(tmp_path, monkeypatch):
    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 50:  # the client takes a file, and the rank's other thread adds one
            (tmp_path / "0").rename(tmp_path / "new")
        if len(waited) == 100:
            (tmp_path / "1").unlink()

    waited = []
    set_time(monkeypatch, results, sleep=wait)
    heartbeat.connect(None)
    for number in range(results.MAX_FILES):
        (tmp_path / str(number)).touch()
    assert results.SocketSender(None, tmp_path).outbox == tmp_path
    assert (len(waited), heartbeat.here().ticks) == (100, 2)
    heartbeat.connect(None)


class Mute(Exception):
    def __str__(self):
        raise KeyError("no words")


def test_what_was_raised_is_told_within_bounds_also_by_an_error_that_cannot_say_what_it_is():
    failure = process.describe(ValueError("x" * 10_000_000))
    assert failure.message.startswith("ValueError: xxx")
    assert len(msgspec.json.encode(failure)) < 100_000
    assert len(msgspec.json.encode(process.describe(SystemExit("x" * 10_000_000)))) < 100_000
    assert process.describe(Mute()).message == "Mute: (its message is not available: Mute.__str__ raised KeyError)"
    assert process.describe(KeyError()).message == "KeyError"


def test_each_rank_draws_other_numbers_though_all_are_forks_of_one_process():
    """The state of both generators is the same before each call, as it is after a fork."""
    torch.manual_seed(1)
    np.random.seed(1)
    torchs, numpys = torch.get_rng_state(), np.random.get_state()
    call, drawn = cloudpickle.dumps((lambda: (torch.rand(1).item(), np.random.rand()), (), {})), []
    for _ in range(3):
        torch.set_rng_state(torchs)
        np.random.set_state(numpys)
        drawn.append(process.perform(call, ALONE))
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [3, 3]
