"""Reads what a job takes from its config: whether it can run, its project, files, the settings of its gang."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.cluster import connect
from ddp_hydra.config import project, rank_batch, redact, targets, unknown_keys, validate
from ddp_hydra.config.hydra_compat import variables_of_job
from ddp_hydra.console.text import expanded
from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.rank import fault_injection, torchrun
from ddp_hydra.rank.spec import GangSettings
from ddp_hydra.storage.manifest import SUFFIX
from ddp_hydra.storage.run_ref import RunRef
from ddp_hydra.storage.urls import FORMATS

PATHS = {
    *("bucket", "chat_template", "files", "index", "path", "root", "source", "table", "tokenizer", "urls"),
    *("val_files", "val_index", "val_table", "val_urls"),
}
"""Keys of data sets that hold paths, or lists of them."""
_OWN_PATHS = re.compile(
    r"data\.(.*\.)?(annotations(_file)?|csv(_file)?|data_dir|db|file|folder|img_dir|root_dir)(\.\d+)?"
)
"""Matches keys that often hold paths in data sets of one's own."""
DOWNLOADS = ".resume"
"""The folder of a run directory for checkpoints of a store that it begins with, until it ends."""
LOG_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"
"""Hydra's own."""
KEEP_WARM_S = 300.0
WARM_VARIABLE = "DDP_HYDRA_KEEP_WARM_S"
"""Environment variable that replaces `KEEP_WARM_S`, for machines where nothing may stay behind a command."""


def check(cfg: DictConfig) -> None:
    unknown_keys.check(cfg)
    validate.check(cfg)
    validate.logger_nodes(cfg)
    fault_injection.parse(cfg.faults)
    if cfg.data.get("global_batch") is not None:
        each, workers = ranks_per_worker(cfg), cfg.cluster.get("n_workers")
        ranks = cfg.dispatch.ranks or (workers * each if workers and isinstance(each, int) else 0)
        if ranks := 1 if connect.is_inline(cfg.cluster) else ranks:
            rank_batch.asked(cfg, ranks)


def packed_project(cfg: DictConfig, config: dict[str, Any]) -> project.Project:
    roots, is_here = project.layers(), connect.is_local(cfg.cluster) or connect.is_inline(cfg.cluster)
    targets.check(config, roots, is_here)
    if is_here:
        targets.check_pretrained(config)
    return project.pack(*roots)


def find_paths(cfg: DictConfig) -> None:
    """Write whole paths of a pretrained model and of files of the data into the config, of those that are there.

    So, too, runs and checkpoints that the job begins with, where it has another current folder than the command had.
    Ranks and later commands may have another current folder, with other files of the same names.
    """
    found = [("model.path", cfg.model.get("path"))] if targets.is_pretrained(cfg.model) else []
    for key, value in [*found, *redact.values_of(OmegaConf.to_container(cfg.data), "data.")]:
        path = whole_path(key, value, project.typed_in())
        if path != value and (is_path(key) or is_in_no_other(cfg, key, value)):
            OmegaConf.update(cfg, key, path)
    if project.typed_in() != Path.cwd():  # hydra.job.chdir=true
        for key, given in (("resume", cfg.resume), ("model.weights", weights_path(cfg))):
            if given and not (named := RunRef.own(given)).is_stored:
                OmegaConf.update(cfg, key, str(project.typed_in() / named.place))


def is_path(key: str) -> bool:
    return key == "model.path" or (key.startswith("data.") and bool(PATHS & set(key.split(".")[-2:])))


def is_in_no_other(cfg: DictConfig, key: str, value: str) -> bool:
    """Return whether no other key of the same data set, as `root`, names a folder that holds a path of this name, too.

    False, too, for keys that hold dots or are numbers, which can't be selected.
    """
    own = re.sub(r"(\.\d+)+$", "", key)
    parent = own.rpartition(".")[0]
    if OmegaConf.select(cfg, key) != value:
        return False
    keys = [one for name in OmegaConf.select(cfg, parent) if (one := f"{parent}.{name}") != own]
    others = [OmegaConf.select(cfg, one, throw_on_resolution_failure=False) for one in keys]
    folders = [project.typed_in() / expanded(one) for one in others if isinstance(one, str) and one]
    return not any(os.path.lexists(one / value) for one in folders)


