from __future__ import annotations

import collections
import copy
import hashlib
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp_hydra import heartbeat
from ddp_hydra.errors import CheckpointError
from ddp_hydra.rank import fault_injection
from ddp_hydra.rank.world import ALONE, World
from ddp_hydra.record import Checkpoint
from ddp_hydra.training import lr_schedules, sharded_checkpoint
from ddp_hydra.training.checkpoint import CheckpointSaver, finite_check, load_fitting, read, write
from ddp_hydra.training.parallel import Parallel
from ddp_hydra.training.parallel.weights import Ema
from ddp_hydra.training.plain_state import KIND
from ddp_hydra.training.state import FORMAT, Position, TrainingState

SGD = {"cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
ADAM = {"cls": torch.optim.Adam, "lr": 0.01}


def state(seed=0, width=3, optimizer=SGD, build=nn.Linear, norm=True):
    torch.manual_seed(seed)
    model = nn.Sequential(build(2, width), *([nn.BatchNorm1d(width)] if norm else []))
    options = dict(optimizer)
    optimizer = options.pop("cls")(model.parameters(), **options)
    return TrainingState(
        Parallel().adopt(model),
        optimizer,
        lr_schedules.cosine(optimizer, 20),
        Position(),
        {"seed": seed, "tags": ["a"]},
    )


def train(run, steps):
    for _ in range(steps):
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(run.position.step))
        run.optimizer.zero_grad()
        run.model(x).pow(2).sum().backward()
        run.optimizer.step()
        run.scheduler.step()
        run.position.advance(4)
    return run


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value.tolist()]
    if isinstance(value, dict):
        return [part for key in value for part in [key, *flat(value[key])]]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in flat(item)]
    return [value]


def test_rank_0_alone_saves_what_other_ranks_have_with_other_values():
    run = train(state(), 1)
    buffers = {f"{part}.1.running_{name}" for part in ("model", "ema.model") for name in ("mean", "var")}
    assert {name for name in run.names_of_rank_0() if "num_batches" not in name} == buffers
    run.parallel.parts[""] = SimpleNamespace(same_gradients=False)  # as of local SGD
    assert {
        "model.0.weight",
        "model.1.running_var",
        "optimizer.state.0.weight.momentum_buffer",
    } <= run.names_of_rank_0()


def test_the_check_of_a_checkpoint_in_a_thread_looks_at_no_module(monkeypatch):
    run = state()  # a step may make a module or a buffer meanwhile
    content, check = run.begin_capture()(), finite_check(run)
    for name in ("named_modules", "named_parameters", "named_buffers"):
        monkeypatch.delattr(nn.Module, name)
    check(content)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
def test_a_capture_is_a_copy_that_later_steps_do_not_change(optimizer):
    run = train(state(optimizer=optimizer), 2)
    run.best = 0.5
    content = run.begin_capture()()
    before = copy.deepcopy(content)
    train(run, 2)
    run.config["tags"].append("later")
    assert flat(content) == flat(before)
    assert flat(run.begin_capture()()) != flat(before)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
def test_a_restored_run_goes_on_bit_for_bit(optimizer, tmp_path):
    run = train(state(optimizer=optimizer), 3)
    run.best = 0.25
    run.position.end_epoch()
    torch.save(run.begin_capture()(), tmp_path / "a.pt")
    other = state(seed=1, optimizer=optimizer)
    other.restore(read(tmp_path / "a.pt"))
    assert (other.position, other.best) == (Position(3, 1, 12, 0), 0.25)
    wanted, found = train(run, 3).begin_capture()(), train(other, 3).begin_capture()()
    assert found["scheduler"] == wanted["scheduler"]
    for part in ("model", "optimizer", "position"):
        assert flat(found[part]) == flat(wanted[part])


