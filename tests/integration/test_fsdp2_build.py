"""How a model comes into the shards of `parallel=fsdp2`: its bits, and the memory that each process needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.integration

MIB = 2**20


def this_world() -> Any:
    """On a rank: its world."""
    import os

    import torch.distributed as dist

    from ddp_hydra.rank.world import World

    group = dist.group.WORLD
    return World(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]), group, group, "gloo")


def trainer(**changes: Any) -> Any:
    """Return the keys of `trainer` that a model is built by."""
    from omegaconf import OmegaConf

    known = {"precision": "fp32", "channels_last": None, "compile": None, "freeze": [], "activation_checkpointing": []}
    return OmegaConf.create(known | changes)


def peak_of(call: Callable[[], Any]) -> int:
    """Return by how many bytes the memory of this process grows at most."""
    from pathlib import Path

    def read(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    call()
    return read("VmHWM") - before


def build_large(file: str) -> dict[str, int]:
    """On each rank: the growth of memory while a model of 192 MiB is built, is built for a checkpoint, and is loaded
    from a file of rank 0."""
    import ctypes
    import gc

    import torch
    from torch import nn

    from ddp_hydra.training import sharded_checkpoint
    from ddp_hydra.training.parallel.fsdp2 import FSDP2

    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, MIB)  # what a tensor gives back is no longer this process's

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(48)))

    FSDP2(this_world()).build(trainer(), lambda: nn.Linear(4, 4), torch.device("cpu"))  # imports half of torch
    found = {}
    names = {f"{number}.0.{name}" for number in range(48) for name in ("weight", "bias")}
    for name, saved in (("fresh", ()), ("resumed", names)):
        parallel = FSDP2(this_world())
        arguments = trainer(), make, torch.device("cpu"), None, saved
        found[name] = peak_of(lambda parallel=parallel, arguments=arguments: parallel.build(*arguments))
        assert {one.to_local().device.type for one in parallel.model.parameters()} == {"cpu"}
        del arguments
        if name == "fresh":
            del parallel
        gc.collect()
    world = this_world()
    if world.rank == 0:
        torch.save({"model": {name: torch.full(one.shape, 2.0) for name, one in make().state_dict().items()}}, file)

    def load() -> None:
        content = sharded_checkpoint.send(lambda: torch.load(file, mmap=True), world)
        assert set(content["model"]) == names
        parallel.load(sharded_checkpoint.with_parts(content, world, parallel.read_targets()))

    for one in parallel.model.parameters():
        one.to_local().detach().zero_()  # all pages are there
    found["loaded"] = peak_of(load)
    assert all(one.to_local().eq(2).all() for one in parallel.model.parameters())
    return found


def test_only_one_process_has_the_whole_model_and_none_for_a_checkpoint(client2, gang, tmp_path):
    """96 MiB are a shard. A process that has all of the model and its shard grows by 288 MiB."""
    first, second = gang(client2, backend="gloo").run(build_large, str(tmp_path / "file.pt"))
    assert second["loaded"] < 150 * MIB  # its shares
    assert first["loaded"] < (192 + 150) * MIB  # these, and the file, which is mapped
    assert 192 * MIB < first["fresh"] < 330 * MIB
    assert second["fresh"] < 150 * MIB
    assert max(first["resumed"], second["resumed"]) < 150 * MIB


def build_odd() -> list[str]:
    """On each rank: names of models whose shards differ from the model that the seed makes."""
    import torch
    from torch import nn

    from ddp_hydra.data.draws import seed_all
    from ddp_hydra.training.parallel.fsdp2 import FSDP2

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
            self.other.weight = self.first.weight
            self.register_buffer("rates", torch.arange(5.0), persistent=False)

    class Drawn(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.register_buffer("noise", torch.randn(3), persistent=False)
            self.also = torch.randn(2)

    class Reads(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.norm = float(self.weight.detach().norm())

    class Copies(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.first = self.weight.detach().clone()
            self.register_buffer("start", self.bias.detach().clone())

    class Orthogonal(nn.Linear):  # without values, torch leaves out a buffer
        def __init__(self) -> None:
            super().__init__(4, 7)
            nn.utils.parametrizations.orthogonal(self)

    class Counted(nn.Linear):
        number = 0

        def __init__(self) -> None:
            super().__init__(5, 3)
            Counted.number += 1
            self.scale = float(Counted.number)

    def made(kind: type[nn.Module]) -> nn.Module:
        seed_all(7)
        Counted.number = 0
        return make(kind)

    def make(kind: type[nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 5), kind())

    def everything(model: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = dict(model.named_buffers())
        for name, module in model.named_modules():
            found |= {
                f"{name}.{key}": one for key, one in vars(module).items() if isinstance(one, torch.Tensor | float)
            }
        for name, one in model.named_parameters(remove_duplicate=False):
            found[name] = one.full_tensor() if hasattr(one, "full_tensor") else one.detach()
        return found

    wrong = []
    for kind in (Tied, Drawn, Reads, Copies, Orthogonal, Counted):
        for state in ({}, made(kind).state_dict(), {"0.weight": None}):  # the last lacks most, so it is built
            parallel = FSDP2(this_world())
            seed_all(7)
            Counted.number = 0
            parallel.build(trainer(), lambda kind=kind: make(kind), torch.device("cpu"), None, state)
            if len(state) > 1:
                parallel.load({"model": state})
            found, wanted = everything(parallel.model), everything(made(kind))
            wrong += [
                f"{kind.__name__}: {name}"
                for name in wanted
                if not torch.equal(*map(torch.as_tensor, (found[name], wanted[name])))
            ]
        if kind is Tied:
            assert parallel.model[1].other.weight is parallel.model[1].first.weight
    return wrong


def test_models_that_need_values_of_their_parameters_have_them(client4, gang):
    assert gang(client4, ranks=3, backend="gloo").run(build_odd) == [[]] * 3


def read_from_a_file(replicas: int) -> list[list[int]]:
    """On each rank: the rows that it has read of a model that reads its weights."""
    import torch
    from torch import nn

    from ddp_hydra.training.parallel import Parallel
    from ddp_hydra.training.parallel.fsdp2 import FSDP2

    whole = nn.Linear(4, 5)
    taken = []

    def make() -> nn.Module:
        def read_rows(name: str, begin: int, end: int) -> torch.Tensor:
            taken.append([begin, end])
            return whole.get_parameter(name).detach()[begin:end]

        model = nn.Linear(4, 5)
        model.read_rows = read_rows
        return model

    torch.manual_seed(3)
    nn.init.normal_(whole.weight)
    nn.init.normal_(whole.bias)
    alone = Parallel()
    alone.build(trainer(), make, torch.device("cpu"))
    assert torch.equal(alone.model.weight, whole.weight)
    taken.clear()
    parallel = FSDP2(this_world(), replicas=replicas)
    parallel.build(trainer(), make, torch.device("cpu"))
    assert torch.equal(parallel.model.weight.full_tensor(), whole.weight)
    assert torch.equal(parallel.model.bias.full_tensor(), whole.bias)
    rows = list(taken)

    def load(model: nn.Module, _: Any) -> list[str]:
        assert torch.equal(model.weight, whole.weight)
        with torch.no_grad():
            model.bias.fill_(7.0)  # of a file that goes before the model's own
        return []

    loaded = FSDP2(this_world(), replicas=replicas)
    loaded.build(trainer(), make, torch.device("cpu"), load)
    assert torch.equal(loaded.model.weight.full_tensor(), whole.weight)
    assert loaded.model.bias.full_tensor().eq(7).all()
    return rows


def test_a_model_may_read_the_rows_of_its_shards(client4, gang):
    assert gang(client4, ranks=3, backend="gloo").run(read_from_a_file, 1) == [[[0, 2]] * 2, [[2, 4]] * 2, [[4, 5]] * 2]
    assert gang(client4, ranks=4, backend="gloo").run(read_from_a_file, 2)[2:] == [[[0, 3]] * 2, [[3, 5]] * 2]


def build_pretrained(folder: str) -> list[list[str]]:
    """On each rank: the parameters of which it has read rows of a pretrained model, without and with an adapter."""
    import torch
    from torch import nn

    from ddp_hydra.finetune import adapter, models
    from ddp_hydra.training.parallel.fsdp2 import FSDP2

    whole = dict(models.causal_lm(folder).named_parameters())
    taken: list[str] = []

    def make(adapts: bool) -> nn.Module:
        model: nn.Module = models.causal_lm(folder)
        if adapts:
            return adapter.lora(model, target_modules=["q_proj"])
        if (read := getattr(model, "read_rows", None)) is not None:
            model.read_rows = lambda name, *rows: [taken.append(name), read(name, *rows)][1]
        return model

    found = []
    for adapts in (False, True):
        parallel = FSDP2(this_world())
        parallel.build(trainer(), lambda adapts=adapts: make(adapts), torch.device("cpu"))
        for name, parameter in parallel.model.named_parameters():
            value, wanted = parameter.full_tensor(), whole.get(name.replace(".base_layer", ""))
            assert wanted is None or (value.dtype == torch.float32 and torch.equal(value, wanted)), name
        found.append(sorted(taken))
        taken.clear()
    return found


def test_ranks_read_their_rows_of_a_pretrained_model(client2, gang, tmp_path):
    """Its files are bf16, and its parameters fp32: no process makes a copy of all of it."""
    from tests.support.tiny_llm import llama

    model = llama().bfloat16()
    model.save_pretrained(tmp_path / "base")
    names = sorted(name for name, _ in model.named_parameters())
    assert gang(client2, backend="gloo").run(build_pretrained, str(tmp_path / "base")) == [[names, []]] * 2
