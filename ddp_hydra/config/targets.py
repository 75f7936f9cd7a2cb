"""Looks up the project's own `_target_`s in its source files, before a cluster is started; instantiates all on ranks.

The error for a mistake in a file that a rank would import (a syntax error, a missing import, a misspelt class) names
the file, the line and the most similar name.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object
from omegaconf import DictConfig, open_dict

from ddp_hydra.config import redact
from ddp_hydra.config.hydra_compat import instantiate
from ddp_hydra.config.project import PACKAGES
from ddp_hydra.config.schema import TOP
from ddp_hydra.console import text
from ddp_hydra.console.text import expanded
from ddp_hydra.errors import ConfigError, DdpHydraError


def check(config: dict[str, Any], roots: Sequence[Path], installed_here: bool) -> None:
    sources = Sources(roots, installed_here)
    for key, target in redact.values_of(config):
        # A node of the user's own is built where a part of the job refers to it, and then stands there, too.
        is_built = key.rpartition(".")[2] == "_target_" and key.partition(".")[0] in TOP
        if is_built and isinstance(target, str):
            try:
                sources.check_target(target, installed_here and not key.startswith("cluster."))
            except ConfigError as error:
                raise ConfigError(f"{key}={target}: {error}") from None


class Sources:
    """Reads the modules of a project space without importing them; a module of an earlier layer wins."""

    def __init__(self, roots: Sequence[Path], installed_here: bool) -> None:
        self.roots, self.installed_here = roots, installed_here
        self.trees: dict[Path, ast.Module] = {}

    def check_target(self, target: str, installed_here: bool) -> None:
        parts = tuple(target.split("."))
        if parts[0] not in PACKAGES:
            needed = ("transformers", "peft") if installed_here and target.startswith(FINETUNE) else ()
            if lacking := [package for package in needed if not is_installed(package)]:
                raise ConfigError(f"it needs {' and '.join(lacking)}: type pip install 'ddp-hydra[finetune]'")
            if "/" in target:
                raise ConfigError(f"a class is named with dots: give {target.replace('/', '.')}")
            if installed_here and not is_installed(parts[0]):
                meant = self.in_project(parts)
                raise ConfigError(f"did you mean {meant}?" if meant else self.not_installed(parts[0]))
            return
        size = 0
        while size < len(parts) and (self.find(parts[: size + 1]) or self.is_folder(parts[: size + 1])):
            size += 1
        if size == len(parts):
            raise ConfigError(f"it is a module: give a class or function of it, {target}.<name>")
        self.check_names(parts[:size], parts[size : size + 1], is_last=size + 1 == len(parts))

    def check_names(self, module: tuple[str, ...], names: Sequence[str], is_last: bool = True) -> None:
        """Refuse names that a module of the project does not have; if they are not the last, they may be modules."""
        path = self.find(module)
        if path is None and not self.is_folder(module):
            raise self.no_module(module)
        known = defined(self.read(path).body) if path else set()
        for name in names:
            if inner := self.find((*module, name)):
                self.read(inner)
            elif known is not None and name not in (*known, "*") and not self.is_folder((*module, name)):
                if path is None or (path.name == "__init__.py" and not is_last):
                    raise self.no_module((*module, name))
                raise ConfigError(f"{self.shown(path)} has no {name}{_hint(name, known)}")

    def find(self, module: Sequence[str]) -> Path | None:
        bases = [root.joinpath(*module) for root in self.roots if module]
        paths = (path for base in bases for path in (base / "__init__.py", base.with_suffix(".py")))
        return next((path for path in paths if path.is_file()), None)

    def is_folder(self, parts: Iterable[str]) -> bool:
        return any(root.joinpath(*parts).is_dir() for root in self.roots)

    def in_project(self, parts: tuple[str, ...]) -> str | None:
        """Return the whole name of a module, or of a class or function, that is named without its folder."""
        first = re.compile(rf"^(class|def) {re.escape(parts[0])}\b", re.MULTILINE)
        for folder in (root / package for root in self.roots for package in PACKAGES):
            for path in sorted(folder.glob("*.py")):
                if path.stem == parts[0] and len(parts) > 1:
                    return f"{folder.name}.{'.'.join(parts)}"
                if len(parts) == 1 and first.search(path.read_text(encoding="utf-8", errors="replace")):
                    return f"{folder.name}.{path.stem}.{parts[0]}"
        return None

    def not_installed(self, package: str) -> str:
        near = text.meant(package, PACKAGES, cutoff=0.6)
        for path in (path for root in self.roots for path in (root / package, root / f"{package}.py")):
            if path.exists():
                return (
                    f"{path.name} is outside of models/ and data/, and only these travel to the ranks: "
                    f"put it into models/, and import it as models.{package}"
                )
        return f"there is no package {package}{near or ': install it'}"

    def no_module(self, parts: tuple[str, ...]) -> ConfigError:
        paths = [path for root in self.roots for path in root.joinpath(*parts[:-1]).glob("[!_]*")]
        names = [path.stem for path in paths if path.suffix == ".py" or path.is_dir()]
        near = text.meant(parts[-1], names, "".join(f"{part}." for part in parts[:-1]), cutoff=0.6)
        return ConfigError(f"there is no {'/'.join(parts)}.py{near or f' in {self.roots[0]}'}")

    def shown(self, path: Path) -> str:
        return next(path.relative_to(root).as_posix() for root in self.roots if path.is_relative_to(root))

    def read(self, path: Path) -> ast.Module:
        if path not in self.trees:
            source = path.read_bytes()
            try:
                with warnings.catch_warnings(action="ignore"):
                    tree = ast.parse(source, str(path))
                    compile(tree, str(path), "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                raise ConfigError(describe_syntax(error, self.shown(path))) from None
            self.trees[path] = tree
            for statement in tree.body:  # an import inside a `try` or an `if` may fail on purpose
                self.check_import(path, statement)
        return self.trees[path]

    def check_import(self, path: Path, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import):
            modules: list[tuple[tuple[str, ...], list[str]]]
            modules = [(tuple(alias.name.split(".")), []) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            package = tuple(self.shown(path).split("/")[:-1])
            base = package[: len(package) - statement.level + 1] if statement.level else ()
            module = tuple(statement.module.split(".")) if statement.module else ()
            modules = [((*base, *module), [alias.name for alias in statement.names])]
        else:
            return
        for module, names in modules:
            try:
                if module and module[0] in PACKAGES:
                    self.check_names(module, names)
                elif module and self.installed_here and not is_installed(module[0]):
                    raise ConfigError(self.not_installed(module[0]))
            except ConfigError as error:
                message = str(error)
                where = f"{self.shown(path)}, line {statement.lineno}: "
                raise ConfigError(message if ", line " in message else where + message) from None


def explain(target: str, error: BaseException) -> str:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, SyntaxError):
        return describe_syntax(cause, text.user_path(cause.filename or "") or str(cause.filename))
    if where := text.raised_at(cause):
        return where
    parts = target.split(".")
    for size in range(len(parts) - 1, 0, -1):
        if module := sys.modules.get(".".join(parts[:size])):
            return f"{module.__name__} has no {parts[size]}{_hint(parts[size], vars(module))}"
    return str(cause)


def describe_syntax(error: Exception, path: str) -> str:
    if not isinstance(error, SyntaxError):
        return f"{path}: {error}"
    line = f"\n    {error.text.strip()}" if error.text else ""
    return f"{path}, line {error.lineno}: {type(error).__name__}: {error.msg}{line}"


def defined(body: Iterable[ast.stmt]) -> set[str] | None:
    """Return the names that a module's statements define; None if only running them would tell."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        else:
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            inner = defined(part for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node)
            names |= {"*"} if inner is None else inner
    return None if names & {"*", "__getattr__", "globals", "exec", "setattr"} else names


