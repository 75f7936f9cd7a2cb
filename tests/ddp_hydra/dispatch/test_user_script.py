from __future__ import annotations

import sys
import traceback

import pytest

from ddp_hydra.dispatch import call
from ddp_hydra.errors import ConfigError


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("here", [b"\xff", b"of somebody else", None], ids=repr)
def test_the_text_that_was_sent_runs_where_the_host_has_another_file_or_none(here, tmp_path):
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_text("import pathlib, sys\npathlib.Path(sys.argv[1]).write_text('it ran')")
    script = call.script(path, out)
    path.unlink() if here is None else path.write_bytes(here)
    script()
    assert out.read_text() == "it ran"
    assert (sys.argv[0] == str(path)) is (here is not None)


def test_a_script_that_is_edited_finds_what_is_beside_it(tmp_path):
    path, main = tmp_path / "train.py", sys.modules["__main__"]
    (tmp_path / "beside_the_script.py").write_text("X = 5")
    path.write_text(
        "import beside_the_script, sys\nsys.modules['__main__'].beside_the_script\nraise ValueError(__file__)"
    )
    script = call.script(path)
    path.write_text("edited")
    with pytest.raises(ValueError, match=r"train\.py") as caught:
        script()
    assert str(caught.value) == str(path)
    assert "raise ValueError(__file__)" in "".join(traceback.format_exception(caught.value))
    assert sys.modules["__main__"] is main


def test_a_script_has_the_encoding_that_it_names(tmp_path):
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_bytes(
        b"# -*- coding: latin-1 -*-\nimport pathlib, sys\npathlib.Path(sys.argv[1]).write_text(ascii('\xe9'))"
    )
    call.script(path, out)()
    assert out.read_text() == r"'\xe9'"


@pytest.mark.parametrize("name", ["tulips.train", "tulips", "alone"])
def test_a_module_is_run_as_python_runs_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import pathlib, sys\nimport tulips.of_the_package as of\n" + (
        "" if name == "alone" else "from . import of_the_package as same\nassert same is of\n"
    )
    (tmp_path / "tulips").mkdir()
    for file in ("tulips/train.py", "tulips/__main__.py", "alone.py"):
        (tmp_path / file).write_text(text + "pathlib.Path(sys.argv[1]).write_text(__name__ + of.COLOUR)")
    (tmp_path / "tulips/of_the_package.py").write_text("COLOUR = ' red'")
    script, before = call.script("-m", name, tmp_path / "out"), sys.modules["__main__"]
    assert "tulips" not in sys.modules
    script()
    assert (tmp_path / "out").read_text() == "__main__ red"
    assert sys.modules["__main__"] is before
    for module in [module for module in sys.modules if module.partition(".")[0] == "tulips"]:
        del sys.modules[module]


@pytest.mark.parametrize("name", ["tulips.missing", "missing.train", ""])
def test_a_module_that_is_not_there_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tulips").mkdir()
    with pytest.raises(ConfigError, match=f"'{name}'\\): there is no such module in this folder"):
        call.script("-m", name)


@pytest.mark.medium
@pytest.mark.parametrize("path", ["roses/train.py", "-m"])
def test_what_it_spawns_imports_it_as_python_does(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roses").mkdir()
    (tmp_path / "roses/colours.py").write_text("COLOUR = 'red'")
    (tmp_path / "roses/train.py").write_text(
        "import multiprocessing, pathlib, sys\n"
        f"from {'.' if path == '-m' else ''}colours import COLOUR\n"
        "def write(path):\n    pathlib.Path(path).write_text(COLOUR + ' ' + __name__)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=write, args=sys.argv[1:])\n"
        "    child.start()\n    child.join()\n"
    )
    call.script(path, *["roses.train"] * (path == "-m"), tmp_path / "out")()
    assert (tmp_path / "out").read_text() == "red __mp_main__"
    for module in [module for module in sys.modules if module.partition(".")[0] in ("roses", "colours")]:
        del sys.modules[module]
