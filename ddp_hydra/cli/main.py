"""The command line: Hydra composes a config, and `main` runs it as one job."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.errors import CompactHydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig

from ddp_hydra import __version__, forked
from ddp_hydra.cli import compose
from ddp_hydra.cli.compose import layered, read_words
from ddp_hydra.cli.resumed import OWN_CONFIGS, typed_elsewhere
from ddp_hydra.config import project, schema, unknown_keys
from ddp_hydra.config.hydra_compat import MAIN, typed_words
from ddp_hydra.console import signals, text
from ddp_hydra.errors import ConfigError
from ddp_hydra.job.run_dir import remove_unused
from ddp_hydra.job.summary import explain
from ddp_hydra.rank import fork_client
from ddp_hydra.rank.torchrun import note_failure
from ddp_hydra.storage.files import cannot_write
from ddp_hydra.sweep import launcher
from ddp_hydra.writers.run_dir import is_full

INTERRUPTED = 130
COMMANDS = {
    "attach": "commands.attach",
    "evaluate": "inference.evaluate_and_print",
    "export": "export.export",
    "generate": "export.generate",
    "init": "commands.init",
    "predict": "inference.predict_and_print",
    "runs": "runs.main",
    "warm": "commands.warm",
}
"""First words that name a command instead of a job, and the function of this package that runs it."""

_ONLY_PRINT = ("help", "hydra_help", "cfg", "info", "shell_completion")
"""Options of Hydra with which no job runs."""
_MAKERS = ("run_job", "save_config", "setup", "sweep", "save")
"""Functions that make and first write a run directory: of Hydra, the launcher, the sweepers, and OmegaConf."""


def main(cfg: DictConfig) -> float | None:
    signals.leave_tidily()
    forked.resume_garbage()
    hydra_cfg = HydraConfig.get()
    run_dir = Path(hydra_cfg.runtime.output_dir)
    try:
        schema.check_whole(cfg)
        with whole_output() if cfg.dry_run else nullcontext():
            return run_in(run_dir, cfg, hydra_cfg)
    finally:
        if hydra_cfg.mode == RunMode.RUN:
            remove_unused(run_dir, hydra_cfg.output_subdir)


def run_in(run_dir: Path, cfg: DictConfig, hydra_cfg: Any) -> float | None:
    from ddp_hydra.cluster import connect
    from ddp_hydra.job.run import run_job

    if not connect.is_local(cfg.cluster):
        fork_client.release()  # the server that __main__ has started on a guess
    if hydra_cfg.mode == RunMode.MULTIRUN:  # else it was checked as it was composed
        loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
        unknown_keys.check_typed(cfg, hydra_cfg, loader)
        if cfg.results.mirror:
            cfg.results.mirror = f"{cfg.results.mirror.rstrip('/')}/{hydra_cfg.job.num}"  # a folder for each job
        if cfg.detach:
            raise ConfigError("detach=true: a sweep has to know how its jobs end: leave it out")
    return run_job(cfg, run_dir, typed_words(hydra_cfg))


def entry() -> None:
    """Train, or run the command that the first word names, and end this process.

    Exit codes: 0 done, 1 failed, 130 interrupted.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"ddp_hydra {__version__}, hydra-core {hydra.__version__}")  # noqa: T201
        return
    code = report(run_command if sys.argv[1:2] and sys.argv[1] in COMMANDS else compose_and_run)
    if "triton" not in sys.modules:  # torch loads it, and its C library prints each object that is never freed
        gc.freeze()  # Python looks for garbage as it ends, in all modules, for 0.2 s
    sys.exit(code)


def run_command() -> None:
    """Run the command that the first word names. Only that one is imported, because some import torch."""
    module, _, function = COMMANDS[sys.argv[1]].partition(".")
    command = getattr(importlib.import_module(f"ddp_hydra.cli.{module}"), function)
    forked.resume_garbage()
    with nullcontext() if sys.argv[1] == "attach" else whole_output():  # it shows a training, and ends as that does
        command(sys.argv[2:])