FINETUNE = "ddp_hydra.finetune."
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def is_pretrained(model: Any) -> bool:
    return str(model.get("_target_")).startswith(f"{FINETUNE}models.")


def check_pretrained(config: Mapping[str, Any]) -> None:
    """Refuse a folder of a pretrained model that is not there, and a quantised model that would be trained itself."""
    model = config["model"]
    if not is_pretrained(model):
        return
    path = str(model.get("path"))
    if (folder := expanded(path)).is_dir():
        check_folder(folder)
    elif not HUB_NAME.fullmatch(path):
        raise ConfigError(f"model.path={path}: there is no such folder: give one, or <owner>/<name> of the hub")
    if model.get("load_in_4bit"):
        if "_target_" not in (config.get("adapter") or {}):
            raise ConfigError("model.load_in_4bit=true: quantised weights can't be trained: give adapter=lora, too")
        if str(config.get("parallel", {}).get("_target_")).endswith("fsdp2.FSDP2"):
            raise ConfigError(
                "model.load_in_4bit=true: parallel=fsdp2 can't share quantised weights: give parallel=ddp"
            )
        if not is_installed("bitsandbytes"):
            raise ConfigError("model.load_in_4bit=true needs bitsandbytes: type pip install bitsandbytes")


def check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        kind = "it holds an adapter: give its base model" if is_adapter else "it is no folder of a model"
        raise ConfigError(f"model.path={folder} has no config.json: {kind}")


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False
    except ValueError:  # a module without a spec, such as __main__ of a sweep's processes
        return package in sys.modules


def _hint(name: str, names: Iterable[str]) -> str:
    if near := text.meant(name, sorted(set(names)), cutoff=0.5):
        return near
    shown = ", ".join(sorted(one for one in names if not one.startswith("_"))[:12])
    return f"; it has {shown}" if shown else ""