class Moments(torch.optim.Optimizer):
    """Keeps what torch would give the type of its parameter: moments of more bits, a counter, and lists of them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                kept = self.state[one] or {
                    "mean": torch.zeros_like(one, dtype=torch.float64),
                    "count": torch.zeros((), dtype=torch.int64),
                    "more": {"seen": [torch.zeros(1, dtype=torch.float64)], "pair": (torch.ones(1), 1.0)},
                }
                self.state[one] = kept
                kept["mean"].lerp_(one.grad.double(), 0.3)
                kept["count"] += 1
                kept["more"]["seen"][0] += one.grad.double().mean() / 3
                one -= (group["lr"] * kept["mean"] * kept["more"]["pair"][0].double()).to(one.dtype)


@pytest.mark.parametrize(
    "optimizer", [{"cls": Moments}, {"cls": torch.optim.ASGD}, {"cls": torch.optim.Adam, "fused": True}, SGD]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_an_optimizer_keeps_has_its_own_type_again(optimizer, dtype):
    def build():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Linear(2, 3, dtype=dtype)
        options = dict(optimizer)
        own = options.pop("cls")(model.parameters(), **options)
        return TrainingState(Parallel().adopt(model), own, lr_schedules.cosine(own, 20), Position(), {})

    def step(run):
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(run.position.step)).to(dtype)
        run.optimizer.zero_grad()
        run.model(x).pow(2).sum().backward()
        run.optimizer.step()
        run.position.advance(4)

    run, other = build(), build()
    for _ in range(3):
        step(run)
    other.restore(run.begin_capture()())
    for _ in range(2):
        step(run)
        step(other)
        wanted, found = run.begin_capture()(), other.begin_capture()()
        assert str(found["optimizer"]) == str(wanted["optimizer"]), "the types, too"
        assert flat([found["optimizer"], found["model"]]) == flat([wanted["optimizer"], wanted["model"]])


def test_parameters_of_another_type_take_their_state_along():
    run = train(state(optimizer=ADAM, norm=False), 2)
    other = state(optimizer=ADAM, norm=False, build=lambda *sizes: nn.Linear(*sizes, dtype=torch.float64))
    other.restore(run.begin_capture()())
    assert {slots["exp_avg"].dtype for slots in other.optimizer.state.values()} == {torch.float64}


def in_groups(*groups):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    named = dict(model.named_parameters())
    optimizer = torch.optim.Adam([{"params": [named[name] for name in names], "lr": lr} for names, lr in groups])
    return TrainingState(Parallel().adopt(model), optimizer, lr_schedules.cosine(optimizer, 20), Position(), {})


LINEAR, NORM = ["0.weight", "0.bias"], ["1.weight", "1.bias"]


def test_an_optimizer_is_saved_by_the_names_of_parameters_and_goes_on_in_another_order():
    run = train(in_groups((LINEAR, 0.1), (NORM, 0.01)), 2)
    content = run.begin_capture()()
    assert [group["params"] for group in content["optimizer"]["param_groups"]] == [LINEAR, NORM]
    assert set(content["optimizer"]["state"]) == {*LINEAR, *NORM}
    other = in_groups((LINEAR[::-1], 0.5), (NORM[::-1], 0.5))
    other.restore(content)
    assert flat(train(run, 2).begin_capture()()["model"]) == flat(train(other, 2).begin_capture()()["model"])


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([([*LINEAR, "1.weight"], 0.1)], "it trains 1.bias, too"),
        ([(NORM, 0.1), (LINEAR, 0.1)], "groups of parameters begin with 0.weight, 1.weight, and those here with 1.w"),
        ([(["0.weight"], 0.1), (["0.bias"], 0.1), (NORM, 0.1)], "here with 0.weight, 0.bias, 1.weight"),
        ([([*LINEAR, *NORM], 0.1)], "begin with 0.weight, 1.weight, and those here with 0.weight"),
    ],
)
def test_an_optimizer_of_other_parameters_or_groups_is_refused_by_their_names(groups, said):
    content = train(in_groups((LINEAR, 0.1), (NORM, 0.1)), 1).begin_capture()()
    with pytest.raises(CheckpointError, match=said):
        in_groups(*groups).restore(content)
    content = train(in_groups((LINEAR, 0.1)), 1).begin_capture()()
    with pytest.raises(CheckpointError, match=r"it has nothing of 1\.weight"):
        in_groups(([*LINEAR, "1.weight"], 0.1)).restore(content)


class Odd(torch.optim.Optimizer):
    """Keeps values under keys that are no parameters, and has but one option."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for key in ("0.weight", -1, 1000, ("a", 1), 0.5):
            self.state[key]["n"] = self.state[key].get("n", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slots = self.state[parameter]
                slots["sum"] = slots.get("sum", 0) + parameter.grad
                parameter -= group["lr"] * slots["sum"]


def test_values_under_keys_of_an_optimizers_own_stay_apart_and_it_is_restored_again_and_again():
    run = train(state(optimizer={"cls": Odd, "lr": 0.01}), 2)
    content = run.begin_capture()()
    assert content["optimizer"]["others"] == {key: {"n": 2} for key in ("0.weight", -1, 1000, ("a", 1), 0.5)}
    other = state(seed=1, optimizer={"cls": Odd, "lr": 0.01})
    for _ in range(2):  # as by two rollbacks
        other.restore(content)
    assert flat(train(run, 2).begin_capture()()["model"]) == flat(train(other, 2).begin_capture()()["model"])
    assert other.optimizer.state[1000] == {"n": 4}


class Together(torch.optim.Optimizer):
    """Keeps two sums that are the same tensors for all parameters."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for one in group["params"]:
            first = self.state[group["params"][0]]
            slots = self.state[one]
            slots["n"] = slots.get("n", first.get("n", torch.zeros(())))
            slots["more"] = slots.get("more", first.get("more", [torch.zeros(2, dtype=torch.float64)]))
            slots["n"] += 1
            slots["more"][0] += one.grad.double().abs().sum()
            one -= (group["lr"] * one.grad / (slots["n"] + slots["more"][0][1])).to(one.dtype)


@pytest.mark.parametrize("way", ["file", "parts", "rollback"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_several_parameters_stays_one_tensor(way, dtype, tmp_path):
    def build():
        return state(optimizer={"cls": Together, "lr": 0.1}, norm=False, build=partial(nn.Linear, dtype=dtype))

    def train(run, steps):
        for _ in range(steps):
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(run.position.step)).to(dtype)
            run.optimizer.zero_grad()
            run.model(x).pow(2).sum().backward()
            run.optimizer.step()
            run.position.advance(4)
        return run.begin_capture()()

    run, other = build(), build()
    train(run, 2)
    content = run.begin_capture()()
    if way == "file":
        torch.save(content, tmp_path / "a.pt")
        content = read(tmp_path / "a.pt")
    if way == "parts":
        rest, tensors = sharded_checkpoint.taken_apart(content)
        content = sharded_checkpoint.put_together(rest, tensors)
    if way == "rollback":
        other = run
        wanted = train(run, 2)
    other.restore(content)
    slots = list(other.optimizer.state.values())
    assert len({id(one["n"]) for one in slots}) == len({id(one["more"][0]) for one in slots}) == 1
    found = train(other, 2)
    wanted = wanted if way == "rollback" else train(run, 2)
    assert flat([found["model"], found["optimizer"]]) == flat([wanted["model"], wanted["optimizer"]])


Pair = collections.namedtuple("Pair", "one two")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_tensor_is_as_it_was_whatever_torch_makes_of_it(dtype):
    def build():
        return state(optimizer=SGD, norm=False, build=partial(nn.Linear, dtype=dtype))

    def slots(shared):
        last = collections.deque([torch.ones(2), torch.zeros(2, dtype=torch.int64)], maxlen=2)
        return {
            "mode": "warm", "bytes": b"ab", "last": last, "set": {1, 2}, "range": range(3), "array": np.arange(3.0),
            "pair": Pair("a", shared), "ordered": collections.OrderedDict(b=shared, a="text"), "none": None,
            "counts": collections.defaultdict(int, a=1), "list": ["a", (b"b", shared)], "dict": {"name": {"a": "b"}},
            "number": 0.5, "tensor": shared, "size": torch.Size([2]), "path": Path("a"), "ends": [],
        }  # fmt: skip

    run, other = build(), build()
    shared = torch.full((2,), 0.1, dtype=torch.float64)
    of_weight, of_bias = run.model[0].parameters()
    run.optimizer.state[of_weight] = slots(shared)
    run.optimizer.state[of_bias] = collections.defaultdict(list, slots(shared))
    other.restore(run.begin_capture()())
    for one, saved in zip(other.model[0].parameters(), run.optimizer.state.values(), strict=True):
        found = other.optimizer.state[one]
        assert type(found) is type(saved)
        assert repr(found) == repr(saved)
        assert found["last"].maxlen == 2
    first, second = other.optimizer.state.values()
    for one in (first, second):
        assert first["tensor"] is one["tensor"] is one["pair"].two is one["ordered"]["b"] is one["list"][1][1]
    second["new"].append(1)  # of a defaultdict


class Ready(torch.optim.SGD):
    """Uses its slots while torch loads them."""

    def use(self, slots, place):
        for one in slots:
            seen = (one["last"][0], one["ordered"]["a"].dtype, one["step"]["text"])
            one["used"] = [*one.get("used", ()), (place, *seen)]

    def __setstate__(self, given):
        super().__setstate__(given)
        self.use(self.state.values(), "setstate")


def test_an_optimizer_that_uses_its_slots_while_it_loads_finds_what_was_saved():
    def build():
        return state(optimizer={"cls": Ready, "lr": 0.1}, norm=False, build=partial(nn.Linear, dtype=torch.bfloat16))

    run, other = build(), build()
    for one in run.model.parameters():
        run.optimizer.state[one] = {
            "last": collections.deque([1], 2), "ordered": collections.OrderedDict(a=torch.ones(2)),
            "step": {"text": "warm", "set": {1}},
        }  # fmt: skip
    content = run.begin_capture()()
    optimizer = other.optimizer
    optimizer.register_load_state_dict_pre_hook(lambda own, given: own.use(given["state"].values(), "before"))
    optimizer.register_load_state_dict_post_hook(lambda own: own.use(own.state.values(), "after"))
    for _ in range(2):
        other.restore(content)
        for one in optimizer.state.values():
            assert one.pop("used") == [(place, 1, torch.float32, "warm") for place in ("before", "setstate", "after")]
    assert flat(other.begin_capture()()["optimizer"]) == flat(content["optimizer"])


class Counting(nn.Linear):
    """Keeps what it is given as its extra state, and changes it in place."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.count = torch.zeros(())

    def forward(self, x):
        self.count += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, given):
        self.count = given["count"]


