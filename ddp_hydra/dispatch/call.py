"""Describes the function that the ranks of one attempt run: checks its arguments, and pickles both."""

from __future__ import annotations

import importlib
import inspect
import io
import itertools
import linecache
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from distributed import Future

from ddp_hydra.console.signals import printed
from ddp_hydra.console.text import printable
from ddp_hydra.errors import ConfigError
from ddp_hydra.pickler import Pickler
from ddp_hydra.rank.spec import GangSettings
from ddp_hydra.record import Log, Record

MOST_PARTS = 1024
"""How many parts of a collection among the arguments are looked at."""


def show(record: Record) -> None:
    """Print the output of rank 0."""
    if isinstance(record.data, Log) and record.rank == 0:
        printed(printable(record.data.text, is_output=True))


@dataclass(frozen=True)
class Call:
    """A function that each rank of an attempt calls, and its arguments.

    Args:
        fn: the function, or "module:name".
        args: passed to it.
        kwargs: passed to it.
        files: files of the client that rank 0 needs; if there are any, `fn` is called with files={name: path there}.
    """

    fn: Callable[..., Any] | str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)


def signature_of(fn: Callable[..., Any] | str) -> inspect.Signature | None:
    """Return the signature of a function; None where it is not known, as for a name."""
    try:
        return inspect.signature(fn) if callable(fn) else None
    except (TypeError, ValueError):  # some functions that are written in C
        return None


_NOT_RUN: dict[str, Callable[[Any], bool]] = {
    "async": inspect.iscoroutinefunction,
    "a generator": inspect.isgeneratorfunction,
    "an async generator": inspect.isasyncgenfunction,
}


def check_arguments(call: Call) -> None:
    """Check that the function takes the arguments, before any rank is started.

    Raises:
        ConfigError: it does not take them; the message names settings of the gang that are among them.
    """
    if not callable(call.fn) and not isinstance(call.fn, str):
        raise ConfigError(f"{call.fn!r:.100} can't be called: give a function, 'module:name' or dispatch.script(path)")
    if isinstance(call.fn, str) and call.fn.endswith(".py"):
        raise ConfigError(f"{call.fn!r} is a file: give dispatch.script({call.fn!r}), or a function, 'module:name'")
    if isinstance(call.fn, Script) and (call.args or call.kwargs):
        options = [part for name, value in call.kwargs.items() for part in (f"--{name}", value)]
        typed = ", ".join(map(repr, (Path(call.fn.path).name, *call.args, *options)))
        raise ConfigError(f"a script's arguments are given to script: dispatch.run(client, dispatch.script({typed}))")
    for kind in (kind for kind, is_kind in _NOT_RUN.items() if is_kind(call.fn)):
        name = getattr(call.fn, "__name__", "")
        raise ConfigError(f"{name} is {kind}, which a rank would not run: give a function with a return")
    if _holds_future((call.args, dict(call.kwargs)), set()):
        raise ConfigError("an argument holds a Dask future, which ranks can't read: give its value, future.result()")
    signature = signature_of(call.fn)
    if signature is None:
        return
    given = {**call.kwargs, **({"files": None} if call.files else {})}
    try:
        of_world = [None] if getattr(call.fn, "in_world", False) else []
        signature.bind(*of_world, *call.args, **given)
    except TypeError as error:
        name = getattr(call.fn, "__name__", type(call.fn).__name__)
        settings = (*GangSettings.__struct_fields__, "on_record", "run_dir", "files", "project")
        mine = [setting for setting in settings if setting in given and setting not in signature.parameters]
        advice = f"{name}{signature} is what it takes"
        if mine:
            typed = ", ".join(f"{setting}=..." for setting in mine)
            advice = f"give settings of the gang to Gang: dispatch.Gang(client, {typed}).run({name}, ...)"
        raise ConfigError(f"{name} can't be called with these arguments: {error}; {advice}") from None


def _holds_future(value: Any, seen: set[int]) -> bool:
    # Of long collections, the first parts are looked at; `seen`: a collection may hold itself.
    if isinstance(value, Future):
        return True
    if type(value) not in (list, tuple, set, frozenset, dict) or id(value) in seen:
        return False
    seen.add(id(value))
    parts = value.values() if type(value) is dict else value
    return any(_holds_future(part, seen) for part in itertools.islice(parts, MOST_PARTS))