def whole_path(key: str, value: Any, folder: Path) -> Any:
    """Return a value with the folder that it is relative to, if there are such files; another value as it is.

    A word is the name of a bucket. One without a suffix names no folder of an index or a table, which are files. Of
    keys that are not known, only a text with a slash that names a file is a path.
    """
    if not isinstance(value, str) or value in ("", *FORMATS) or re.search(r"\$\{|://", value):
        return value
    is_file = key.endswith(("index", "table")) and not Path(value).suffix
    if "/" not in value and (key.endswith(".bucket") or (is_file and (folder / value).is_dir())):
        return value
    path = str(folder / expanded(value))
    if not is_path(key):
        path += "/" * value.endswith("/")  # the data set may append a name
        if not _OWN_PATHS.fullmatch(key) and not ("/" in value and os.path.isfile(path)):  # noqa: PTH113, of any text
            return value
    pattern = re.sub(r"\{[^}]*\}", "*", path)  # of webdataset: {000..127}
    is_there = os.path.lexists(path) or any(glob.iglob(pattern, recursive=True))  # noqa: PTH207, it is whole
    return path if is_there else value


def find_resume(cfg: DictConfig, run_dir: Path) -> Path:
    found = RunRef.named(cfg.resume).checkpoint("last", run_dir / DOWNLOADS, cfg.results.retry_s)
    if found.is_file() and not is_zipfile(found):
        raise CheckpointError(f"{cfg.resume} can't be read as a checkpoint: give a run directory, or its step file")
    return found


def find_weights(cfg: DictConfig, run_dir: Path) -> Path | None:
    """Return the file that `model.weights` names, of a run its best checkpoint; None for pretrained weights' names."""
    if (given := weights_path(cfg)) is None:
        return None
    ref = RunRef.named(given)
    if not ref.is_stored and not Path(ref.place).exists():
        raise CheckpointError(f"model.weights={given}: there is no such file, nor a run directory")
    return ref.checkpoint("best", run_dir / DOWNLOADS, cfg.results.retry_s)


def check_files(cfg: DictConfig) -> None:
    """Refuse a checkpoint of this machine that the job can't begin with. One in a store is not downloaded."""
    given, find = (cfg.resume, find_resume) if cfg.resume else (weights_path(cfg), find_weights)
    if given and not RunRef.named(given).is_stored:
        find(cfg, Path())


def weights_path(cfg: DictConfig) -> str | None:
    given = cfg.model.get("weights") if isinstance(cfg.model, DictConfig) else None
    if not isinstance(given, str):
        return None
    is_there = os.path.lexists(project.typed_in() / given)
    return given if is_there or {"/", os.sep} & set(given) or given.endswith((SUFFIX, f"{SUFFIX}h")) else None


def backend(cfg: DictConfig) -> str:
    """Return the backend of the process group: gloo for ranks that compute on the CPU, so that they use no GPU."""
    # A remote job's config has texts instead of enums.
    given, device = (getattr(one, "value", one) for one in (cfg.dispatch.backend, cfg.trainer.device))
    return "gloo" if given == "auto" and device == "cpu" else str(given)


def gang_settings(cfg: DictConfig, **more: Any) -> GangSettings:
    settings = OmegaConf.to_container(cfg.dispatch, enum_to_str=True)
    assert isinstance(settings, dict)
    own = {
        "ranks_per_worker": ranks_per_worker(cfg),
        "keep_warm_s": keep_warm_s(cfg),
        "threads": cfg.trainer.threads,
        "data_workers": OmegaConf.select(cfg, "data.workers"),
        "sweep": connect.sweep(),
        "retry_s": cfg.results.retry_s,
        "backend": backend(cfg),
    }
    return GangSettings.make({str(name): value for name, value in settings.items()} | own | more)


