"""What a run says of its data: laps, the whole, and the line at the end. Of several ranks: tests/integration."""

from __future__ import annotations

import pytest
import torch

from ddp_hydra.data.loader import Loader
from ddp_hydra.errors import DataError
from ddp_hydra.job.summary import describe_data, describe_straggler
from ddp_hydra.rank.world import ALONE
from ddp_hydra.training.monitor import DataStats, bad_of_all_ranks, count_bad, skipped_by

CPU = torch.device("cpu")


class Images:
    """A data set that says what it cost."""

    def __init__(self, **counts: float) -> None:
        self.counts = counts
        self.bad: dict[str, str] = {}
        self.max_bad_fraction = 0.01

    def __len__(self) -> int:
        return 100

    def stats(self) -> dict[str, float]:
        return self.counts


def test_a_lap_is_what_came_since_the_last_one():
    data = Images(samples=10, bytes=1000, retries=1, cache_hits=0, bad_samples=0)
    loader = Loader(data, CPU)
    report = DataStats(loader)
    loader.waited_s = 1.0
    first = {"data_wait": 0.25, "data/bytes_per_s": 250, "data/retries": 1, "data/cache_hits": 0, "data/bad_samples": 0}
    assert report.interval([report.local_counts(4.0)]) == first
    data.counts = {"samples": 30, "bytes": 3000, "retries": 4, "cache_hits": 5, "cache_misses": 15, "bad_samples": 1}
    data.bad = {"one": "damaged"}
    loader.waited_s = 1.5
    later = {"data_wait": 0.5, "data/bytes_per_s": 2000, "data/retries": 4, "data/cache_hits": 0.25}
    assert report.interval([report.local_counts(1.0)]) == {**later, "data/bad_samples": 1}
    assert report.totals() == {
        "wait_s": 1.5, "wait": 0.3, "samples": 30, "bytes": 3000, "requests": 0, "retries": 4, "cache_hits": 5,
        "cache_misses": 15, "bad_samples": 1,
    }  # fmt: skip


def test_files_that_were_left_out_are_said_by_extension():
    data = Images()
    assert skipped_by(data) == skipped_by(None) == ""
    data.skipped = {".txt": 2, "": 1, ".heic": 1200}
    assert skipped_by(data) == "1,203 files that are not images: 1,200 .heic, 2 .txt, 1 without extension"


def test_of_a_data_set_that_says_nothing_the_waiting_is_told():
    loader = Loader([1, 2], CPU)
    report = DataStats(loader)
    loader.waited_s = 0.5
    assert report.interval([report.local_counts(2.0)]) == {"data_wait": 0.25}
    assert report.totals() == {"wait_s": 0.5, "wait": 0.25}


def test_too_many_bad_samples_fail_and_some_are_named():
    data = Images(bad_samples=2)
    data.bad = {"b.png": "damaged", "a.png": "empty"}
    words = r"2 bad samples of 100.*allows 1: a\.png \(empty\); b\.png \(damaged\).*data\.max_bad_fraction="
    report = DataStats(Loader(data, CPU))
    with pytest.raises(DataError, match=words):
        report.interval([report.local_counts(1.0)])


def test_bad_samples_of_all_data_sets_are_gathered():
    one, other = Images(), Images()
    one.bad, other.bad = {"a": "x"}, {"b": "y"}
    other.bad_counts = {"b": 9}
    bad = bad_of_all_ranks(ALONE, one, other, None)
    assert bad == {"a": ("x", 1), "b": ("y", 9)}
    assert count_bad(bad) == 10


@pytest.mark.parametrize(("wait", "bound_by"), [(0.0, "compute"), (0.09, "compute"), (0.1, "data"), (0.9, "data")])
def test_the_line_at_the_end_says_what_a_run_was_bound_by(wait, bound_by):
    said = describe_data({"wait_s": 50 * wait, "wait": wait}, 50.0, steps=20)
    assert said.startswith(f"data: bound by {bound_by}: a rank waited {50 * wait:.1f} of 50.0 s ({wait:.0%})")


def test_the_line_at_the_end_has_all_figures():
    counts = {
        "samples": 200,
        "bytes": 5e6,
        "requests": 150,
        "retries": 1234,
        "cache_hits": 50,
        "cache_misses": 150,
        "bad_samples": 2,
    }
    said = describe_data({"wait_s": 0.0, "wait": 0.0, **counts}, 10.0, steps=20)
    assert said.endswith("5.0 MB read, 0.5 MB/s, 25% from the cache, 1,234 retries, 2 bad samples")
    said = describe_data({"wait_s": 0.0, "wait": 0.0, **counts, "retries": 1, "bad_samples": 1}, 10.0, steps=20)
    assert said.endswith("1 retry, 1 bad sample")


def test_of_a_run_of_few_steps_nothing_is_concluded():
    counts = dict.fromkeys(("bytes", "retries", "cache_hits", "cache_misses", "bad_samples"), 0.0)
    said = describe_data({"wait_s": 0.0, "wait": 0.3, **counts}, 0.1, steps=19)
    assert said == "data: 0.0 MB read, 0.0 MB/s, 0% from the cache, 0 retries, 0 bad samples"
    assert describe_data({"wait_s": 0.0, "wait": 0.3}, 0.1, steps=19) is None
    assert describe_straggler({"rank": 1, "times": 4.71}, 9.0, steps=19) is None
    assert describe_straggler({"rank": 1, "times": 4.71}, 4.9, steps=20) is None


def test_a_rank_is_named_that_is_notably_slower_than_the_median():
    assert describe_straggler({}, 9.0, 20) is None
    assert describe_straggler({"rank": 1, "times": None}, 9.0, 20) is None
    assert describe_straggler({"rank": 1, "times": 1.14}, 9.0, 20) is None
    assert describe_straggler({"rank": 3, "times": 2.5}, 9.0, 20).startswith(
        "slow: rank 3 took 2.50 times as long as the median"
    )