def pickled_call(fn: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a function for the ranks, and its arguments.

    Raises:
        ConfigError: one of them can't be pickled; the message names it.
    """
    try:
        return pickled((fn, args, kwargs))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        parts = [(f"argument {number}", "", value) for number, value in enumerate(args, start=1)]
        parts += [(f"the argument {name}", "", value) for name, value in kwargs.items()]
        if inspect.isfunction(fn):
            used = inspect.getclosurevars(fn)
            where = f", which {fn.__name__}() uses,"
            parts += [(name, where, value) for name, value in {**used.globals, **used.nonlocals}.items()]
        named = (f"{name} (a {type(value).__name__}){where}" for name, where, value in parts if not _can_pickle(value))
        what = next(named, str(fn))
        raise ConfigError(
            f"{what} can't be sent to the ranks ({type(error).__name__}: {error}): make it inside the function"
        ) from error


def _can_pickle(value: Any) -> bool:
    try:
        pickled(value)
    except Exception:
        return False
    return True


def pickled(value: Any) -> bytes:
    """Pickle a value, with functions of scripts and notebooks by their content."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(Pickler):
    """Pickles modules of any class by their name, and code with its file's name and text.

    cloudpickle looks for submodules by the names in a function, and finds `torch.classes` in one that only says
    `torch.nn` and `dataset.classes`. That is an object of a class of its own, which it cannot pickle. It calls all
    code <dynamic-code>, so errors of a script's or a notebook's functions would have no place.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.sources: dict[str, tuple[str, str]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, CodeType):
            name = obj.co_filename
            if name not in self.sources:  # one object for all functions of a file: it is pickled once
                self.sources[name] = cell_name(name), "".join(linecache.getlines(name))
            make, parts = super().dispatch_table[CodeType](obj)
            return code_of_file, (make, parts, *self.sources[name])
        return super().reducer_override(obj)


def cell_name(file: str) -> str:
    """Return "cell [3]" for the name that IPython has given to the code of a cell; any other name unchanged."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(file)
    return file if number is None else f"cell [{number}]"


def code_of_file(make: Callable[..., CodeType], parts: tuple[Any, ...], name: str, source: str) -> CodeType:
    """Return code that tracebacks show with its source, also where its file is not."""
    if source:
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    return make(*parts).replace(co_filename=name)


# -- scripts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """A script that is sent as it is in its file.

    It gets the environment that torchrun would give it, and makes its process group itself, with
    `torch.distributed.init_process_group()`, Lightning, Accelerate or whatever it uses.

    Args:
        path: of the file on the client.
        content: of the file.
        args: for its `sys.argv`.
        module: its name, where it is run as `python -m` runs it; "" for a script.
    """

    path: str
    content: bytes
    args: tuple[str, ...] = ()
    module: str = ""

    def __call__(self) -> None:
        """Run the script as `__main__`, under its path, also where its file is edited meanwhile.

        A host without the file gets one in a temporary folder, for libraries that read it. Exit code 0 means success.
        """
        with ExitStack() as stack:
            path = Path(self.path)
            if not path.exists():
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ddp_hydra-"))) / path.name
                path.write_bytes(self.content)
            sys.argv = [str(path), *self.args]
            package = self.module.rpartition(".")[0]
            depth = len(package.split(".")) if package else 0
            sys.path.insert(0, str(path.parents[min(depth, len(path.parents) - 1)]))
            code = compile(self.content, str(path), "exec", dont_inherit=True)
            lines = self.content.decode(errors="replace").splitlines(keepends=True)
            linecache.cache[str(path)] = len(self.content), None, lines, str(path)  # for tracebacks
            main, before = ModuleType("__main__"), sys.modules["__main__"]
            main.__file__ = str(path)
            main.__package__ = package or None
            if self.module:  # processes that it spawns import it by this name
                main.__spec__ = ModuleSpec(self.module, None, origin=str(path))
            sys.modules["__main__"] = main
            try:
                exec(code, main.__dict__)  # noqa: S102, this is what it is for
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
            finally:
                sys.modules["__main__"] = before


def script(path: str | Path, *args: object) -> Script:
    """Read a script, for `dispatch.run(client, dispatch.script("train.py", "--epochs", 2))`.

    Args:
        path: of the file. What it imports must be installed on the workers, or lie in its folder there. "-m": the first
            argument is the name of a module, as for `python -m`; its package must be there on the workers.
        args: its arguments.

    Raises:
        ConfigError: there is no such file or module.
    """
    module = ""
    if str(path) == "-m":
        module, *args = [*map(str, args)] or [""]  # type: ignore[assignment]
        path, module = _file_of(module)
    file = Path(path).absolute()
    try:
        return Script(str(file), file.read_bytes(), tuple(map(str, args)), module)
    except OSError as error:
        raise ConfigError(
            f"the script {file} can't be read ({error.strerror}): give the path of a Python file"
        ) from None


def _file_of(module: str) -> tuple[str, str]:
    """Return the file of a module and its name; of a package, its `__main__`. Nothing is imported."""
    places: Any = [str(Path.cwd()), *sys.path]
    found = None
    for number, _ in enumerate(parts := module.split(".")):
        found = PathFinder.find_spec(".".join(parts[: number + 1]), places) if places else None
        places = found.submodule_search_locations if found is not None else None
    if places:
        return _file_of(f"{module}.__main__")
    if found is None or found.origin is None:
        raise ConfigError(f'script("-m", {module!r}): there is no such module in this folder, nor an installed one')
    return found.origin, module
