from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from ddp_hydra.cluster.kinds import signals_kept
from ddp_hydra.config import checkpoint_config, schema, unknown_keys, validate
from ddp_hydra.errors import ConfigError
from tests.ddp_hydra.config.configs import CONF, changed, composed

ROOT = Path(__file__).parents[3]
NOT_JOBS = ("hydra", "transform")
"""Folders whose options are of no job: Hydra's own, and those that lie within a data set."""
OPTIONS = sorted(
    f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml") if path.parent.name not in NOT_JOBS
)
CHOOSE_OTHERS = ("experiment", "debug", "hparams_search")
"""Groups whose options choose options of other groups."""


def together() -> list[list[str]]:
    """Each option once: alone where it chooses others, else beside one of each other group."""
    groups = {name: list(options) for name, options in groupby(OPTIONS, lambda option: option.partition("=")[0])}
    alone = [[option] for name in CHOOSE_OTHERS for option in groups.pop(name)]
    return [*alone, *(list(filter(None, options)) for options in zip_longest(*groups.values()))]


def targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"]
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from targets(part)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("~objective", "^objective is missing: leave '~objective' out; a main config of your own needs `job` in"),
        ("~faults", "^faults is missing: leave '~faults' out; "),
        ("~model", r"^model is missing: give model=\.\.\.$"),
        ("~sampler", r"^sampler is missing: give sampler=\.\.\.$"),
        ("~trainer", None),  # the schema's values are left
    ],
)
def test_a_key_that_every_job_has_is_not_removed(word, said):
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        schema.check_whole(composed(word))


@pytest.mark.medium
def test_a_typed_key_of_a_group_is_not_removed():
    with pytest.raises(HydraException) as raised:
        composed("~results.retry_s")
    said = "~results.retry_s: every job has this key: leave it out, or give results.retry_s=<value>"
    assert unknown_keys.explain(raised.value) == said


@pytest.mark.medium
def test_the_default_is_a_job():
    cfg = composed()
    validate.check(cfg)
    assert (cfg.cluster.n_workers, cfg.model["_target_"]) == (2, "models.resnet.resnet18")
    assert not GlobalHydra().is_initialized()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("bucket", "told"),
    [
        ("s3://photos/train", r"folder in a bucket: type data\.bucket=s3://photos data\.train_prefix"),
        ("file://../flat", r"'file://\.\./flat' .*for a relative one type \.\./flat"),
        ("http://host/photos", r"not the name of a bucket"),
        ("my bucket", r"'my bucket' is not the name of a bucket"),
        ("ftpx://a", r"ftpx:// is not known"),
    ],
)
def test_what_can_be_no_bucket_is_refused_before_a_cluster_starts(bucket, told):
    with pytest.raises(ConfigError, match=told):
        validate.check(changed({"data.bucket": bucket}, "data=s3_photos"))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "values", "told"),
    [
        (["data=text"], {}, r"^data\.path=json reads files: give data\.files=<paths or URLs>$"),
        (["data=text"], {"data.files": "a.jsonl"}, r"give data\.val_files=<paths or URLs>, or data\.val=null$"),
        (["data=mix", "+data@data.sets.a=text"], {}, r"^data\.sets\.a\.path=json .* give data\.sets\.a\.files="),
    ],
)
def test_a_format_without_files_is_refused_before_a_cluster_starts(words, values, told):
    with pytest.raises(ConfigError, match=told):
        validate.check(changed(values, *words))


NEEDED = {
    "cluster=ssh": ["cluster.hosts=[a,b]"],
    "data=s3_photos": ["data.bucket=photos"],
    "experiment=imagenet_s3": ["data.bucket=imagenet"],
    "experiment=imagenet_wids": ["data.index=train.json", "data.val_index=val.json"],
    "data=wids": ["data.index=train.json", "data.val_index=val.json"],
    "data=huggingface": ["data.path=parquet", "data.files=a.parquet", "data.val_files=b.parquet"],
    "data=text": ["data.tokenizer=tokenizer", "data.files=train.jsonl", "data.val_files=val.jsonl"],
    "experiment=finetune": ["model.path=base", "data.files=train.jsonl", "data.val_files=val.jsonl"],
    **{f"model=hf_{kind}": ["model.path=base"] for kind in ("causal_lm", "masked_lm", "sequence_classification")},
    "data=parquet_rows": ["data.files=rows.parquet", "data.target=price"],
    "data=webdataset": ["data.urls='train-{000..127}.tar'"],
    "task=distillation": ["task.teacher=outputs/teacher"],
    "experiment=distillation": ["task.teacher=outputs/teacher"],
    "data=image_table": ["data.table=train.csv", "data.val_table=val.csv"],
}
"""What an option does not work without."""