def settings_of_hydra(hydra_cfg: Any = None) -> dict[str, Any]:
    """Return the settings of a gang that Hydra's part of a config gives.

    Args:
        hydra_cfg: None for that of the job that Hydra runs here.
    """
    if hydra_cfg is None:
        hydra_cfg = HydraConfig.get() if HydraConfig.initialized() else OmegaConf.create({})
    job = hydra_cfg.get("job") or {}
    cwd = {"cwd": str(hydra_cfg.runtime.output_dir)} if job.get("chdir") else {}
    return {"log_config": rank_log_config(hydra_cfg), "variables": variables_of_job(job), **cwd}


def rank_log_config(hydra_cfg: Any) -> dict[str, Any]:
    """Return how ranks log, as `logging.config.dictConfig` takes it; {} where Hydra is to set up no logging.

    Levels and format are those of `hydra.job_logging` and `hydra.verbose`. All goes to a rank's stderr, which is its
    log: files of the command are not for several processes, or may be on another host.
    """
    given, verbose = hydra_cfg.get("job_logging") or OmegaConf.create({}), hydra_cfg.get("verbose", False)
    root = given.get("root", OmegaConf.create({"level": "INFO"}))
    if root is None or root.get("handlers") == []:
        return {}
    loggers: dict[str, Any] = {}
    for name, one in (given.get("loggers") or {}).items():
        loggers[str(name)] = {key: one[key] for key in ("level", "propagate") if key in one}
    if not isinstance(verbose, bool):
        names = [verbose] if isinstance(verbose, str) else verbose
        loggers |= {str(name): {**loggers.get(str(name), {}), "level": "DEBUG"} for name in names}
    handlers = given.get("handlers") or {}
    used = [handlers[name] for name in root.get("handlers") or () if name in handlers]
    console = next((one for one in used if str(one.get("class")).endswith("StreamHandler")), OmegaConf.create({}))
    handler = {"class": "logging.StreamHandler", "formatter": "ranks", "stream": "ext://sys.stderr"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"ranks": _rank_formatter(given, console.get("formatter"))},
        "handlers": {"stderr": handler | {key: console[key] for key in ("level",) if key in console}},
        "root": {"level": "DEBUG" if verbose is True else root.get("level", "WARNING"), "handlers": ["stderr"]},
        "loggers": loggers,
    }


def _rank_formatter(given: DictConfig, name: str | None) -> dict[str, Any]:
    """Return the formatter "ranks" of a configuration of logging, or `name`; Hydra's where a rank lacks its fields."""
    formatters = given.get("formatters") or {}
    found: Any = next((formatters[one] for one in ("ranks", name) if one in formatters), {})
    options = {str(key): found[key] for key in ("format", "datefmt", "style") if found.get(key)}
    try:  # a class of its own, a filter or defaults may fill fields, as of colours
        made = logging.Formatter(options["format"], options.get("datefmt"), options.get("style", "%"))
        made.format(logging.makeLogRecord({}))
    except (KeyError, ValueError):
        return {"format": LOG_FORMAT}
    return {"format": LOG_FORMAT} if "()" in found or "class" in found else options


def ranks_per_worker(cfg: DictConfig) -> int | str:
    given: int | str = cfg.dispatch.ranks_per_worker
    if given != "auto" or not connect.is_local(cfg.cluster):
        return given
    place = torchrun.find_place() if connect.is_torchrun(cfg.cluster) else None
    return place.local_world_size if place else 1


def check_faults(cfg: DictConfig, faults: Sequence[str], ranks: int) -> None:
    is_here = connect.is_inline(cfg.cluster)
    kinds = ["worker"] * is_here + ["nanny", "term"] * (is_here or connect.is_local(cfg.cluster))
    fault_injection.check(faults, ranks, without=kinds)


def keep_warm_s(cfg: DictConfig) -> float:
    if cfg.dispatch.keep_warm_s is not None:
        return float(cfg.dispatch.keep_warm_s)
    if not connect.is_local(cfg.cluster) or connect.is_torchrun(cfg.cluster):
        return 0.0
    given = os.environ.get(WARM_VARIABLE) or str(KEEP_WARM_S)
    try:
        return float(given)
    except ValueError:
        raise ConfigError(f"{WARM_VARIABLE}={given}: give seconds, such as 300, or 0") from None