def test_extra_state_is_no_part_of_the_checkpoint_that_it_came_from_and_the_average_has_the_models():
    run = state(build=Counting)
    run.extras = {"ema": Ema(run.model, 0.5)}
    content = train(run, 2).begin_capture()()
    run.restore(content)
    train(run, 3)
    run.extras["ema"].update(run.model)
    assert content["model"]["0._extra_state"]["count"] == content["ema"]["model"]["0._extra_state"]["count"] + 2 == 2
    assert run.extras["ema"].model[0].count == run.model[0].count == 5
    run.model(torch.zeros(4, 2))
    assert run.extras["ema"].model[0].count == 5


def test_a_loss_and_a_part_of_the_model_may_have_one_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = nn.Linear(2, 2)

    model, loss = Named(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()])
    schedule = lr_schedules.constant(optimizer, 1)
    run = TrainingState(Parallel().adopt(model), optimizer, schedule, Position(), {}, {"loss": loss})
    assert run.optimizer_state()["param_groups"][0]["params"] == [
        "loss.weight", "loss.bias", "loss: weight", "loss: bias",
    ]  # fmt: skip


class Ours(torch.optim.SGD):
    """Keeps its state in a layout of its own, as some libraries' optimizers do."""

    def state_dict(self):
        return {"ours": super().state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state["ours"])