def test_no_option_is_left_out():
    assert sorted(chain(*together())) == OPTIONS
    assert {"experiment=digits", "model=resnet18", "cluster=local", "debug=inline"} < set(OPTIONS)


@pytest.mark.medium
@pytest.mark.parametrize("options", together(), ids=" ".join)
def test_every_option_of_every_group_composes_to_a_job(options):
    cfg = composed(*options, *chain(*(NEEDED.get(option, []) for option in options)))
    validate.check(cfg)
    unknown_keys.check(cfg)
    plain = schema.resolved(cfg)
    assert json.loads(json.dumps(plain)) == plain
    assert "${" not in json.dumps(plain)


@pytest.mark.medium
def test_a_key_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"^data\.bucket is missing: give data\.bucket=\.\.\.$"):
        schema.resolved(composed("data=s3_photos"))


@pytest.mark.medium
def test_without_validation_its_files_need_not_be_given():
    job = {"data.table": "here"}
    assert schema.resolved(changed({**job, "data.val": None}, "data=image_table"))["data"]["val_table"] is None
    with pytest.raises(ConfigError, match=r"^data\.val_table is missing: .*, or data\.val=null for no validation$"):
        schema.resolved(changed(job, "data=image_table"))


STREAMS = {"data=mix", "data=webdataset"}
"""What is no set of a mixture."""


@pytest.mark.medium
@pytest.mark.parametrize("option", [one for one in OPTIONS if one.startswith("data=") and one not in STREAMS])
def test_each_set_with_a_length_is_the_same_in_a_mixture(option):
    alone = composed(option, *(words := NEEDED.get(option, [])))
    inside = [word.replace("data.", "data.sets.one.", 1) for word in words]
    mixture = composed("data=mix", f"+{option.replace('data=', 'data@data.sets.one=')}", *inside)
    validate.check(mixture)
    unknown_keys.check(mixture)
    found = schema.resolved(mixture)["data"]["sets"]["one"]
    wanted = schema.resolved(alone)["data"]
    assert (found["train"], found["val"]) == (wanted["train"], wanted["val"])


@pytest.mark.medium
@pytest.mark.parametrize("without", ["data.val", "data.sets.one.val"])
def test_without_validation_the_sets_of_a_mixture_need_no_files_for_it(without):
    words, job = ("data=mix", "+data@data.sets.one=image_table"), {"data.sets.one.table": "here"}
    found = schema.resolved(changed({**job, without: None}, *words))["data"]["sets"]["one"]
    assert (found["train"]["table"], found["val_table"]) == ("here", None)
    told = r"^data\.sets\.one\.val_table is missing: .*, or data\.sets\.one\.val=null for no validation$"
    with pytest.raises(ConfigError, match=told):
        schema.resolved(changed(job, *words))


@pytest.mark.medium
@pytest.mark.parametrize("around", ["data.train.dataset", "data.inner.train", "data.sets.photos.train"])
def test_options_with_keys_of_data_fit_at_any_depth(around):
    cfg = composed("data=s3_images", f"+transform@{around}.transform=train", f"+data/base@{around}=image_set")
    for key in ("data.train.flip", f"{around}.flip"):  # arguments of the classes themselves
        OmegaConf.update(cfg, key, 0.9, force_add=True)
    cfg.data.flip = 0.25
    OmegaConf.update(cfg, f"{around}._target_", "mine.Photos", force_add=True)
    validate.check(cfg)
    kept = checkpoint_config.composed(checkpoint_config.stored_config(cfg), ["data.flip=0.5"])
    for flip, found in ((0.25, OmegaConf.create(schema.resolved(cfg))), (0.5, kept)):
        own = OmegaConf.select(found, around)
        assert (own.flip, own.transform.flip, own.transform["size"]) == (0.9, flip, 32)
        assert (own.endpoint_url, own.cache_mb) == (None, 64)


def test_a_key_of_the_data_set_that_is_missing_is_named():
    data = {"train": {"_target_": "a", "transform": {"size": "${of_set:image_size}"}}}
    no_key = r"Interpolation key 'data\.image_size' not found: give "
    for given, told in (
        ({"image_size": "???"}, r"^data\.image_size is missing: give data\.image_size=\.\.\.$"),
        ({}, rf"^data\.train\.transform\.size=\${{of_set:image_size}}: {no_key}"),
        ({"sets": {"a": {"image_size": "???", **data}}, "image_size": 1}, r"^data\.sets\.a\.image_size is missing: "),
    ):
        with pytest.raises(ConfigError, match=told):
            schema.resolved(OmegaConf.create({"data": {**data, **given}}))