@contextmanager
def whole_output() -> Iterator[None]:
    """Refuse a regular end of the block if standard output, for which it was typed, is not whole."""
    end = None
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        end = error
    if (reason := signals.unwritten()) is not None:
        raise cannot_write("standard output", reason)
    if end is not None:
        raise end


def compose_and_run() -> None:
    signals.leave_at_once()
    signals.leave_at_once(project.make_importable(project.layers()))
    schema.register()
    sys.argv[1:] = read_words(sys.argv[1:])
    given, unknown = get_args_parser().parse_known_args(sys.argv[1:])
    if options := [word for word in unknown if word.startswith("-")]:
        raise ConfigError(unknown_keys.no_option(options[0]))
    if given.config_path is not None:  # no file of a run says that it was typed
        raise ConfigError(
            f"--config-path={given.config_path}: the main folder of configs is the project's conf: "
            "give --config-dir=<folder>, whose configs win over the project's"
        )
    try:
        with (
            layered(given.config_dir) as folder,
            compose.listed_without_copies(),
            compose.composed_once(given.multirun),
            compose.checked_as_composed(),
            compose.saved_without_secrets(),
            errors_raised(),
            whole_output() if any(getattr(given, option) for option in _ONLY_PRINT) else nullcontext(),
        ):
            hydra.main(config_path=str(folder), config_name="config", **MAIN)(main)()
    except ValueError as error:
        if "trials are completed" not in str(error):  # of Optuna, whose sweeper asks for the best one
            raise
        launcher.end_without_values(error)
    finally:
        launcher.close_all()  # Hydra does not tell a launcher when its sweep is over


def report(run: Callable[[], None]) -> int:
    with signals.lasting(), signals.handled(signal.default_int_handler):
        try:
            run()
        except KeyboardInterrupt as error:
            print(str(error) or "interrupted", file=sys.stderr)  # noqa: T201
            return INTERRUPTED
        except Exception as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
            else:
                print(f"ddp_hydra: {error_message(error)}", file=sys.stderr)  # noqa: T201
            note_failure(error_message(error))
            return 1
    return 0


def error_message(error: Exception) -> str:
    if isinstance(error, OverrideParseException) and "=" not in str(error.override):
        word = str(error.override)
        if word in COMMANDS:
            options = f"options of Hydra, as --config-dir, are for a training: {OWN_CONFIGS}"
            return f"{word} is a command, and a command comes first: type ddp-hydra {word} …; {options}"
        near = text.meant(word, COMMANDS) or "."
        return (
            f"{word!r} is no command, nor key=value{near} The commands are "
            f"{', '.join(COMMANDS)}; ddp-hydra alone trains, ddp-hydra --help shows the keys"
        )
    if isinstance(error, OSError) and not isinstance(error, CompactHydraException) and _is_of_run_dir(error):
        advice = "give another with hydra.run.dir=<folder>, or hydra.sweep.dir=<folder> for a sweep"
        reason = ": ".join(filter(None, (error.strerror, error.filename)))  # Hydra's multirun.yaml: without a name
        return f"the run directory can't be made ({reason}): {'free some space there, or ' * is_full(error)}{advice}"
    return explain(error) + typed_elsewhere(error, sys.argv[1:])


def _is_of_run_dir(error: OSError) -> bool:
    """Return whether Hydra, or a launcher, could not make the folder of a run or sweep, or write its config there."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame.name for frame in frames if frame.filename == __file__]
    by = next((frame.name for frame in reversed(frames) if "pathlib" not in frame.filename), "")
    return compose_and_run.__name__ in ours and main.__name__ not in ours and by in _MAKERS


@contextmanager
def errors_raised() -> Iterator[None]:
    """Let Hydra raise errors inside the block instead of printing them, so that all are reported in the same way."""

    def value_of(result: JobReturn) -> Any:  # Hydra's own property also prints all overrides
        if result.status == JobStatus.FAILED:
            raise result._return_value
        return result._return_value

    original: Any = JobReturn.return_value
    with (
        env_override({"HYDRA_FULL_ERROR": "1"}),
        compose.patched(JobReturn, "return_value", property(value_of, original.fset)),
    ):
        yield
