"""Queues the jobs of a sweep: gives them numbers, composes them ahead of time, groups them by cluster."""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import os
import re
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddp_hydra.config import hydra_compat, redact, references, unknown_keys, validate
from ddp_hydra.config.hydra_compat import hydra_config_of, parse_override, typed_words, variables_set
from ddp_hydra.config.schema import TOP
from ddp_hydra.errors import ClusterError, ConfigError, DdpHydraError
from ddp_hydra.sweep import planned_job
from ddp_hydra.sweep.planned_job import Need, PlannedJob
from ddp_hydra.sweep.rows import OF_READING, JobRow, JobState, chooses_data, comparable, place_of, typed
from ddp_hydra.sweep.summary_files import fill_row

log = logging.getLogger(__name__)
CHECKED = 64
"""Number of jobs of a sweep that are composed and checked before the first one starts. Of later jobs, only those are
that have a new override whose value is not a number."""
TEMPLATES = 16
"""Number of configs that are kept to derive others from."""
AHEAD = 16
"""How many jobs are composed before they can start."""
_READING = ("data", "loss", "task")
"""Parts of a config in which a reference to another key can make the objective one of its own."""
_PLAIN = re.compile(r"(?P<key>[A-Za-z_]\w*(\.\w+)*)=(?P<value>[\w.+-]+)")
"""An override that sets a key to a number or a word."""


