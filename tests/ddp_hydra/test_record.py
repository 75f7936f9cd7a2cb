"""What a rank sends is a record, or is refused in a sentence before a writer gets it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hydra.errors import Failure, RecordError
from ddp_hydra.record import Beat, Checkpoint, End, File, Histogram, Log, Metrics, Record, Rows, Start, Up, begins

FILE = {"kind": "file", "path": "a/b", "size": 1, "sha256": ""}
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
data = (
    st.builds(Log, st.text())
    | st.builds(Metrics, st.dictionaries(names, st.floats(allow_nan=False), max_size=3), st.none() | st.floats(0, 9))
    | st.builds(Start, st.lists(st.text(), max_size=3), st.none() | st.integers(0, 2**63 - 1))
    | st.builds(End, st.none(), st.just(False), st.builds(Failure, st.just("raised"), message=st.text()))
)
records = st.builds(
    Record,
    data,
    rank=st.integers(0, 1000),
    step=st.none() | st.integers(0, 2**63 - 1),
    time_s=st.floats(0, 1e11, exclude_max=True),
    attempt=st.integers(0, 9),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(records)
def test_a_record_comes_back_from_one_line_of_json(record):
    line = record.encode()
    assert b"\n" not in line
    assert Record.decode(line) == Record.decode(line.decode()) == record


def test_numbers_that_json_has_no_word_for_come_back():
    found = Record.decode(Record(Metrics({"a": math.nan, "b": math.inf, "c": -math.inf})).encode()).data
    assert math.isnan(found.metrics["a"])
    assert (found.metrics["b"], found.metrics["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("sent", [End(stopped=True), Up(), Beat(), Log("x")])
def test_a_record_begins_with_its_kind(sent):
    """The relay tells the end of a rank from other records by these bytes."""
    line = Record(sent).encode()
    assert [begins(line, kind) for kind in (End, Up, Beat, Log)] == [type(sent) is k for k in (End, Up, Beat, Log)]


def line(**changes):
    return json.dumps({"data": {"kind": "log", "text": "x"}} | changes)


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "x", [], {}, 10**400, "1", -1])
@pytest.mark.parametrize("field", ["data", "rank", "step", "time_s", "attempt", "more", "__class__"])
def test_a_field_of_a_wrong_type_is_refused(field, value):
    allowed = {
        "rank": lambda: type(value) is int and 0 <= value < 2**63,
        "attempt": lambda: type(value) is int and 0 <= value < 2**63,
        "step": lambda: value is None or (type(value) is int and 0 <= value < 2**63),
        "time_s": lambda: type(value) in (int, float) and 0 <= value < 2**63,
    }
    if allowed.get(field, lambda: False)():
        assert getattr(Record.decode(line(**{field: value})), field) == value
    else:
        with pytest.raises(RecordError, match=r"not a record|malformed"):
            Record.decode(line(**{field: value}))


@pytest.mark.parametrize(
    "found",
    [
        {"kind": "unknown"},
        {"kind": "metrics", "metrics": {"loss": "1"}},
        {"kind": "metrics", "metrics": {"loss": 10**400}},
        {"kind": "metrics", "metrics": {"\ud800": 1.0}},
        {"kind": "metrics", "metrics": {"loss": 1.0}, "epoch": math.nan},
        {"kind": "text", "name": "", "text": "x"},
        {"kind": "rows", "samples": 0, "length": 1},
        {"kind": "beat", "phase": "asleep"},
        {"kind": "end"},
        {"kind": "end", "stopped": True, "failure": {"kind": "raised"}},
        {"kind": "end", "failure": {"kind": "\x1b[31m"}},
        {"kind": "end", "failure": {"kind": "raised", "time_s": math.inf}},
        {"kind": "end", "stopped": True, "step": 2**63},
        {"kind": "end", "value": {**FILE, "size": "many"}},
        {**FILE, "size": "1"},
        {**FILE, "checkpoint": {"step": None}},
    ],
)
def test_a_malformed_record_is_refused_with_its_rank(found):
    with pytest.raises(RecordError, match=r"^rank 3 sent a malformed record: "):
        Record.decode(line(data=found, rank=3))


@pytest.mark.parametrize("path", ["/etc/passwd", "checkpoints/../../secret"])
@pytest.mark.parametrize("checkpoint", [None, {"step": 1}])
def test_a_file_outside_of_the_run_directory_is_refused(path, checkpoint):
    # A writer may be a logger, which uploads the file of that path.
    with pytest.raises(RecordError, match="is not allowed"):
        Record.decode(line(data={**FILE, "path": path, "checkpoint": checkpoint}))
    with pytest.raises(RecordError, match="is not allowed"):
        Record.decode(line(data={"kind": "end", "value": {**FILE, "path": path}}))


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"null",
        b'{"data":{"kind":"log","text":"x"}} {"data":{"kind":"log","text":"x"}}',
        b'{"data":{"kind":"log","text":"x"},"rank":' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b"\x80\x04K\x01.",
        b"[" * 100_000,
        b'{"data":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    ],
    ids=lambda hostile: repr(hostile[:24]),
)
def test_a_line_that_is_no_record_is_refused_in_a_short_sentence(hostile):
    with pytest.raises(RecordError, match=r"^not a record: ") as caught:
        Record.decode(hostile)
    assert len(str(caught.value)) < 1100


@given(st.binary(max_size=40) | json_values.map(json.dumps))
def test_any_line_is_a_record_or_refused(text):
    with pytest.raises(RecordError):
        Record.decode(text)


@pytest.mark.parametrize(("edges", "counts"), [([0, 1], [3]), ([0.0, 0.5, 1e300], [0, 2.5]), ([1.0], [])])
def test_a_histogram_has_one_edge_more_than_counts(edges, counts):
    record = Record(Histogram("weights", edges, counts))
    assert Record.decode(record.encode()) == record


@pytest.mark.parametrize(
    ("edges", "counts"),
    [
        ([0, 1], [1, 2]),
        ([1, 0], [3]),
        ([0, 1], [-1]),
        ([0, math.nan], [3]),
        (list(range(1027)), [0] * 1026),
        ("01", [3]),
    ],
)
def test_what_is_no_histogram_is_refused(edges, counts):
    with pytest.raises(RecordError):
        Record.decode(line(data={"kind": "histogram", "name": "weights", "edges": edges, "counts": counts}))


def test_a_record_knows_the_checkpoint_that_it_brings():
    saved = Checkpoint(3, metrics={"val/loss": 1.0})
    assert Record(File("checkpoints/step-000003.pt", 1, "", checkpoint=saved)).checkpoint == saved
    assert Record(File("a/b", 1, "")).checkpoint is Record(Rows(None, 4)).checkpoint is None
