from __future__ import annotations

import os

import pytest

from ddp_hydra.training import inference


def test_variables_of_a_run_are_set_on_a_rank_where_it_has_none(monkeypatch):
    class NoCheckpointError(Exception):
        pass

    def send(*_):
        raise NoCheckpointError

    monkeypatch.setattr(inference.sharded_checkpoint, "send", send)
    for name in ("OF_THE_WORKER", "OF_THE_RUN"):
        monkeypatch.setenv(name, "own")
    monkeypatch.delenv("OF_THE_RUN")
    job = {"environment": {"OF_THE_WORKER": "run's", "OF_THE_RUN": "run's"}, "faults": []}
    with pytest.raises(NoCheckpointError), inference.opened(job, "last.pt", None):
        pass
    assert (os.environ["OF_THE_WORKER"], os.environ["OF_THE_RUN"]) == ("own", "run's")