class CachingConfigLoader:
    """Caches the configs that Hydra's loader composes.

    Sweepers compose each job to check it, and launchers compose it again to run it.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.composed: dict[tuple[str, ...], DictConfig] = {}
        self.checked: set[str] = set()
        self.has_started = False
        self.last: DictConfig | None = None
        self.templates: dict[tuple[str, ...], tuple[DictConfig, Sequence[str]]] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose a job for a sweeper, which only checks that it can be composed, and cache its config."""
        new = {word: comparable(word.partition("=")[2]) for word in sweep_overrides if word not in self.checked}
        self.checked |= new.keys()
        texts = [word for word, value in new.items() if isinstance(value, str)]
        before = self.last
        if self.last is None or len(self.composed) < CHECKED or texts:
            self.last = self.compose(master_config, sweep_overrides)
            if len(self.composed) < CHECKED:
                self.composed[tuple(sweep_overrides)] = self.last
        if not self.has_started and planned_job.is_ours(self.last):
            hydra_cfg = self.last.hydra
            has_new = any(word[0] == "+" or word.partition("=")[0] in hydra_cfg.runtime.choices for word in new)
            if self.last is not before and (before is None or has_new):
                unknown_keys.check_new(self.last, hydra_cfg, self.loader)
            unknown_keys.check_texts(self.last, texts, hydra_cfg.runtime.choices, self.loader.repository)
            for key, _, number in (word.partition("=") for word in new if word not in texts):
                validate.check_number(key.lstrip("+"), int(number) if number.lstrip("+-").isdigit() else float(number))
        return self.last

    def take(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """Return a job's config, composed if needed, and remove it from the cache: the caller may change it."""
        self.has_started = True
        config = self.composed.pop(tuple(sweep_overrides), None)
        return config or self.compose(master_config, sweep_overrides)

    def compose(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """Compose a job, from the config of another one if that is the same but for plain values."""
        shape = shape_of(sweep_overrides, groups_of(master_config))
        if shape in self.templates:
            config = self._derive(*self.templates[shape], master_config, sweep_overrides)
            if config is not None:
                return config
        config = self.loader.load_sweep_config(master_config, list(sweep_overrides))
        if shape not in self.templates and len(self.templates) < TEMPLATES:
            self.templates[shape] = copy.deepcopy(config), tuple(sweep_overrides)
        return config

    def _derive(
        self, template: DictConfig, words: Sequence[str], master_config: DictConfig, overrides: Sequence[str]
    ) -> DictConfig | None:
        """Return the config that Hydra would compose for a job of the same shape; None where only Hydra can tell."""
        changed = {old: parse_override(new) for old, new in zip(words, overrides, strict=True) if old != new}
        config, others = copy.deepcopy(template), [parse_override(word) for word in overrides]
        for override in changed.values():
            if not is_value(config, override.key_or_group, others):
                return None
            try:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
            except OmegaConfBaseException:  # Hydra has a message for it
                return None
        task = [changed[word].input_line if word in changed else word for word in typed_words(config.hydra)]
        config.hydra.overrides.task = task
        hydra_compat.name_overrides(config, [parse_override(word) for word in task])
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def is_value(config: DictConfig, key: str, overrides: Sequence[Override]) -> bool:
    """Return whether a key is there and has a plain value, and only one override touches it."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if not isinstance(node, DictConfig) or name not in node or OmegaConf.is_config(node._get_node(name)):
        return False
    groups = groups_of(config)
    keys = [one.key_or_group for one in overrides if one.key_or_group not in groups or isinstance(one.value(), dict)]
    return sum(references.meet(key, other) for other in keys) == 1


def groups_of(config: DictConfig) -> Container[str]:
    groups: Container[str] = OmegaConf.select(config, "hydra.runtime.choices", default=())
    return groups


def is_of_training(key: str) -> bool:
    return f"{key}.".startswith("data.train.")


def shape_of(overrides: Sequence[str], groups: Container[str]) -> tuple[str, ...]:
    """Return the overrides without the numbers and words that keys are set to, unless these words choose files."""

    def shape(word: str) -> str:
        plain = _PLAIN.fullmatch(word)
        return f"{plain['key']}=" if plain and plain["key"] not in groups and not word.startswith("hydra.") else word

    return tuple(map(shape, overrides))


class JobQueue:
    """The jobs that have not started, in Hydra's order.

    Args:
        folder: of the sweep.
        config: as Hydra composed it without the swept overrides.
        own_need: what the tasks of other apps need.
        earlier: the rows of an earlier run of this sweep; None if this sweep does not resume one.
        retry_failed: whether jobs that failed in the earlier run are run again.
        metric: that jobs are compared by.

    Attributes:
        earlier: the rows of those jobs that nobody has asked for yet.
        jobs: the highest priority first.
        owners: the number of the job that has a folder.
        keys: those that some job gives.
        has_secrets: whether it was said that a swept secret makes all jobs new ones.
    """

    def __init__(
        self,
        folder: Path,
        loader: CachingConfigLoader,
        config: DictConfig,
        own_need: Need,
        earlier: Sequence[JobRow] | None,
        retry_failed: bool,
        metric: str = "",
    ) -> None:
        self.folder, self.loader, self.config, self.own_need, self.metric = folder, loader, config, own_need, metric
        self.is_resumed = earlier is not None
        self.earlier = list(earlier or ())
        self.next_number = max((row.number for row in self.earlier), default=-1) + 1
        self.not_repeated = {JobState.done, JobState.stopped} | (set() if retry_failed else {JobState.failed})
        self.jobs: list[PlannedJob] = []
        self.owners: dict[str, int] = {}
        self.keys = dict.fromkeys(key for row in self.earlier for key in typed(row))
        self.has_secrets = False

    def __bool__(self) -> bool:
        return bool(self.jobs)

    def add(self, overrides: Sequence[str], wanted: int) -> PlannedJob:
        """Return a job; add it to the queue, unless it ended in an earlier run of this sweep."""
        of_task = [word for word in overrides if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]
        task_overrides = redact.without(of_task) + self.variables_of(overrides)  # rows are written to files
        order, secret = planned_job.in_order(task_overrides), self.swept_secret(overrides)
        earlier = next((row for row in self.earlier if planned_job.in_order(row.overrides) == order), None)
        if earlier is not None and secret:  # the row may be of another value
            if not self.has_secrets:
                log.warning("%s is swept and looks like a secret, which no file keeps: all jobs run anew", secret)
            self.has_secrets, earlier = True, None
        if earlier is not None:  # it keeps its number
            self.earlier.remove(earlier)
        number = max(wanted, self.next_number) if earlier is None else earlier.number
        self.next_number = max(self.next_number, number + 1)
        job = PlannedJob(JobRow(number, task_overrides, str(number)), overrides, earlier, is_secret=bool(secret))
        self.keys |= dict.fromkeys(typed(job.row))
        shared = self.shared_keys(job)
        if earlier is not None and (earlier.state in self.not_repeated or planned_job.is_paused(earlier)):
            self.keep_earlier(job)
            job.result = job.earlier_return()
        else:
            self.jobs.append(job)
        job.row.shared = shared
        return job

    def swept_secret(self, overrides: Sequence[str]) -> str:
        """Return the key of a secret of a job that other jobs may have another value of; "" if there is none."""
        hidden = [word.partition("=")[0].lstrip("+~") for word in overrides if redact.without([word]) != [word]]
        if not hidden:
            return ""
        params, given = (
            cast(Any, OmegaConf.to_container(OmegaConf.select(self.config, key) or OmegaConf.create({})))
            for key in ("hydra.sweeper.params", "hydra.overrides")
        )
        words = [f"{key}={value}" for key, value in params.items()] + list(itertools.chain(*given.values()))
        last = {word.partition("=")[0].lstrip("+~"): word for word in words}
        return next((key for key in hidden if key not in last or parse_override(last[key]).is_sweep_override()), "")

    def variables_of(self, overrides: Sequence[str]) -> list[str]:
        """Return, as words, the variables that the sweep was given and that the config of a job reads."""
        hydra_cfg: Any = OmegaConf.to_container(self.config.get("hydra") or OmegaConf.create({}))
        with suppress(DdpHydraError, HydraException, OmegaConfBaseException):  # said where it is composed
            if variables_set(hydra_cfg):
                config = self.loader.compose(self.config, overrides)
                of_job: Any = OmegaConf.to_container(config.hydra)
                return planned_job.variables_read(of_job, config)
        return []

    def shared_keys(self, job: PlannedJob) -> list[str]:
        """Return the keys that its data, or what else its objective depends on, refer to.

        They are keys of `data.train`, for its other data, and the user's own.
        """
        places = {key: place_of(key) for key in typed(job.row)}
        tops = {key: place.split(".")[0] for key, place in places.items()}
        of_training = {
            key for key, place in places.items() if is_of_training(place) and not OF_READING & {*place.split(".")[2:3]}
        }
        own = {key for key, top in tops.items() if top not in TOP and not chooses_data(key, self.metric)}
        if not of_training | own:
            return []
        config, groups = self.config, groups_of(self.config)
        brings_references = any(
            key in groups if key in own or is_of_training(place) else tops[key] in (*_READING, "experiment")
            for key, place in places.items()
        )
        if brings_references or any(word.startswith("+") for word in job.overrides):
            with suppress(DdpHydraError, HydraException, OmegaConfBaseException):  # said where it is composed
                config = self.loader.take(self.config, job.overrides)
        # A value that comes there by another part of a job, as by its seed, is no choice of the data.
        written = cast(dict[str, Any], OmegaConf.to_container(config))
        content = {key: value for key, value in written.items() if key in _READING or key not in (*TOP, "hydra")}

        def is_of_others(key: str) -> bool:
            return key.split(".")[0] == "data" and not is_of_training(key)

        def chooses(key: str) -> bool:
            return key.split(".")[0] in _READING and chooses_data(key, self.metric)

        words: dict[str, set[str]] = {}
        for keys, is_reader in ((of_training, is_of_others), (own, chooses)):
            words |= dict.fromkeys(keys, references.read_by(is_reader, content)) if keys else {}
        return [key for key in places if any(references.meet(places[key], word) for word in words.get(key, ()))]

    def keep_earlier(self, job: PlannedJob) -> None:
        """Let a job that need not run, and is not in the queue, keep the row of the earlier run of the sweep."""
        assert job.earlier is not None
        vars(job.row).update(vars(job.earlier))  # not another row: the tables may have this one already
        job.folder = self.folder / job.row.folder
        self.owners[os.path.normpath(job.row.folder)] = job.row.number
        job.is_ours = planned_job.is_ours(self.config)

    def first(self, cluster: str | None) -> PlannedJob | None:
        """Return the next job that runs on a cluster, or on any, composed; it stays in the queue."""
        for job in list(self.jobs):
            if job.row.state == JobState.failed or (not job.is_composed and not self.compose(job)):
                self.jobs.remove(job)
            elif cluster in (None, job.need.cluster):
                return job
        return None

    def put_first(self, job: PlannedJob, priority: int) -> None:
        self.remove(job)
        job.priority = priority
        self.jobs.append(job)
        self.jobs.sort(key=lambda one: -one.priority)

    def remove(self, job: PlannedJob) -> None:
        if job in self.jobs:
            self.jobs.remove(job)

    def compose(self, job: PlannedJob) -> bool:
        """Compose a job; return False if that failed, which is then the job's result."""
        try:
            config = self.loader.take(self.config, job.overrides)
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = str(job.row.number), job.row.number
                config.hydra.sweep.dir = str(self.folder)
            with hydra_config_of(config):
                folder = str(config.hydra.sweep.subdir)
                job.is_ours = planned_job.is_ours(config)
                if job.is_ours:
                    self.claim(folder, job)
                job.row.folder = folder
                job.need = planned_job.need_of(config) if job.is_ours else self.own_need
                job.config, job.folder = config, self.folder / job.row.folder
                fill_row(job.row, self.keys, config, config.hydra.runtime.choices)
            if job.earlier is not None:
                planned_job.resume(job, job.earlier.wall_s)
            elif self.is_resumed:
                planned_job.take_over_folder(job)
        except (DdpHydraError, HydraException, OmegaConfBaseException) as error:
            job.fail(error)
        if job.is_dry:
            # It imports torch: do that once, before the processes of the jobs are forked.
            importlib.import_module("ddp_hydra.training.loop")
        return job.row.state != JobState.failed

    def claim(self, folder: str, job: PlannedJob) -> None:
        """Refuse a folder of another job: Hydra would write this job's config over the other one's."""
        number = job.row.number
        owner = self.owners.setdefault(os.path.normpath(folder), number)
        if owner != number:
            raise ConfigError(
                f"jobs {owner} and {number} have the same folder, {self.folder / folder}: let hydra.sweep.subdir name "
                "one for each job, as '${hydra.job.num}' does"
            )

    def compose_ahead(self) -> bool:
        """Compose one of the next jobs, so that it can start at once later; return False if all are composed."""
        for job in itertools.islice(self.jobs, AHEAD):
            if not job.is_composed and job.row.state == JobState.queued:
                return self.compose(job)
        return False

    def fail_all_on(self, cluster: str, error: ClusterError) -> None:
        for job in self.jobs:
            if (job.is_composed or self.compose(job)) and job.need.cluster == cluster:
                job.fail(error)
        self.jobs = [job for job in self.jobs if job.row.state != JobState.failed]
