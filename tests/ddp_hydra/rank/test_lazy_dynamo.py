"""Stand-ins for torch._dynamo: of a small one, and of the real one in a process of its own."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddp_hydra.rank import lazy_dynamo

NAME = lazy_dynamo.NAME
FILES = {
    "__init__": "from . import config, trace_rules, utils\ndef disable(fn, recursive=True, **kw): return 'marked'\n",
    "config": "level = 3\n",
    "trace_rules": "clear_lru_cache = None\n",
    "utils": "def get_optimize_ddp_mode(): return 'real'\ndef is_compile_supported(device): return device == 'cuda'\n",
    "unused": "from torch._dynamo import config\n",
}


@pytest.fixture
def torch(tmp_path, monkeypatch) -> Iterator[ModuleType]:
    """A torch with a small torch._dynamo, whose import has been put off."""
    folder = tmp_path / "torch" / "_dynamo"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    torch = ModuleType("torch")
    torch.__file__, torch.__path__ = str(folder.parent / "__init__.py"), [str(folder.parent)]
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    importlib.invalidate_caches()
    lazy_dynamo.put_off()
    yield torch
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]


def is_put_off(torch: ModuleType) -> bool:
    assert torch._dynamo is sys.modules[NAME]
    return isinstance(torch._dynamo, lazy_dynamo.StandIn)


def marks_as_torch_does(function: Any) -> Any:
    """Call `disable` from where torch marks its own functions."""
    scope: dict[str, Any] = {"__name__": "torch._compile", "fn": function}
    exec("import torch._dynamo\nmarked = torch._dynamo.disable(fn, True, wrapping=False)", scope)
    setattr(function, lazy_dynamo.MARK, scope["marked"])
    return scope["marked"]


def test_it_answers_what_training_asks(torch):
    def step(): ...

    assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
    torch._dynamo.trace_rules.clear_lru_cache()
    torch._dynamo.graph_break()
    assert marks_as_torch_does(step) is step
    assert not hasattr(torch._dynamo, "__wrapped__")
    assert inspect.getsourcefile(torch._dynamo) == str(Path(torch.__file__).parent / "_dynamo" / "__init__.py")
    assert is_put_off(torch)


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("import torch._dynamo; found = torch._dynamo.config.level", 3),
        ("import torch._dynamo.config as config; found = config.level", 3),
        ("from torch._dynamo import config; found = config.level", 3),
        ("from torch._dynamo.config import level as found", 3),
        ("import torch._dynamo.unused; found = torch._dynamo.unused.config.level", 3),
        ("import torch._dynamo; found = torch._dynamo.disable(print, reason='mine')", "marked"),
    ],
)
def test_it_gives_way_to_the_real_one(torch, statement, value):
    scope: dict[str, Any] = {}
    exec(statement, scope)
    assert scope["found"] == value
    assert not is_put_off(torch)


def test_each_module_is_imported_once(torch):
    (Path(torch.__file__).parent / "_dynamo" / "config.py").write_text("import sys; sys.modules['torch'].seen += 1\n")
    torch.seen = 0
    config = importlib.import_module(f"{NAME}.config")
    assert torch.seen == 1
    assert config.__spec__ is not None
    assert config.__spec__.origin == config.__file__


def test_who_found_a_stand_in_before_is_served_by_the_real_one(torch):
    stand_in, utils, supported = torch._dynamo, torch._dynamo.utils, torch._dynamo.utils.is_compile_supported
    assert supported("cuda")
    assert not is_put_off(torch)
    assert stand_in.config.level == 3
    assert utils.is_compile_supported("cuda")
    with pytest.raises(AttributeError, match=r"'torch._dynamo' has no attribute 'nonsense'"):
        _ = stand_in.nonsense


def test_what_was_not_marked_is_marked_when_it_is_called_again(torch):
    def step(): ...

    marks_as_torch_does(step)
    _ = torch._dynamo.config
    assert not hasattr(step, lazy_dynamo.MARK)
    assert marks_as_torch_does(step) == "marked"


def test_an_import_that_fails_may_be_tried_again(torch):
    place = Path(torch.__file__).parent / "_dynamo" / "config.py"
    text = place.read_text()
    place.write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            _ = torch._dynamo.config
        assert is_put_off(torch)
    place.write_text(text + "# mended\n")
    assert torch._dynamo.config.level == 3


def test_a_module_that_does_not_exist_is_not_found(torch):
    with pytest.raises(ModuleNotFoundError, match=r"torch\._dynamo\.nonsense"):
        importlib.import_module(f"{NAME}.nonsense")


@pytest.mark.medium
def test_a_fork_that_needs_it_has_the_next_ones_find_it(torch):
    lazy_dynamo.import_if_wanted()
    assert is_put_off(torch)
    pid = os.fork()
    if pid == 0:
        os._exit(torch._dynamo.config.level)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert is_put_off(torch)
    lazy_dynamo.import_if_wanted()
    assert not is_put_off(torch)
    lazy_dynamo.import_if_wanted()


def test_what_has_been_imported_is_left_alone(torch):
    importlib.import_module(f"{NAME}.config")
    lazy_dynamo.put_off()
    assert not is_put_off(torch)


REAL = """
import torch
from ddp_hydra.rank import lazy_dynamo
lazy_dynamo.put_off()
import torchvision
model = torch.nn.Linear(3, 1)
for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())):
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
assert isinstance(torch._dynamo, lazy_dynamo.StandIn)
mode = torch._dynamo.utils.get_optimize_ddp_mode()
compiled = torch.compile(model, backend="eager")
assert torch.equal(compiled(torch.ones(3)), model(torch.ones(3)))
assert not isinstance(torch._dynamo, lazy_dynamo.StandIn)
assert torch._dynamo.utils.counters["frames"]["ok"] == 1
assert torch._dynamo.utils.get_optimize_ddp_mode() == mode
optimizer.zero_grad()
assert getattr(torch.optim.Optimizer.zero_grad.__wrapped__, lazy_dynamo.MARK)._torchdynamo_disable
"""


@pytest.mark.slow
@pytest.mark.medium
def test_the_real_one_comes_when_something_is_compiled():
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    ended = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