def test_sets_that_are_no_mixture_are_taken_as_they_are():
    sets = {"a": ["t.parquet"], "b": "v.parquet", "c": None, "d": {"val_files": "???", "val": None}}
    data = {"sets": sets, "train": {"files": "${data.sets.a}"}}
    found = schema.resolved(OmegaConf.create({"data": data}))["data"]
    assert found == {"sets": {**sets, "d": {"val_files": None, "val": None}}, "train": {"files": ["t.parquet"]}}
    with pytest.raises(ConfigError, match=r"^data\.sets\.a=\$\{files\}: Interpolation key 'files' not found"):
        schema.resolved(OmegaConf.create({"data": {"sets": {"a": "${files}"}}}))


@pytest.mark.medium
@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(option, marks=[] if option in ("experiment=digits", "experiment=finetune") else pytest.mark.slow)
        for option in OPTIONS
        if option.startswith("experiment=")
    ],
)
@pytest.mark.parametrize("debug", ["debug=inline", pytest.param("debug=one_batch", marks=pytest.mark.slow)])
def test_every_experiment_can_be_debugged_inline(experiment, debug):
    cfg = composed(experiment, debug, *NEEDED.get(experiment, []))
    validate.check(cfg)
    assert cfg.cluster["_target_"] == "ddp_hydra.cluster.kinds.Inline"


@pytest.mark.medium
def test_the_words_of_the_card():
    cfg = composed(
        "model=resnet18", "data=s3_images", "cluster.n_workers=4", "optimizer.lr=0.2", "data.batch_size=8",
        "trainer.max_steps=9", "trainer.epochs=null", "seed=3", "tags=[a,b]", "resume=outputs/x", "dry_run=true",
        "trainer.precision=bf16", "objective.direction=minimize",
    )  # fmt: skip
    validate.check(cfg)
    plain = schema.resolved(cfg)
    assert (plain["cluster"]["n_workers"], plain["optimizer"]["lr"], plain["data"]["batch_size"]) == (4, 0.2, 8)
    assert (plain["trainer"]["max_steps"], plain["trainer"]["epochs"]) == (9, None)
    assert (plain["trainer"]["precision"], plain["trainer"]["device"]) == ("bf16", "auto")
    assert plain["objective"]["direction"] == "minimize"
    assert (plain["seed"], plain["sampler"]["seed"], plain["data"]["train"]["seed"]) == (3, 3, 3)
    assert (plain["tags"], plain["resume"], plain["dry_run"]) == (["a", "b"], "outputs/x", True)


@pytest.mark.medium
def test_every_target_in_conf_exists():
    named = {name for path in CONF.rglob("*.yaml") for name in targets(OmegaConf.to_container(OmegaConf.load(path)))}
    assert "models.resnet.resnet18" in named
    if (
        find_spec("dask_cuda") is None
    ):  # make test-dask-cuda has it; test_connect.py compares the option with its signature
        named = {name for name in named if not name.startswith("dask_cuda.")}
    with signals_kept():
        assert [name for name in sorted(named) if not callable(get_object(name))] == []


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("trainer/default.yaml", schema.TrainerConfig),
        ("dispatch/default.yaml", schema.DispatchConfig),
        ("results/default.yaml", schema.ResultsConfig),
        ("job.yaml", schema.ObjectiveConfig),
        ("job.yaml", schema.Config),
    ],
)
def test_a_comment_documents_each_setting(file, settings):
    text = (CONF / file).read_text()
    nodes = (*validate.LOGGERS,)  # of a file of their own
    keys = [f.name for f in fields(settings) if not is_dataclass(f.default_factory) and f.name not in nodes]
    assert [key for key in keys if not re.search(rf"^[ -]*{key}: .*# \S", text, re.MULTILINE)] == []


