"""What a job is described by, on its way from the client to the ranks."""

from __future__ import annotations

import msgspec
import pytest

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
    with pytest.raises(ConfigError, match=r"Expected `float`, got `str` - at `\$\.timeout_s`"):
        Gang(None, timeout_s="long")
