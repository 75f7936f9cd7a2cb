"""What a state holds is written, read by `torch.load(weights_only=True)`, and equal again; other values are refused."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import io
import math
import pathlib
import threading
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ddp_hydra.errors import CheckpointError
from ddp_hydra.training import plain_state


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Flags(enum.Flag):
    A = 1
    B = 2


Pair = collections.namedtuple("Pair", "left right")


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(plain_state.encode({"value": value}), file)
    file.seek(0)
    return plain_state.decode(torch.load(file, weights_only=True))["value"]


def same(one: Any, other: Any) -> bool:
    """Return whether type and value are equal; a NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


VALUES: list[Any] = [
    None,
    True,
    3,
    10**30,
    -0.0,
    math.inf,
    math.nan,
    1 + 2j,
    "text",
    b"bytes",
    b"",
    bytes(range(256)),
    bytearray(b"more"),
    [1, [2, (3, {"four": 4})]],
    {1, 2},
    frozenset({"a"}),
    {(1, "a"): 2, None: 3},
    {np.int64(1): torch.ones(1), Level.HIGH: 2, pathlib.Path("a"): 3, (b"b", frozenset("c")): {}},
    {np.int64(1), Colour.RED},
    collections.OrderedDict([(pathlib.Path("b"), 1), ("a", 2)]),
    collections.Counter({Colour.RED: 2}),
    range(1, 9, 2),
    slice(1, None, 2),
    collections.deque([1, 2], maxlen=3),
    collections.OrderedDict(b=1, a=2),
    collections.Counter("aab"),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {"a": [1]}),
    Pair(1, Pair("a", None)),
    Colour.RED,
    Level.HIGH,
    Flags.A | Flags.B,
    datetime.datetime(2026, 11, 27, 1, 2, 3, 4, tzinfo=datetime.UTC),
    datetime.date(2026, 11, 27),
    datetime.time(1, 2, 3),
    datetime.timedelta(days=-1, microseconds=3),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=7),
    pathlib.Path("a/b"),
    pathlib.PurePosixPath("/a"),
    pathlib.PureWindowsPath("c:/a"),
    np.float64(0.1),
    np.float16(math.nan),
    np.int64(-3),
    np.uint8(200),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.str_("text"),
    np.bytes_(b"ab"),
    np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
    np.zeros((0, 3), "f2"),
    np.array(1.5),
    np.array(["a", "bcd"]),
    torch.Size([1, 2]),
    torch.float16,
    torch.device("cpu"),
    torch.strided,
    torch.tensor([1.0, math.inf]),
    torch.tensor([1 + 2j]),
    torch.zeros(0, 2),
    torch.tensor([1, 2], dtype=torch.uint16),
    torch.ones(1).expand(3),
    torch.Generator().manual_seed(5),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_value_comes_back_equal(value):
    assert same(through_a_file(value), value)


def test_a_node_of_the_config_comes_back_as_what_it_holds():
    assert through_a_file(OmegaConf.create({"a": [1, 2], "b": "${a}"})) == {"a": [1, 2], "b": [1, 2]}


def test_a_tensor_of_a_subclass_comes_back_as_a_tensor():
    parameter = torch.nn.Parameter(torch.ones(2))
    again = through_a_file(parameter)
    assert (type(again), again.requires_grad, again.tolist()) == (torch.Tensor, False, [1.0, 1.0])


def test_numbers_of_an_optimizer_or_a_schedule_are_plain_ones():
    encoded = plain_state.encode({"scheduler": {"_last_lr": [np.float64(0.1)]}, "optimizer": {"step": np.int64(3)}})
    assert encoded == {"scheduler": {"_last_lr": [0.1]}, "optimizer": {"step": 3}}
    assert type(encoded["scheduler"]["_last_lr"][0]) is float


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.floats().map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.datetimes(timezones=st.sampled_from([None, datetime.UTC])),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.sampled_from([Colour.RED, Level.HIGH, torch.float64, torch.Size([2])]),
)
KEYS = st.one_of(
    st.text(max_size=3), st.integers(), st.binary(max_size=2), st.tuples(st.integers(), st.text(max_size=2))
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda found: collections.deque(found, 5)),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda found: collections.defaultdict(int, found)),
        st.tuples(inner, inner).map(Pair._make),
    ),
    max_leaves=8,
)


@given(NESTED)
def test_nested_values_come_back_equal(value):
    assert same(through_a_file(value), value)