@pytest.mark.medium
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        *(
            ({key: value}, f"{key}={str(value).lower()}: give a whole number of at least 1")
            for key in ("cluster.n_workers", "data.batch_size")
            for value in (0, -1, 1.5, "two", "2", True, [2])
        ),
        *(
            ({key: 0}, f"{key}=0: give a whole number of at least 1")
            for key in ("trainer.epochs", "trainer.max_steps", "dispatch.ranks", "results.keep_checkpoints")
        ),
        *(
            ({f"trainer.{key}": -1}, f"trainer.{key}=-1: give 0 or more")
            for key in (
                "threads", "validate_every_epochs", "checkpoint_every_steps", "checkpoint_every_epochs",
                "log_every_steps",
            )
        ),
        ({"trainer.log_every_steps": 0}, "logs by the clock: give trainer.log_every_s=<seconds>, too"),
        ({"trainer.log_every_s": 0.0}, "trainer.log_every_s=0: give seconds, more than 0, or null"),
        ({"trainer.log_growth": 0.5}, "trainer.log_growth=0.5: give 1 or more"),
        ({"results.retry_s": -1.0}, "results.retry_s=-1: give seconds, 0 or more"),
        ({"results.retry_s": float("nan")}, "results.retry_s=nan: give seconds, 0 or more"),
        ({"results.handler": "cluster"}, "results.handler=cluster needs a place that workers can write"),
        ({"results.root": "s3://a/b"}, "results.root=s3://a/b is only for results.handler=cluster: give"),
        (
            {"results.handler": "cluster", "results.root": "s3://a/b", "results.mirror": "s3://a/c"},
            "results.mirror=s3://a/c: leave it out, as results.handler=cluster has a store",
        ),
        ({"detach": True}, "detach=true is only for results.handler=cluster: give that with results.root, too"),
        ({"trainer.epochs": None}, "trainer.epochs and trainer.max_steps are both null, so the job would never end"),
        ({"data.batch_size": None}, "data needs batch_size (per rank) or global_batch"),
        ({"data.train": None}, "data needs batch_size (per rank) or global_batch"),
        ({"optimizer.lr_rule": "cubic"}, "optimizer.lr_rule=cubic: give none, linear or sqrt"),
        ({"optimizer.lr_rule": "sqrt"}, "optimizer.lr_rule=sqrt needs a second key: give optimizer.lr_ref"),
        ({"optimizer.lr_reference_batch": 8}, "lr_reference_batch=8 needs a second key: give optimizer.lr_rule="),
        ({"data.global_batch": 0}, "data.global_batch=0: give a whole number of at least 1"),
        *(
            ({"dispatch.port_range": ports}, f"dispatch.port_range={ports}: give the first and the last port")
            for ports in ([], [5], [2, 1], [0, 5], [1, 65536], [1, 2, 3])
        ),
        *(
            ({"dispatch.ranks_per_worker": each}, f"dispatch.ranks_per_worker={typed}: give a whole number of at least")
            for each, typed in ((0, "0"), (-1, "-1"), (1.5, "1.5"), (None, "null"), (True, "true"), ("two", "two"))
        ),
        ({"dispatch.ranks": 4, "dispatch.min_ranks": 5}, "dispatch.min_ranks=5 is more than dispatch.ranks=4: give 4"),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_job_can_mean_is_refused_with_what_to_give(values, sentence):
    with pytest.raises(ConfigError) as caught:
        validate.check(changed(values))
    assert sentence in str(caught.value)


def test_the_rule_of_the_rate_is_one_for_all_updates():
    cfg = changed({})
    cfg.optimizer = {"critic": {"_target_": "torch.optim.SGD", "lr_rule": "none", "lr_reference_batch": None}}
    validate.check(cfg)
    cfg.optimizer.critic.lr_rule = "sqrt"
    with pytest.raises(ConfigError, match=r"optimizer\.critic\.lr_rule=sqrt has no effect: give optimizer\.lr_rule"):
        validate.check(cfg)


@pytest.mark.parametrize(
    "values",
    [
        {"dispatch.ranks": 1},
        {"dispatch.port_range": [40000, 40000]},
        {"trainer.max_steps": 1, "trainer.epochs": None},
        {"results.keep_checkpoints": None},
        {"results.retry_s": 0.0},
        {"results.handler": "cluster", "results.root": "s3://a/b", "detach": True},
        {"trainer.validate_every_epochs": 0},
        {"data.val": None},
    ],
    ids=str,
)
def test_the_edge_of_what_is_allowed_is_allowed(values):
    validate.check(changed(values))


@pytest.mark.medium
def test_a_value_of_a_wrong_type_is_refused_with_what_is_allowed():
    with pytest.raises(HydraException) as caught:
        composed("trainer.epochs=1e3")
    said = unknown_keys.explain(caught.value)
    assert said == "trainer.epochs=1e3: give a whole number of at least 1, or null"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("trainer.precision", "fp32, tf32, bf16, fp16, fp8"),
        ("trainer.compile", "default, block, reduce_overhead, max_autotune, max_autotune_no_cudagraphs, or null"),
        ("results.handler", "client, cluster"),
        ("results.loggers", "a list, such as [a,b]"),
        ("dispatch.port_range", "a list, such as [a,b], or null"),
        ("seed", "a whole number"),
        ("dry_run", "true or false"),
        ("dispatch.timeout_s", "seconds, more than 0"),
        ("resume", "a text, or null"),
    ],
)
def test_what_is_allowed_follows_from_the_type(key, words):
    assert schema.allowed(key) == words


@pytest.mark.integration
def test_the_command_line_shows_the_composed_config_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "ddp_hydra", "--cfg", "job", "optimizer.lr=0.3"]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert OmegaConf.create(shown.stdout).optimizer.lr == 0.3


def test_a_variable_of_hydra_knows_no_key_of_the_job():
    cfg = OmegaConf.create({"hydra": {"job": {"env_set": {"A": "${seed}"}}}})
    with pytest.raises(InterpolationResolutionError) as caught:
        _ = cfg.hydra.job.env_set.A
    assert "'seed' not found: Hydra knows only its own part of the config there" in schema.unresolved(caught.value)
