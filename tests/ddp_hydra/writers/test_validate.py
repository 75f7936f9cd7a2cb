"""Histograms that a rank sends are checked before a writer gets them; `test_handler.py` has the other records."""

from __future__ import annotations

import math

import pytest

from ddp_hydra.errors import RecordError
from ddp_hydra.results import Record
from ddp_hydra.writers.validate import check_record


def histogram(edges: list, counts: list) -> Record:
    return Record("histogram", {"name": "weights", "edges": edges, "counts": counts}, 0, 1, 12.5, 0)


@pytest.mark.parametrize(("edges", "counts"), [([0, 1], [3]), ([0.0, 0.5, 1e300], [0, 2.5]), ([1.0], [])])
def test_a_histogram_has_one_edge_more_than_counts(edges, counts):
    check_record(histogram(edges, counts))


@pytest.mark.parametrize(
    ("edges", "counts"),
    [
        ([0, 1], [1, 2]),
        ([1, 0], [3]),
        ([0, 1], [-1]),
        ([0, math.nan], [3]),
        ([0, math.inf], [3]),
        ([0, True], [3]),
        ([0, "1"], [3]),
        ([0, 1], [None]),
        (list(range(1027)), [0] * 1026),
        ("01", [3]),
    ],
)
def test_what_is_no_histogram_is_refused(edges, counts):
    with pytest.raises(RecordError):
        check_record(histogram(edges, counts))