def make(node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    # If the class refuses an argument, raise its message as a ConfigError.
    try:
        # Arguments go past Hydra, which would copy each into a config.
        return prepared(node)(*args, **kwargs)
    except DdpHydraError:
        raise
    except InstantiationException as error:
        if error.__cause__ is None or isinstance(error.__cause__, (ImportError, AttributeError)):
            raise ConfigError(f"{node.get('_target_')}: {explain(str(node.get('_target_')), error)}") from error
        raise
    except (OSError, ValueError, TypeError, LookupError, ImportError, AttributeError) as error:
        if text.may_pass(error) and not text.is_ours(error):  # our stores have tried again
            error.add_note(f"raised while {node.get('_target_')} was made")
            raise
        raise ConfigError(f"{node.get('_target_')}: {reason_of(error, node)}") from error


def make_function(node: DictConfig, **kwargs: Any) -> Any:
    # As `make`. With `_partial_: true`, the target itself is the function that is made, as for `instantiate`.
    if not node.get("_partial_"):
        return make(node, **kwargs)
    if said := not_taken(node):
        raise ConfigError(f"{node.get('_target_')}: {said}")
    return functools.partial(prepared(node), **kwargs)


def reason_of(error: Exception, node: DictConfig) -> str:
    told = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
    said = text.raised_at(error) or not_taken(node) or not_given(node, error) or told or type(error).__name__
    first, newline, rest = said.partition("\n")
    advice = ": for a tensor, give {_target_: torch.tensor, data: [...]}" if "ListConfig" in first else ""
    if isinstance(error, TypeError) and re.search(r"\bstr\b", first) and (texts := _number_texts(node)):
        advice = f': {texts[0]} is a text: give a number, or "${{oc.decode:${{oc.env:<NAME>}}}}" of a variable'
    return f"{first}{advice}{newline}{rest}"


def _number_texts(node: DictConfig) -> list[str]:
    """Return the arguments that are texts, and read like numbers: ["lr='0.1'"]."""
    found: list[str] = []
    for key, value in node.items():
        if isinstance(value, str) and not redact.named_secret(str(key)):
            with contextlib.suppress(ValueError):
                float(value)
                found.append(f"{key!s}={value!r}")
    return found


def prepared(node: DictConfig) -> Callable[..., Any]:
    # Hydra copies a node several times before it calls the target, which takes milliseconds. Of a node with plain
    # values only, nothing is left to do but to find the target.
    with contextlib.suppress(Exception):  # Hydra says what is wrong with it
        values = {str(key): value for key, value in node.items()}
        target = values.pop("_target_")
        is_plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in values.values())
        if isinstance(target, str) and is_plain and not any(key.startswith("_") for key in values):
            return functools.partial(get_object(target), **values)
    return instantiate(node, _partial_=True)


def without(node: DictConfig, keys: Iterable[str]) -> DictConfig:
    # `OmegaConf.masked_copy` has no place: interpolations of other parts find nothing, and messages name half a key.
    copied = copy.copy(node)
    with open_dict(copied):
        for key in keys:
            del copied[key]
    return copied


def not_taken(node: DictConfig) -> str:
    taken = parameters(str(node.get("_target_")))
    if not taken or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return ""
    refused = [str(key) for key in node if key not in taken and not str(key).startswith("_")]
    if not refused:
        return ""
    names = [name for name in taken if name not in ("self", "params")]
    hints = "".join(text.meant(key, names) for key in refused)
    leave_out = " ".join(f"'~{node._get_full_key(key)}'" for key in refused)
    there = text.after(hints, f"it takes {', '.join(names)}")
    return f"it takes no {', '.join(refused)}{there}. To leave the others out, type {leave_out}"


def not_given(node: DictConfig, error: Exception) -> str:
    if not re.search(r"missing \d+ required", str(error)):
        return ""
    target, key = str(node.get("_target_")), node._get_full_key(None)
    words = [f"+{key}.{name}=<value>" for name in re.findall(r"'(\w+)'", str(error))]
    if key == "loss" and inspect.isfunction(get_object(target)):  # meant as the loss itself, as cross_entropy is
        words = ["loss._target_=hydra.utils.get_method", f"+loss.path={target}"]
        words += [f"'~loss.{name}'" for name in map(str, node) if name != "_target_"]
    return f"{error}: give {' '.join(words)}"


def parameters(target: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(get_object(target)).parameters
    except (ValueError, ImportError, TypeError, InstantiationException):
        return {}


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, one in inspect.signature(function).parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def init_parameters(target: str) -> set[str]:
    taken: set[str] = set()
    for base in getattr(get_object(target), "__mro__", ()):
        if "__init__" in vars(base):
            own = inspect.signature(base.__init__).parameters
            taken |= own.keys()
            if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in own.values()):
                break
    return taken