def test_an_optimizer_with_a_layout_of_its_own_is_saved_as_it_is():
    own = {"cls": Ours, "lr": 0.1, "momentum": 0.9}
    run = train(state(optimizer=own), 2)
    content = run.begin_capture()()
    other = state(seed=1, optimizer=own)
    other.restore(content)
    assert flat(train(run, 2).begin_capture()()["model"]) == flat(train(other, 2).begin_capture()()["model"])


def test_a_checkpoint_says_what_it_is_of(tmp_path):
    torch.save(train(state(), 1).begin_capture()(), tmp_path / "a.pt")
    content = read(tmp_path / "a.pt")
    assert content["config"] == {"seed": 0, "tags": ["a"]}
    assert (content["world_size"], content["format"], content["torch"]) == (1, FORMAT, str(torch.__version__))
    assert not any(key.startswith("module.") for key in content["model"])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"width": 4}, "not of this model: .*size mismatch for 0.weight"),
        ({"norm": False}, "not of this model: .*Unexpected key"),
        ({"build": lambda a, b: nn.Linear(a, b, bias=False)}, "not of this model: .*Unexpected key.*0.bias"),
    ],
    ids=["another width", "fewer layers", "no bias"],
)
def test_weights_of_another_model_are_refused(other, words):
    content = state().begin_capture()()
    with pytest.raises(CheckpointError, match=words):
        state(**other).restore(content)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("saved", "wanted"), [(SGD, ADAM), (ADAM, SGD)], ids=["sgd to adam", "adam to sgd"])