class Own:
    """A class that no reader of a checkpoint knows."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"scheduler": {"_last_lr": [Own()]}}, r"scheduler: _last_lr\[0\] is a .*Own"),
        ({"model": {"a": {"b": Own}}}, r"model: a\.b is a builtins\.type"),
        ({"callbacks": {"mine": threading.Lock()}}, r"callbacks: mine is a _thread"),
        ({"optimizer": {"fn": lambda: None}}, r"optimizer: fn is a builtins\.function"),
        ({"model": {"x": np.array([None])}}, r"model: x is a numpy\.ndarray"),
        ({"model": {"x": np.datetime64("2026-01-01")}}, r"model: x is a numpy\.datetime64"),
        ({"task": {"a": {np.int64(3): {"b": Own()}}}}, r"task: a\.3\.b is a .*Own"),
        ({"model": {Own(): 1}}, r"model, a key is a .*Own"),
        ({"model": collections.defaultdict(lambda: 1)}, r"model is a collections\.defaultdict"),
    ],
    ids=[
        "an object",
        "a class",
        "a lock",
        "a function",
        "an array of objects",
        "a date",
        "below a number",
        "a key",
        "a factory",
    ],
)
def test_another_value_is_refused_by_its_name(value, named):
    with pytest.raises(CheckpointError, match=f"^{named}"):
        plain_state.encode(value)


def test_a_kind_of_a_later_version_is_named():
    with pytest.raises(CheckpointError, match="the kind 'quantum'"):
        plain_state.decode({plain_state.KIND: "quantum", "value": 1})


class Odd:
    """A schedule whose state can't be saved."""

    def __init__(self, optimizer: Any) -> None:
        self.stepped = 0

    def step(self) -> None:
        self.stepped += 1

    def state_dict(self) -> dict[str, Any]:
        return {"_last_lr": [Own()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_run_is_refused_before_its_first_step(train):
    made: list[Any] = []
    with pytest.raises(CheckpointError, match=r"^scheduler: _last_lr\[0\] is a .*Own.*a checkpoint can't hold"):
        train(whole={"scheduler": {"_target_": f"{__name__}.Odd"}}, into=made)
    assert made[0].saved == []


class Rates:
    """A schedule whose state has numbers of numpy, a path and a date."""

    def __init__(self, optimizer: Any) -> None:
        self.state: dict[str, Any] = {
            "count": np.int64(0),
            "table": np.arange(3.0),
            "path": pathlib.Path("a"),
            "began": datetime.date(2026, 1, 2),
            "seen": collections.defaultdict(int),
        }

    def step(self) -> None:
        self.state["count"] += 1
        self.state["seen"][int(self.state["count"]) % 2] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert same(state["table"], np.arange(3.0))
        assert isinstance(state["seen"], collections.defaultdict)
        self.state = state


@pytest.mark.medium
def test_a_schedule_with_such_values_is_resumed(train):
    whole = {"scheduler": {"_target_": f"{__name__}.Rates"}}
    first = train(whole=whole, stop_at=("forward", 5))
    again, never = train(whole=whole, resume=first.last), train(whole=whole)
    ours, theirs = (torch.load(run.last, weights_only=True)["scheduler"] for run in (again, never))
    assert ours == theirs
    assert plain_state.decode(ours)["path"] == pathlib.Path("a")


class Quarters(torch.Tensor):
    """Keeps quarters in bytes, as moments of torchao's optimizers are kept."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes"], [self.scale, torch.float32]

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_tensors_made_of_others_are_saved_as_these(tmp_path):
    codes = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    copied = plain_state.begin_copy({"optimizer": {"state": {"weight": {"exp_avg": Quarters(codes, 0.25)}}}})()
    codes.zero_()
    torch.save(copied, tmp_path / "state.pt")
    found = plain_state.decode(torch.load(tmp_path / "state.pt", weights_only=True))
    (moment,) = found["optimizer"]["state"]["weight"].values()
    assert (type(moment), moment.shape, moment.scale) == (Quarters, (2, 3), 0.25)
    assert moment.codes.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_class_of_tensors_that_a_run_does_not_use_is_not_looked_for():
    saved = plain_state.encode({"a": Quarters(torch.zeros(2, dtype=torch.uint8), 1.0)})
    saved["a"]["value"][0] = "elsewhere.optim:Moments"
    with pytest.raises(CheckpointError, match=r"has tensors of elsewhere\.optim:Moments, which this run does not use"):
        plain_state.decode(saved)
