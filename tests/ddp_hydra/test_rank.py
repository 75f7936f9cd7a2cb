"""What a rank does by itself, in this process."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_hydra import rank


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_groups_made_beside_the_main_one_have_its_timeout():
    usual = distributed_c10d.default_pg_timeout
    with rank.process_group(dist.HashStore(), 0, 1, "gloo", timeout_s=77.0):
        assert timeout_of(dist.new_group()) == timedelta(seconds=77)
        assert timeout_of(dist.new_group(backend="gloo", timeout=timedelta(seconds=5))) == timedelta(seconds=5)
    with rank.process_group(dist.HashStore(), 0, 1, timeout_s=77.0, init=False):  # a script makes it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert timeout_of(dist.group.WORLD) == timedelta(seconds=77)
    assert distributed_c10d.default_pg_timeout == usual


class Mute(Exception):
    def __str__(self):
        raise KeyError("no words")


def test_what_was_raised_is_told_within_bounds_also_by_an_error_that_cannot_say_what_it_is():
    end = rank.describe(ValueError("x" * 10_000_000))
    assert end["message"].startswith("ValueError: xxx")
    assert len(json.dumps(end)) < 100_000
    assert len(json.dumps(rank.describe(SystemExit("x" * 10_000_000)))) < 100_000
    assert rank.describe(Mute())["message"] == "Mute: (its message can't be told: Mute.__str__ raised KeyError)"
    assert rank.describe(KeyError())["message"] == "KeyError"
