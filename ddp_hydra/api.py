"""The same as the command, from Python and from notebooks: runs a job, looks at a run, keeps a cluster for jobs."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.utils import env_override
from hydra.types import RunMode
from msgspec import to_builtins
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.cli import inference
from ddp_hydra.cli.compose import compose, read_words
from ddp_hydra.cli.resumed import environment_of
from ddp_hydra.cli.words import ONE_RUN, SWEEP, key_of
from ddp_hydra.cluster import connect as cluster
from ddp_hydra.cluster.connection import Scheduler, workers_of
from ddp_hydra.config import redact, references
from ddp_hydra.config.experiments import GROUPS
from ddp_hydra.config.hydra_compat import ENV_SET, config_of, hydra_config_of, reads_variable, typed_words, variables_of
from ddp_hydra.config.schema import Handler
from ddp_hydra.config.unknown_keys import explain
from ddp_hydra.console import text
from ddp_hydra.console.signals import held_back, print_line
from ddp_hydra.dispatch import background
from ddp_hydra.errors import ConfigError, Interrupted
from ddp_hydra.job.job_config import settings_of_hydra
from ddp_hydra.job.run import run_job
from ddp_hydra.job.run_dir import HYDRA, has_record, hold, refuse_other_run
from ddp_hydra.job.summary import shown_path
from ddp_hydra.runs.describe import status_of
from ddp_hydra.storage.base import bare_url
from ddp_hydra.storage.files import new_folder, write_atomic
from ddp_hydra.writers.run_dir import locked, read_summary

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


@contextmanager
def interrupted(said: str = "interrupted") -> Iterator[None]:
    """Raise `Interrupted` for each KeyboardInterrupt of the block; `said`: its text, if it has none."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(str(error) or said) from error


class ComposedConfig:
    """Holds the config of a job.

    Args:
        words: overrides, as they are typed in a command line: "optimizer.lr=0.1".
        config_name: the main config; None for that of a run that is resumed, or else "config".

    Attributes:
        cfg: the config, without Hydra's own part.
        overrides: of the job, after the overrides of a run that it resumes.
        run_dir: the folder for its results, a whole path.
        rank_settings: what Hydra's part of the config says of its ranks.

    Raises:
        ConfigError: an argument is not an override, there is no such config, a value has the wrong type,
            or the config makes a sweep.
    """

    @held_back()
    def __init__(self, words: Sequence[str], config_name: str | None = None) -> None:
        is_list = isinstance(words, Sequence) and not isinstance(words, str)  # an iterator would be used up
        if not is_list or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"overrides are {words!r}, and must be a list of texts: ['model=resnet18', 'seed=1']")
        if options := [word for word in words if word.startswith("-")]:
            raise ConfigError(f"{options[0]} is an option of the command; from Python only overrides are taken")
        options = [] if config_name is None else [f"--config-name={config_name}"]
        read = read_words([*options, *words])
        cfg = None if SWEEP in read else compose(read)
        if cfg is None or cfg.hydra.mode is RunMode.MULTIRUN:
            typed = (word for word in words if key_of(word) in ("hparams_search", "hydra.mode"))
            what = next(typed, "hydra.mode=MULTIRUN of the config")
            raise ConfigError(
                f"{what} makes a sweep, and from Python one job is run: a sweep is typed, as ddp-hydra -m; "
                f"for one job leave it out, or add {ONE_RUN}"
            )
        self.overrides = typed_words(cfg.hydra)
        self._whole = whole = references.with_own_hydra(cfg)
        self.run_dir = Path(whole.hydra.run.dir).absolute()  # the program may change its folder
        with read_write(whole.hydra), open_dict(whole.hydra):
            whole.hydra.runtime.output_dir = str(self.run_dir)
        self.rank_settings = settings_of_hydra(whole.hydra)
        self._hydra = OmegaConf.masked_copy(cfg, "hydra")
        with open_dict(cfg):
            del cfg["hydra"]
        self.cfg = self._written = cfg

    def typed_variables(self) -> Container[str]:
        """Return the names of the variables that words set, those of a resumed run included, and no file."""
        return variables_of(list(self._hydra.hydra.overrides.hydra))

    def variables(self) -> dict[str, str]:
        """Return the variables of `hydra.job.env_set`, which Hydra sets for a job.

        Raises:
            ConfigError: one has no value.
        """
        try:
            return {str(name): str(value) for name, value in (self._whole.hydra.job.get("env_set") or {}).items()}
        except OmegaConfBaseException as error:
            raise ConfigError(explain(error) or f"hydra.job.env_set: {str(error).splitlines()[0]}") from error

    def fill_in(self) -> None:
        """Write the values of `${hydra:…}` into `cfg`, where it is not saved: only this job knows them."""
        self.cfg = references.with_values_of_hydra(self._written, self._whole)

    @contextmanager
    def in_its_folder(self) -> Iterator[Path]:
        """Give a job of this process its run directory as the current folder, if `hydra.job.chdir` says so.

        Yields:
            The whole path of the run directory.
        """
        run_dir = self.run_dir
        if self.cfg.dry_run or not (self._whole.hydra.job.chdir and cluster.is_inline(self.cfg.cluster)):
            yield run_dir
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        with hydra_config_of(self._whole), chdir(run_dir):
            yield run_dir

    def save(self) -> None:
        """Write `.hydra/` of the run directory, without secrets, as Hydra does for the command."""
        files = {
            "config.yaml": self._written,
            "hydra.yaml": self._hydra,
            "overrides.yaml": OmegaConf.create(self.overrides),
        }
        contents = {name: references.saved_text(config).encode() for name, config in files.items()}
        if has_record(self.run_dir):
            hold(self.run_dir, {f"{HYDRA}/{name}": content for name, content in contents.items()})
            return
        with new_folder(folder := self.run_dir / HYDRA):
            for name, content in contents.items():
                write_atomic(folder / name, content)


