from __future__ import annotations

import linecache
import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from ddp_hydra.console import text
from ddp_hydra.dispatch.call import Call, Script, check_arguments, pickled, pickled_call
from ddp_hydra.errors import ConfigError


def test_a_function_that_uses_torch_and_says_classes_is_pickled():
    space = {"torch": torch}
    exec("def f(data):\n    return torch.tensor([len(data.classes), len(data.ops)])", space)
    function = space["f"]
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(function)

    class Data:
        classes, ops = "ab", "c"

    loaded, data = cloudpickle.loads(pickled((function, Data())))
    assert loaded(data).tolist() == [2, 1]


@pytest.mark.parametrize(("file", "shown"), [("train.py", "train.py"), ("/tmp/ipykernel_1/2.py", "cell [3]")])
def test_code_of_a_script_or_a_notebook_keeps_its_file_and_its_lines(file, shown, monkeypatch):
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={"/tmp/ipykernel_1/2.py": 3}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(linecache, "cache", {})
    source = "def fails():\n    return [1, 2][5]\n\ncalls = lambda: [fails() for _ in range(2)]\n"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    space = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), space)
    sent = pickled(space["calls"])
    linecache.cache.clear()  # as on a host without the file
    with pytest.raises(IndexError) as caught:
        cloudpickle.loads(sent)()
    assert text.user_location(caught.value) == f"{shown}, line 2, in fails"
    assert text.raised_at(caught.value).endswith("IndexError: list index out of range\n    return [1, 2][5]")


async def asynchronous(): ...


def generator():
    yield 1


async def both():
    yield 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call(asynchronous), "asynchronous is async, which"),
        (Call(generator), "generator is a generator, which"),
        (Call(both), "both is an async generator, which"),
        (Call("train.py"), r"'train\.py' is a file: give dispatch\.script\('train\.py'\)"),
        (Call(Script("/a/t.py", b""), ("--epochs", 2)), r"dispatch\.script\('t\.py', '--epochs', 2\)"),
        (Call(Script("/a/t.py", b""), (), {"lr": 1}), r"dispatch\.script\('t\.py', '--lr', 1\)"),
        (Call(3), r"3 can't be called: give a function"),
    ],
)
def test_what_a_rank_would_not_run_is_refused(call, said):
    with pytest.raises(ConfigError, match=said):
        check_arguments(call)


def test_an_open_text_file_is_named(tmp_path):
    said = r"argument 1 \(a TextIOWrapper\) can't be sent to the ranks .*: make it inside the function"
    with (tmp_path / "lines.txt").open("w+") as file, pytest.raises(ConfigError, match=said):
        pickled_call(print, (file,), {})