def test_the_state_of_another_optimizer_is_refused_and_not_at_its_first_step(saved, wanted, steps):
    content = train(state(optimizer=saved), steps).begin_capture()()
    with pytest.raises(CheckpointError, match=r"does not fit this optimizer and schedule .*resume with the config"):
        state(optimizer=wanted).restore(content)


class Bomb:
    def __reduce__(self):
        return Path("exploded").touch, ()


def saved(value, **options):
    def write(path):
        torch.save(value, path, **options)

    return write


def truncated(share):
    def write(path):
        torch.save(state().begin_capture()(), path)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return write


BAD = {
    "missing": (lambda path: None, "^no checkpoint at "),
    "empty": (Path.touch, "can't be read as a checkpoint"),
    "folder": (Path.mkdir, "can't be read as a checkpoint"),
    "cut at the half": (truncated(0.5), "can't be read as a checkpoint"),
    "cut at the end": (truncated(0.999), "can't be read as a checkpoint"),
    "a pickle that runs code": (
        lambda path: path.write_bytes(pickle.dumps(Bomb(), 2)),
        r"can't be read as a checkpoint \(UnpicklingError: Weights only load failed\): take an earlier",
    ),
    "code in a checkpoint": (saved({"format": FORMAT, "model": Bomb()}), "can't be read as a checkpoint"),
    "a list": (saved([1, 2]), f"not a checkpoint of ddp_hydra: it has no format={FORMAT}"),
    "a state dict": (saved(nn.Linear(1, 1).state_dict()), "not a checkpoint of ddp_hydra"),
    "of the future": (saved({"format": FORMAT + 1}), f"of this ddp_hydra: it has format={FORMAT + 1}, not {FORMAT}"),
}