_open: list[Connection] = []


class Connection:
    """Holds a cluster on which the jobs of this process run until it is closed; see `connect`.

    Args:
        overrides: choose the cluster.

    Attributes:
        client: the `distributed.Client`.
        cfg: the part `cluster` of its config, which takes the place of each job's.
    """

    def __init__(self, overrides: Sequence[str]) -> None:
        if _open:
            raise ConfigError("there is a cluster already: close it with .close() before another one is started")
        self._stack = ExitStack()
        job = ComposedConfig(overrides)
        read = references.read_by(lambda key: key.startswith("cluster."), cast(Any, OmegaConf.to_container(job.cfg)))
        for word in overrides:
            is_other = not key_of(word).startswith(("cluster", "hydra", *GROUPS))
            if is_other and not any(references.meet(key_of(word), key) for key in read):
                raise ConfigError(f"{redact.without([word])[0]} is not of the cluster: give it to ddp_hydra.run")
        job.fill_in()
        cfg = job.cfg.cluster
        if cluster.is_inline(cfg):
            raise ConfigError("cluster=inline is not a cluster: leave connect out")
        try:
            self.client: Any = cluster.start(cfg, self._stack, notify=print)
            self.cfg = config_of(cast(Any, OmegaConf.to_container(cfg, resolve=True)))
            address, security = self.client.scheduler.address, self.client.security
            cluster.use_existing(Scheduler(address, security, expected=cfg.get("n_workers")))
        except BaseException:
            self._stack.close()
            raise
        _open.append(self)
        atexit.register(self.close)

    @property
    def dashboard_link(self) -> str:
        """The address of Dask's dashboard."""
        return str(self.client.dashboard_link)

    def close(self) -> None:
        """End the cluster."""
        if self in _open:
            _open.remove(self)
            atexit.unregister(self.close)
            cluster.use_existing(None)
            self._stack.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self not in _open:
            return "<Connection: closed>"
        workers = len(workers_of(self.client))
        return f"<Connection: {workers} workers at {self.client.scheduler.address}>"


def connect(overrides: Sequence[str] = ()) -> Connection:
    """Start a cluster, or connect to one, and run the following jobs of this process on it.

    The second job on a warm cluster starts in a fraction of a second. Use it in a `with`, or call `close()`.

    Args:
        overrides: choose the cluster, as in the command line: ["cluster.n_workers=4"], ["cluster=remote", …].

    Raises:
        ConfigError: there is one already, or a word is not of the cluster.
        ClusterError: it cannot be started, or too few workers came in time.
        Interrupted: it was interrupted; nothing is left of it.
    """
    with interrupted("interrupted: there is no cluster yet"):
        return Connection(overrides)


