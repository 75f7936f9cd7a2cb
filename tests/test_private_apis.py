"""Names of other packages that begin with an underscore, or are in no documentation: each is listed with its use.

Such a name may go with any release. One that a public call can replace has no place here.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ddp_hydra", "hydra_plugins", "models", "data")
PRIVATE = re.compile(r"_[a-z][a-z0-9_]*|_[A-Z]\w*")
FOREIGN = ("client", "scheduler", "dask_scheduler", "worker", "dask_worker", "torch", "dist", "os", "sys")
"""Names of variables and modules whose private names belong to others, although we have some of the same name."""
ALLOWED = {
    # Dask
    "_run": "client.run takes no time limit, and Client.sync with this does",
    "_run_on_scheduler": "as _run",
    "_broker": "topics of a scheduler: records are dropped when they are sent, and the topic with the gang",
    "_topics": "as _broker",
    "_created": "process ids of a LocalCluster's workers, which are ended where the cluster hangs",
    "_instances": "a LocalCluster that is given up is not closed again at the end of the program",
    "_loop_runner": "as _created",
    # torch
    "_BatchNorm": "base of all batch norms, which SyncBatchNorm replaces",
    "_C": "names of torch's own classes of tensors",
    "_backward_hooks": "hooks of parameters, which a sharded model would not call, are refused",
    "_check_reducer_finalized": "a last micro-batch that leaves weights out is told in its step, not in the next one",
    "_buffers": "a tied buffer stays tied when a model is moved",
    "_call_end_callbacks_on_future": "the profiler's span of an average ends with it",
    "_checkpoint_offset": "where a tensor's bytes are in a file: they are read once; torch copies them twice",
    "_slice_file": "as _checkpoint_offset: the part of a file of DCP's that holds a tensor",
    "_dynamo": "put off until something is compiled: 1.1 of 3.3 s of CPU time, and 150 MiB, of the fork server",
    "_foreach_copy_": "one kernel for all parameters",
    "_foreach_lerp_": "one kernel for all parameters",
    "_foreach_mul_": "one kernel for all parameters",
    "_foreach_norm": "one kernel for all parameters",
    "_get_ddp_logging_data": "the times of DDP's communication",
    "_iterator": "workers of a user's DataLoader are ended with the rank",
    "_shutdown_workers": "as _iterator",
    "_optimizer_step_post_hooks": "a hook of an optimizer may draw random numbers, which torch's own optimizers don't",
    "_optimizer_step_pre_hooks": "as _optimizer_step_post_hooks",
    "_metadata": "versions of layers, which a state dict carries",
    "_non_persistent_buffers_set": "a buffer that the average takes from the model is saved only if it is there",
    "_no_split_modules": "the blocks of a model of Transformers",
    "_profiler_enabled": "spans only where somebody records them",
    "_python_dispatch": "tells tensors that are wrapped from plain ones",
    "_pytree": "nested inputs of an export",
    "_subclasses": "tensors with shapes alone, for what a step would keep",
    "_schedulers": "the schedulers in SequentialLR and ChainedScheduler",
    "_set_params_and_buffers_to_ignore_for_model": "DDP does not broadcast what no backend can send",
    # transformers
    "_attn_implementation": "the name of an attention that does not keep packed documents apart, for a message",
    # torchmetrics, datasets
    "_reductions": "states of a metric are gathered also from ranks without samples",
    "_ex_iterable": "the place of a Hugging Face stream",
    # Hydra and omegaconf
    "_internal": "Hydra's loader of configs, and its files of a job",
    "_get_full_key": "the dotted key of a node, for messages",
    "_get_parent": "whether a node is the whole config",
    "_get_root": "the whole config of a node, to show the text of an interpolation",
    "_get_node": "a node without resolving it",
    "_return_value": "what a job has returned or raised; return_value raises",
    "_save_config": "no secret is written into .hydra",
    "_utils": "the YAML dumper of omegaconf",
    # IPython
    "_filename_map": "the number of a notebook's cell, for tracebacks",
    # Python
    "_clear": "exit handlers of the parent are not those of a fork",
    "_run_exitfuncs": "exit handlers of user code are called at the end of a fork",
    "_config": "the folder of multiprocessing, which a fork removes at its end; its finalizers would wait for queues",
    "_registered_with_atexit": "as _clear, for weakref.finalize",
    "_registry": "as _clear, for weakref.finalize",
    "_register_atexit": "runs end before the pools of threads that save them, where handlers of atexit come too late",
    "_shutdown": "threads of user code are joined at the end of a fork",
    "_exit": "a fork ends without what its parent has on its stack",
    "_getframe": "which module asks the stand-in of torch's compiler",
    "_remote_traceback": "the traceback of a job's process, kept by Hydra's launchers",
}


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Return the private names that a module defines: functions, classes, variables, attributes and arguments."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.keyword(arg=str(name)):
                found.add(name)
    return found


def foreign_names(nodes: list[ast.AST]) -> set[str]:
    """Return the private names of what a variable's name tells to be of another package."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name) if owner in FOREIGN:
                found.add(name)
    return {name for name in found if PRIVATE.fullmatch(name)}


def used_names(nodes: list[ast.AST]) -> set[str]:
    """Return the private names of objects and modules that a module reads, sets or imports."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.ImportFrom(names=names, module=module):
                found |= {alias.name for alias in names} | set(str(module).split("."))
            case ast.Import(names=names):
                found |= {part for alias in names for part in alias.name.split(".")}
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "patched"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                found.add(name)
    return {name for name in found if PRIVATE.fullmatch(name)}


def files() -> dict[str, list[ast.AST]]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): list(ast.walk(ast.parse(path.read_text()))) for path in paths}


@pytest.mark.medium
def test_private_names_of_other_packages_are_listed():
    parsed = files()
    own = set().union(*map(own_names, parsed.values()))
    used: dict[str, list[str]] = defaultdict(list)
    for path, nodes in parsed.items():
        for name in (used_names(nodes) - own) | foreign_names(nodes):
            if not name.startswith("_ddp_hydra"):
                used[name].append(path)
    unlisted = {name: paths for name, paths in sorted(used.items()) if name not in ALLOWED}
    assert not unlisted, "list what these are for, or use a public call"
    assert sorted(ALLOWED.keys() - used.keys()) == [], "these are used no more"


@pytest.mark.medium
def test_a_name_that_is_not_listed_is_found():
    text = "from torch import _new\nclient._run(x)\nx.job._there\ngetattr(y, '_hidden')\nself._mine = 1"
    nodes = list(ast.walk(ast.parse(text)))
    assert used_names(nodes) - own_names(nodes) == {"_new", "_run", "_there", "_hidden"}
    assert foreign_names(nodes) == {"_run"}