@pytest.mark.parametrize(("write", "words"), BAD.values(), ids=BAD.keys())
def test_what_is_no_checkpoint_is_refused_and_never_run(write, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"
    write(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()


def test_a_checkpoint_writer_writes_what_the_run_was_when_asked(sent):
    run, writer = train(state(), 2), CheckpointSaver()
    writer.save(run, {"val/loss": 0.5}, best=True)
    train(run, 2)
    writer.save(run, {}, best=False)
    writer.wait()
    first, second = (record.data for record in sent)
    assert [record.step for record in sent] == [2, 4]
    assert (first.path, second.path) == ("checkpoints/step-000002.pt", "checkpoints/step-000004.pt")
    assert first.checkpoint == Checkpoint(step=2, epoch=0, samples=8, metrics={"val/loss": 0.5}, best=True)
    assert read(Path(first.source))["position"]["step"] == 2
    assert flat(read(Path(second.source))["model"]) == flat(run.model.state_dict())
    assert first.sha256 == hashlib.sha256(Path(first.source).read_bytes()).hexdigest()


def test_states_that_only_other_ranks_know_are_gathered_by_all_ranks_and_rank_0_writes(sent):
    run = train(state(), 2)
    run.extras = {"stream": Gathered(), "ema": None, "loss": nn.Linear(1, 1)}
    for rank in (1, 0):
        saver = CheckpointSaver(World(rank, 2))
        saver.save(run, {}, best=False)
        saver.wait()
        assert run.extras["stream"].gathered == 2 - rank
    assert [record.data.path for record in sent] == ["checkpoints/step-000002.pt"]
    assert read(Path(sent[0].data.source))["stream"] == {"gathered": 2}


class Gathered:
    """Counts the times that it was gathered."""

    gathered = 0

    def gather(self, gather_objects: Any) -> None:
        self.gathered += 1

    def state_dict(self) -> dict[str, int]:
        return {"gathered": self.gathered}


@pytest.fixture
def shared_status() -> Iterator[heartbeat.SharedStatus]:
    """The shared status of this process, without faults that strike it."""
    heartbeat.connect(None)
    fault_injection.install(0, 0, {})
    yield heartbeat.here()
    fault_injection.install(0, 0, {})
    heartbeat.connect(None)


def test_writing_a_checkpoint_gives_signs_of_life_and_stays_in_its_place(shared_status, tmp_path):
    run = train(state(width=50), 2)
    heartbeat.at("save", 2)
    before = shared_status.read()
    write(run.begin_capture()(), tmp_path / "a.pt", step=2)
    assert shared_status.read().ticks > before.ticks + len(run.model.state_dict())
    assert (shared_status.read().phase, shared_status.read().step) == ("save", 2)
    assert flat(read(tmp_path / "a.pt")["model"]) == flat(run.model.state_dict())


def test_a_fault_in_the_middle_of_a_checkpoint_leaves_the_half_of_one(shared_status, tmp_path):
    fault_injection.activate(["raise,step=2,at=write"])
    write(state().begin_capture()(), tmp_path / "whole.pt", step=1)
    with pytest.raises(RuntimeError, match="on purpose"):
        write(state().begin_capture()(), tmp_path / "half.pt", step=2)
    assert 0 < (tmp_path / "half.pt").stat().st_size < (tmp_path / "whole.pt").stat().st_size
    with pytest.raises(CheckpointError, match="take an earlier step file"):
        read(tmp_path / "half.pt")


def test_a_part_without_its_tensors_is_no_checkpoint(tmp_path):
    torch.save({"format": FORMAT, "model": {"a": {KIND: "part", "value": "model.a"}}}, tmp_path / "state.pt")
    with pytest.raises(
        CheckpointError, match=r"state\.pt is a part of a checkpoint, .*: copy and give the whole folder$"
    ):
        read(tmp_path / "state.pt")


def test_a_checkpoint_that_could_not_be_written_is_heard_of_once(sent, tmp_path):
    (tmp_path / "spool").rmdir()
    writer = CheckpointSaver()
    writer.save(state(), {}, best=False)
    with pytest.raises((OSError, RuntimeError), match="spool"):
        writer.wait()
    writer.wait()
    assert sent == []


class Holder(nn.Module):
    """Has a part of the name that DistributedDataParallel gives."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 1)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("build", [Holder, lambda: nn.Linear(2, 3)])
def test_weights_fit_with_the_names_that_wrappers_give_and_without(prefix, build, tmp_path):
    saved, model = build(), build()
    torch.save({f"{prefix}{name}": value for name, value in saved.state_dict().items()}, tmp_path / "weights.pt")
    assert load_fitting(tmp_path / "weights.pt", model, ALONE) == []
    assert flat(model.state_dict()) == flat(saved.state_dict())


class Both(nn.Module):
    """Has a weight of its own beside a part whose name DistributedDataParallel gives, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.module = nn.Parameter(torch.randn(2, 2)), nn.Linear(2, 2)


class Compiled(nn.Module):
    """Compiles a part of itself."""

    def __init__(self, compiled: bool = True) -> None:
        super().__init__()
        part = nn.Linear(2, 2)
        self.part, self.head = torch.compile(part) if compiled else part, nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("saved", "prefix", "model"),
    [
        (Both(), "module.", Both()),
        (Compiled(), "", Compiled(False)),
        (Compiled(False), "", Compiled()),
        (Compiled(), "module.", Compiled()),
    ],
    ids=["a part called module", "a compiled part in the file", "in the model", "in both"],
)
def test_weights_fit_where_parts_have_names_of_wrappers(saved, prefix, model, tmp_path):
    torch.save({f"{prefix}{name}": value for name, value in saved.state_dict().items()}, tmp_path / "weights.pt")
    assert load_fitting(tmp_path / "weights.pt", model, ALONE) == []
    assert flat(list(model.state_dict().values())) == flat(list(saved.state_dict().values()))


def averaged(model: nn.Module) -> dict[str, Any]:
    """Return the state of torch's average of a model."""
    return AveragedModel(model).state_dict()


@pytest.mark.parametrize(
    "make",
    [averaged, lambda model: averaged(torch.compile(model)), lambda model: averaged(nn.ModuleDict({"module": model}))],
    ids=["plain", "compiled", "of ddp"],
)
@pytest.mark.parametrize("build", [Holder, Both, lambda: nn.Linear(2, 3)])
def test_weights_fit_that_torch_has_averaged(make, build, tmp_path):
    saved, model = build(), build()
    torch.save(make(saved), tmp_path / "weights.pt")
    assert load_fitting(tmp_path / "weights.pt", model, ALONE) == []
    assert flat(model.state_dict()) == flat(saved.state_dict())


def filled(value: float) -> dict[str, Any]:
    return {"weight": torch.full((3, 2), value), "bias": torch.full((3,), value)}


def prefixed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in state.items()}