class Run:
    """Looks at a run by its directory, also while it is written.

    Args:
        folder: the run directory.

    Attributes:
        dir: the run directory.
    """

    def __init__(self, folder: str | Path) -> None:
        if "://" in str(folder):
            raise ConfigError(
                f"{bare_url(str(folder))} is a URL, and Run reads a folder of this machine: copy the run to one"
            )
        self.dir = text.expanded(folder)
        if not self.dir.is_dir():
            raise ConfigError(f"{self.dir} is not a run directory: give one that a run has made, outputs/<date>/<time>")

    @property
    def status(self) -> str:
        """One of `STATUSES` of ddp_hydra/runs/describe.py.

        running, done, paused, stopped (by a rule of its sweep), failed, interrupted; killed: its process ended without
        a summary; lost: it runs on another host and gave no sign of life for 10 minutes; detached: its results are in
        a store; unknown: it has not begun, or belongs to another program.
        """
        return status_of(self.dir)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty before the run has ended."""
        summary = read_summary(self.dir)
        return {} if summary is None else to_builtins(summary)

    @property
    def objective(self) -> float | None:
        """The last value of the objective; None if the run has none yet."""
        summary = self.summary
        return summary.get("metrics", {}).get((summary.get("objective") or {}).get("metric"))

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far: step, epoch, samples, train/loss, val/loss …"""
        path = self.dir / "metrics.jsonl"
        # The last line may be half written.
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @interrupted()
    def metrics(self) -> pd.DataFrame:
        """Return the metrics so far as a table, a row for each step that was logged, in their order.

        What is logged at one step stands in one row: `train/loss` since the row before and, where an epoch ends,
        `train_epoch/loss` over the epoch and the validation's `val/loss`. Where other ranks than 0 have logged, too,
        each has rows of its own, by the column `rank`. A value that is not finite is NaN.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            with held_back():
                import pandas as pd
        except ModuleNotFoundError:
            raise ConfigError("a table needs pandas: pip install 'ddp-hydra[notebook]', or use records()") from None
        rows: dict[Any, dict[str, Any]] = {}
        for number, record in enumerate(self.records()):
            step = record.get("step")
            key = ("row", number) if step is None else (step, record.get("rank", 0))
            row = rows.setdefault(key, {})
            row.update({name: value for name, value in record.items() if value is not None or name not in row})
        table = pd.DataFrame(list(rows.values()))
        # A column that is always null has no numbers by which pandas takes it for one of numbers.
        table = table.astype({name: float for name in table if table[name].isna().all()})
        if "rank" in table:  # lines of rank 0 lack it
            table["rank"] = table["rank"].fillna(0).astype(int)
        order = [name for name in ("step", "rank") if name in table]
        return table.sort_values(order, kind="stable").set_index("step") if "step" in table else table

    @interrupted()
    def plot(self, *names: str, **options: Any) -> Any:
        """Draw curves of metrics over the steps, and return the axes of matplotlib.

        Of a metric that several ranks logged, rank 0's values are drawn, as in TensorBoard.
        `metrics().plot()` of pandas draws no line where a metric is logged at fewer steps than another.

        Args:
            names: of the metrics; by default, the losses of training and validation.
            options: of pandas' `Series.plot`: ax, logy, title …

        Raises:
            ConfigError: pandas or matplotlib is not installed, or no such metric was logged.
        """
        if find_spec("matplotlib") is None:
            raise ConfigError("a curve needs matplotlib: pip install 'ddp-hydra[notebook]'")
        table = self.metrics()
        axes = options.pop("ax", None)
        for name in names or [name for name in ("train/loss", "val/loss") if name in table]:
            if name not in table:
                near = text.meant(name, table.columns) or f": the metrics are {', '.join(table.columns)}"
                raise ConfigError(f"no metric {name!r} was logged{near}")
            logged = table.dropna(subset=[name])
            if "rank" in table:
                logged = logged[logged["rank"] == logged["rank"].min()]
            axes = logged[name].plot(ax=axes, label=name, legend=True, **options)
        return axes

    @interrupted()
    def load_model(self, which: str = "best", overrides: Sequence[str] = ()) -> nn.Module:
        """Return the trained model, in evaluation mode.

        Args:
            which: "best" or "last".
            overrides: changes of the run's config, "data.source=names.json".

        Raises:
            CheckpointError: nothing was saved.
        """
        with held_back():
            from ddp_hydra.training import load_run

        with environment_of(str(self.dir), typed=None):
            return load_run.load(self.dir, which, _checked_changes(overrides)).model

    @interrupted()
    def evaluate(self, *changes: str, which: str = "best", split: str = "val") -> dict[str, float]:
        """Validate the trained model again, or on other data, and return its metrics.

        Args:
            changes: groups and keys of the run's config: "data=wids", "cluster.n_workers=4".
            which: "best" or "last".
            split: the data set of the config, "val" or "train".

        Raises:
            DdpHydraError: nothing was saved, a change does not fit, or it failed.
        """
        return dict(inference.evaluate(str(self.dir), which, split, _checked_changes(changes))["metrics"])

    @interrupted()
    def predict(
        self,
        out: str | Path,
        *changes: str,
        which: str = "best",
        split: str = "val",
        overwrite: bool = False,
        targets: bool = True,
    ) -> Path:
        """Predict a data set with the trained model, and return the file.

        Args:
            out: a .csv, .parquet or .npz file, or a folder of PNGs.
            changes: groups and keys of the run's config: "data=wids", "cluster.n_workers=4".
            which: "best" or "last".
            split: the data set of the config, "val" or "train".
            overwrite: replace `out`.
            targets: add what is true of samples that have labels, as `target`.

        Raises:
            Interrupted: it was interrupted; the same call goes on.
            DdpHydraError: nothing was saved, a change does not fit, or it failed.
        """
        changes = _checked_changes(changes)
        return Path(inference.predict(str(self.dir), out, which, split, overwrite, changes, targets)["out"])

    def __repr__(self) -> str:
        return f"<Run {shown_path(self.dir)}: {self.status}>"


def _checked_changes(changes: Sequence[str]) -> tuple[str, ...]:
    changes = (changes,) if isinstance(changes, str) else tuple(changes)
    for word in changes:
        if not isinstance(word, str):
            raise ConfigError(f"{word!r} is no text: give each change by itself, 'data.batch_size=64', 'seed=1'")
        key, _, value = word.partition("=")
        if key in ("which", "split", "overwrite", "targets"):
            raise ConfigError(f"{word} is no key of the config: give an argument of the method, {key}={value!r}")
    return changes


class StartedRun(Run):
    """A run that this process has started; see `run`.

    Args:
        job: its config.
    """

    def __init__(self, job: ComposedConfig) -> None:
        self.dir = job.run_dir  # a dry run has none
        self._job = job
        self._stop = threading.Event()
        self._error: BaseException | None = None
        # A daemon: the end of the program does not wait for it but stops the job.
        self._thread = threading.Thread(target=self._work, name="ddp_hydra-run", daemon=True)

    def perform(self) -> None:
        """Run the job in this thread."""
        job = self._job
        with interrupted(f"interrupted: {shown_path(self.dir)} has no checkpoint yet"), job.in_its_folder() as run_dir:
            run_job(job.cfg, run_dir, job.overrides, stop=self._stop, rank_settings=job.rank_settings)

    def _work(self) -> None:
        try:
            self.perform()
        except BaseException as error:  # given to whoever waits
            self._error = error
        finally:
            background.forget(self)

    @property
    def status(self) -> str:
        """The status of the run, which is running until its thread has ended; see `Run.status`."""
        return "running" if self._thread.is_alive() else super().status

    @property
    def objective(self) -> float | None:
        """The last value of the objective; None before the end."""
        return super().objective if self.done() else None

    def done(self) -> bool:
        """Return whether the run has ended, well or not."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end; `wait` then raises its `Interrupted`."""
        self._stop.set()

    def _end_with_program(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if not self.done():
            go_on = text.typed("resume", shown_path(self.dir))
            said = f"it has not ended in {background.CLOSE_S:g} s; what it has saved goes on with {go_on}"
        elif self._error is not None:
            said = text.message_of(self._error)
        else:
            return
        print_line(f"the program ends, and the run in {shown_path(self.dir)} with it: {said}")

    def wait(self, timeout_s: float | None = None) -> StartedRun:
        """Wait for the end. An interrupt meanwhile, as by the stop button of a notebook, stops the run.

        Args:
            timeout_s: how long; None for as long as it takes.

        Raises:
            TimeoutError: it has not ended in time; it goes on.
            Interrupted: it was stopped.
            DdpHydraError: it failed.
        """
        if self._thread.ident is None:  # `perform` has run it
            return self
        try:
            self._thread.join(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            self._thread.join()
        if not self.done():
            raise TimeoutError(f"{shown_path(self.dir)} has not ended after {timeout_s:g} s; it goes on")
        if self._error is not None:
            raise self._error
        return self


def _refuse_another_cluster(overrides: Sequence[str], cfg: DictConfig, connected: DictConfig) -> None:
    for word in overrides:
        key = "cluster._target_" if key_of(word) == "cluster" else key_of(word)
        given, used = (
            OmegaConf.select(config, key, throw_on_resolution_failure=False)
            for config in (cfg, OmegaConf.create({"cluster": connected}))
        )
        if key.startswith("cluster.") and given != used:
            raise ConfigError(
                f"{redact.without([word])[0]}: this job runs on the cluster of connect: give it to ddp_hydra.connect, "
                "close the connection first, or type cluster=inline"
            )


def run(overrides: Sequence[str] = (), *, wait: bool = True, config_name: str | None = None) -> StartedRun:
    """Train one job, as `ddp-hydra` does in the current folder.

    Inside `ddp_hydra.connect(...)` it runs on that cluster; otherwise it starts and ends its own.

    Args:
        overrides: as in the command line: ["model=resnet18", "trainer.epochs=3"].
        wait: whether to return when the run has ended; otherwise it goes on in the background. The end of the program
            stops it, as Ctrl-C does.
        config_name: the main config; None for that of a run that is resumed, or else "config".

    Returns:
        The run: `status`, `dir`, `metrics()`, `load_model()`; with `wait=False` also `wait()`, `stop()`, `done()`.

    Raises:
        ConfigError: the config can't be a job.
        DdpHydraError: the job failed.
        Interrupted: it was interrupted, and has saved a checkpoint.
    """
    with interrupted("interrupted: nothing has begun"):
        job = ComposedConfig(overrides, config_name)
        if not wait and (cluster.is_inline(job.cfg.cluster) or job.cfg.results.handler is Handler.cluster):
            what = "cluster=inline" if cluster.is_inline(job.cfg.cluster) else "results.handler=cluster"
            raise ConfigError(f"wait=False with {what}: this runs in the calling thread; leave out wait=False")
        job.rank_settings["variables"] |= (variables := job.variables())
        secret = references.secret_variables(job.cfg)
        for name in [] if wait else variables:
            is_read = name in secret or reads_variable(job.cfg, name)
            if os.environ.get(name) == variables[name] or not is_read:
                continue
            is_typed, is_of_run = name in variables_of(overrides), name in job.typed_variables()
            origin = "" if is_typed else " of the resumed run" if is_of_run else " of the config"
            raise ConfigError(
                f"wait=False: the config reads {name}, and {ENV_SET}.{name}{origin} "
                f"would change the environment of this program, which goes on: set os.environ[{name!r}] to its value "
                f"before, {'' if is_typed else f'give ~{ENV_SET}.{name}, '}or leave out wait=False"
            )
        with env_override(variables if wait else {}):
            job.fill_in()
        if _open and not cluster.is_inline(job.cfg.cluster):
            _refuse_another_cluster(overrides, job.cfg, _open[0].cfg)
            job.cfg.cluster = _open[0].cfg
        if not job.cfg.dry_run:
            with locked(job.run_dir):
                refuse_other_run(job.run_dir, job.cfg.resume)
                job.save()
    started = StartedRun(job)
    if wait:
        with env_override(variables):
            started.perform()
    else:
        background.stop_at_exit(started, started.stop, started._end_with_program)
        started._thread.start()
    return started
