"""What a job is described by, on its way from the client to the ranks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from ddp_hydra.config.project import Project
from ddp_hydra.dispatch import Gang
from ddp_hydra.errors import ConfigError
from ddp_hydra.rank.spec import FORMAT, GangSettings, JobSpec, RankSpec

JOB = JobSpec(
    gang="g",
    attempt=2,
    ranks=(RankSpec(0, 1, 0, 1, 0, "tcp://h:1", "h"),),
    call=b"\0call",
    project=Project("ab", b"zip"),
    settings=GangSettings(port_range=(1, 2), pip=("x",)),
    ranks_on_host={"h": 3},
)


def test_a_job_arrives_as_it_was_sent():
    assert JobSpec.decode(JOB.encode()) == JOB
    assert (JOB.topic, msgspec.structs.replace(JOB, attempt=0).topic) == ("g-2", "g")


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (
            msgspec.msgpack.encode({"format": FORMAT + 1, "version": "9.1", "other": 1}),
            f"9.1.*format {FORMAT + 1}",
        ),
        (b"\x80\x05pickle", "unknown version"),
        (JOB.encode()[:-9], "of an unknown version"),
    ],
)
def test_a_job_of_another_version_is_a_sentence(sent, named):
    with pytest.raises(ConfigError, match=named):
        JobSpec.decode(sent)


def test_settings_of_a_gang_are_checked_when_it_is_made():
    assert Gang(None, 3, port_range=[1, 2], pip=["x"]).settings == GangSettings(ranks=3, port_range=(1, 2), pip=("x",))
    with pytest.raises(ConfigError, match=r"a gang's settings are .*ranks_per_worker.* unknown field `rank`"):
        Gang(None, rank=3)


def test_numbers_of_numpy_and_torch_are_settings():
    given = Gang(None, np.int64(3), timeout_s=np.float32(5), max_restarts=torch.tensor(2)).settings
    assert given == GangSettings(ranks=3, timeout_s=5.0, max_restarts=2)
    with pytest.raises(ConfigError, match="ranks=0: give"):
        Gang(None, np.int64(0))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ranks": 2, "min_ranks": 3}, "min_ranks=3 is more than ranks=2: give 2 or less"),
        ({"ranks": 0}, "ranks=0: give a whole number of at least 1, or None"),
        ({"ranks_per_worker": 0}, "ranks_per_worker=0: give a whole number of at least 1, or auto"),
        ({"timeout_s": "long"}, "timeout_s='long': give seconds, more than 0"),
        ({"lost_timeout_s": float("nan")}, "lost_timeout_s=nan: give seconds, more than 0"),
        ({"max_restarts": -1}, "max_restarts=-1: give 0 or more"),
        ({"port_range": [2, 1]}, r"port_range=\[2, 1\]: give the first and the last port"),
        ({"port_range": [2]}, "a gang's settings are .* length 2"),
        ({"ranks": 2, "settings": GangSettings(min_ranks=3)}, "min_ranks=3 is more than ranks=2"),
    ],
    ids=str,
)
def test_a_gang_refuses_what_the_command_refuses(settings, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        Gang(None, **settings)