RAW, AVERAGE, LIST = filled(1.0), filled(2.0), [*filled(2.0).values()]
ONLINE = prefixed("online_model.", RAW) | prefixed("ema_model.", AVERAGE)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"state_dict": RAW, "state_dict_ema": AVERAGE, "epoch": 1}, 2),  # timm
        ({"model": RAW, "model_ema": averaged(nn.Linear(2, 3)) | {f"module.{k}": v for k, v in AVERAGE.items()}}, 2),
        ({"state_dict": AVERAGE, "ema_state_dict": RAW}, 2),  # mmengine
        ({"model": RAW, "ema_model": AVERAGE}, 2),
        ({"model": RAW, "ema": AVERAGE}, 2),
        ({"model": RAW, "ema": {"model": AVERAGE, "steps": 3}}, 2),  # ours
        ({"model": RAW, "ema": None}, 1),
        ({"model": RAW, "ema": {"decay": 0.9, "num_updates": 3, "shadow_params": LIST}}, 1),  # torch_ema
        ({"model": RAW, "ema": {"decay": torch.tensor(0.9), "shadow": LIST}}, 1),
        ({"model": RAW, "ema": {"decay": torch.tensor([0.9]), "shadow": LIST}}, 1),
        ({"model": RAW, "ema": {"decay": torch.tensor([0.9]), "shadow": AVERAGE, "backup": {}}}, 2),
        ({"model": RAW, "ema": {"module": prefixed("module.", AVERAGE), "updates": 3}}, 2),  # RT-DETR
        ({"state_dict": RAW, "ema": {"params": AVERAGE}}, 2),
        ({"model": RAW, "ema": {"state": {"shadow": AVERAGE}, "names": {0: RAW}}}, 2),
        ({"model": RAW, "ema": {"step": torch.tensor(3), **ONLINE}}, 2),  # ema-pytorch
        ({"initted": torch.tensor(True), "step": torch.tensor(3), **ONLINE}, 2),
        ({"model": RAW, "ema": {"head": torch.ones(4), "weight": torch.ones(4), "bias": torch.ones(4)}}, 1),
        ({"student": RAW, "model": AVERAGE, "teacher": RAW}, 2),
        ({"model_state_dict": RAW, "optimizer_state_dict": {"state": {0: RAW}}, "loss": torch.tensor(0.5)}, 1),
        ({"model": {"state_dict": RAW}}, 1),
    ],
)
def test_of_the_weights_in_a_file_an_average_with_names_goes_first(content, wanted, tmp_path):
    torch.save(content, tmp_path / "weights.pt")
    model = nn.Linear(2, 3)
    assert load_fitting(tmp_path / "weights.pt", model, ALONE) == []
    assert flat(model.state_dict()) == flat(filled(wanted))


def test_what_an_average_lacks_comes_from_the_weights(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    raw = {name: torch.full_like(value, 1) for name, value in model.state_dict().items()}
    shadow = {name: torch.full_like(value, 2.0) for name, value in model.named_parameters() if name != "0.bias"}
    torch.save({"model": prefixed("module.", raw), "ema": {"shadow": shadow}}, tmp_path / "weights.pt")
    assert load_fitting(tmp_path / "weights.pt", model, ALONE) == []
    assert flat(model.state_dict()) == flat(raw | shadow)


def test_a_model_that_holds_its_own_average_keeps_both(tmp_path):
    def build() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(2, 3), "ema_model": nn.ModuleDict({"a": nn.Linear(2, 3)})})

    saved, model = build(), build()
    torch.save(saved.state_dict(), tmp_path / "weights.pt")
    assert load_fitting(tmp_path / "weights.pt", model, ALONE) == []
    assert flat(model.state_dict()) == flat(saved.state_dict())


def test_of_a_file_for_another_model_the_weights_are_named(tmp_path):
    content = {"model": {"layer.weight": torch.ones(5, 5)}, "ema": {"decay": torch.tensor([0.9]), "shadow": LIST}}
    torch.save(content, tmp_path / "weights.pt")
    said = r"has weights for 0 of the 2 tensors of this model.* Its names begin with layer.weight, the model's"
    with pytest.raises(CheckpointError, match=said):
        load_fitting(tmp_path / "weights.pt", nn.Linear(2, 3), ALONE)


def test_a_file_without_names_of_tensors_holds_no_weights(tmp_path):
    torch.save({"ema": {"decay": 0.9, "shadow": LIST}, "state": {0: torch.ones(2)}}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="holds no weights: give a state_dict of names and tensors"):
        load_fitting(tmp_path / "weights.pt", nn.Linear(2, 3), ALONE)
