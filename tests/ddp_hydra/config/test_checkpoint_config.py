from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ddp_hydra.config import checkpoint_config, references
from ddp_hydra.config.hydra_compat import IS_1_3, hydra_config_of
from ddp_hydra.config.schema import Config
from ddp_hydra.errors import ConfigError


def config(**parts):
    base = {
        "cluster": {"_target_": "a.Cluster", "password": "hunter2", "n_workers": 3},
        "data": {
            "bucket": "photos", "batch_size": 8, "train": {"bucket": "${data.bucket}", "seed": "${seed}"},
            "val": {"bucket": "${..bucket}", "names": ["${data.bucket}", "b"]},
        },
        **{name: {} for name in ("model", "sampler", "task", "optimizer", "scheduler")},
    }  # fmt: skip
    return OmegaConf.merge(OmegaConf.structured(Config), base, parts)


def test_what_is_changed_later_is_followed_by_the_keys_that_take_it_over():
    kept = json.loads(json.dumps(checkpoint_config.stored_config(config(trainer={"precision": "bf16"}))))
    again = checkpoint_config.composed(kept, ["data.bucket=others", "seed=3", "trainer.epochs=9"])
    assert (again.data.train, again.data.val) == (
        {"bucket": "others", "seed": 3}, {"bucket": "others", "names": ["others", "b"]}
    )  # fmt: skip
    assert (again.trainer.precision, again.trainer.epochs) == ("bf16", 9)
    assert checkpoint_config.composed(kept).data.train.bucket == "photos"


def test_the_cluster_is_not_kept_and_what_points_into_it_is_resolved():
    kept = checkpoint_config.stored_config(
        config(data={"parts": "${cluster.n_workers}", "lanes": ["${cluster.n_workers}"]})
    )
    assert "hunter2" not in json.dumps(kept)
    assert "cluster" not in kept
    assert (kept["data"]["parts"], kept["data"]["lanes"]) == (3, [3])


@pytest.mark.medium
def test_the_environment_is_asked_anew_and_what_only_the_job_knows_is_resolved(monkeypatch):
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register("of_a_job", lambda: "then", replace=True)
    cfg = config(data={"key": "${oc.env:A_KEY}", "made": "${of_a_job:}"})
    kept = checkpoint_config.stored_config(cfg)
    OmegaConf.clear_resolver("of_a_job")
    monkeypatch.setenv("A_KEY", "now")
    assert (checkpoint_config.composed(kept).data.key, checkpoint_config.composed(kept).data.made) == ("now", "then")
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ConfigError, match=r"data\.key: .*'A_KEY' not found.*: give data\.key=<value>"):
        checkpoint_config.composed(kept)


def test_what_only_a_training_needs_may_have_no_value(monkeypatch):
    monkeypatch.delenv("A_RATE", raising=False)
    optimizer = {"_target_": "torch.optim.SGD", "lr": "${oc.env:A_RATE}", "betas": ["${oc.env:A_RATE}", 1]}
    again = checkpoint_config.composed(checkpoint_config.stored_config(config(optimizer=optimizer)))
    assert (again.optimizer._target_, OmegaConf.is_missing(again.optimizer, "lr")) == ("torch.optim.SGD", True)
    monkeypatch.setenv("A_RATE", "0.5")
    again = checkpoint_config.composed(checkpoint_config.stored_config(config(optimizer=optimizer)))
    assert list(again.optimizer.betas) == ["0.5", 1]


@pytest.mark.parametrize(
    ("override", "said"),
    [("data.buckets=a", "buckets"), ("trainer.epochs=many", "many"), ("trainer.epoch=3", "epoch")],
)
def test_a_change_that_does_not_fit_is_refused(override, said):
    with pytest.raises(ConfigError, match=said):
        checkpoint_config.composed(checkpoint_config.stored_config(config()), [override])


def test_changes_are_told_by_what_was_given():
    before = checkpoint_config.stored_config(config(optimizer={"lr": 0.1, "betas": [0.9, 0.99]}))
    now = checkpoint_config.stored_config(
        config(optimizer={"lr": 0.01, "betas": [0.9, 0.99]}, data={"bucket": "b", "val": None}, resume="x")
    )
    del now["trainer"]["epochs"]
    now["trainer"] |= {"pause_after_validations": 3, "time_limit_s": 9.0}  # they end a command, not the run
    assert checkpoint_config.changes(before, before) == []
    assert checkpoint_config.changes(before, now) == [
        "data.bucket photos -> b",
        "data.val.bucket ${..bucket} -> (missing)",
        "data.val.names [${data.bucket},b] -> (missing)",
        "optimizer.lr 0.1 -> 0.01",
        "trainer.epochs 5 -> (missing)",
        "data.val (missing) -> null",
    ]


def test_other_names_of_the_same_keys_are_no_changes():
    train = {"bucket": "${data.bucket}", "transform": {"flip": "${data.flip}", "erase": ["${data.flip}"]}}
    data = {"flip": 0.5, "train": train, "sets": {"a": {"flip": 1, "train": {"flip": "${data.sets.a.flip}"}}}}
    before = checkpoint_config.stored_config(config(data=data))
    now = json.loads(json.dumps(before))
    now["data"]["train"]["bucket"] = "${..bucket}"
    now["data"]["train"]["transform"] = {"flip": "${of_set:flip}", "erase": ["${....flip}"]}
    now["data"]["sets"]["a"]["train"]["flip"] = "${of_set:flip}"
    assert checkpoint_config.changes(before, now) == []
    now["data"]["train"]["bucket"] = "${.bucket}"
    now["data"]["train"]["transform"]["flip"] = "${..flip}"
    assert checkpoint_config.changes(before, now) == [
        "data.train.bucket ${data.bucket} -> ${.bucket}",
        "data.train.transform.flip ${data.flip} -> ${..flip}",
    ]


def test_keys_of_the_data_set_follow_what_is_changed_later():
    data = {"flip": 0.5, "train": {"_target_": "a", "flip": 0.1, "transform": {"flip": "${of_set:flip}"}}}
    kept = json.loads(json.dumps(checkpoint_config.stored_config(config(data={**data, "again": "${data.train}"}))))
    assert kept["data"]["train"]["transform"]["flip"] == "${data.flip}"  # torch.load and OmegaConf read it
    again = checkpoint_config.composed(kept, ["data.flip=0.3"])
    assert again.data.train.transform.flip == again.data.again.transform.flip == 0.3


def test_no_secret_is_kept_beside_what_only_the_job_knows(monkeypatch):
    monkeypatch.setenv("A_WORD", "hunter2")
    texts = {
        "url": "ftp://${oc.env:A_WORD}/${cluster.n_workers}/${oc.env:${data.name}${cluster.n_workers}}",
        "login": "${cluster.password}",
        "name": "A",
        "typed": {"password": "hunter2"},
        "by": "${oc.env:A_WORD}",
        "other": "${data.by}/${data.typed.password}/${cluster.n_workers}",
    }
    kept = checkpoint_config.stored_config(config(data=texts))
    assert kept["data"]["url"] == "ftp://${oc.env:A_WORD}/3/${oc.env:${data.name}3}"
    assert kept["data"]["login"] == "***"
    assert kept["data"]["other"] == "${data.by}/${data.typed.password}/3"
    assert "hunter2" not in json.dumps(kept)
    monkeypatch.setenv("A3", "x")
    again = checkpoint_config.composed(kept, ["data.login=me", "data.typed.password=you"])
    assert (again.data.url, again.data.other) == ("ftp://hunter2/3/x", "hunter2/you/3")


@pytest.mark.parametrize(
    ("text", "stored", "read"),
    [
        (r"\${user:name}", r"\${user:name}", "${user:name}"),
        (r"cluster \${label}", r"cluster \${label}", "cluster ${label}"),
        (r"\${cluster.n_workers} ${cluster.n_workers}", r"\${cluster.n_workers} 3", "${cluster.n_workers} 3"),
        (r"C:\\${cluster.n_workers}", "C:\\3", "C:\\3"),
        ("${oc.select:data.q,${cluster.dir}/cache}", "/r/lr=0.1 (1)/cache", "/r/lr=0.1 (1)/cache"),
        ("${oc.select:data.q,${cluster.none}}", None, None),
        ("${cluster.label}", r"\${X}", "${X}"),
        ("${oc.select:cluster.${data.bucket}}", 7, 7),
        ("${oc.env:NONE,cluster}", "${oc.env:NONE,cluster}", "cluster"),
    ],
)
def test_an_escaped_text_comes_back_as_it_is(text, stored, read):
    cluster = {"label": r"\${X}", "photos": 7, "dir": "/r/lr=0.1 (1)", "none": None}
    kept = checkpoint_config.stored_config(config(data={"text": text}, cluster=cluster))
    assert kept["data"]["text"] == stored
    assert checkpoint_config.composed(kept).data.text == read


def test_a_path_of_a_structured_config_is_kept_as_a_text():
    data = {"root": Path("/photos"), "all": [Path("/a")], "by": "${cluster.root}", "node": "${cluster.node}"}
    cluster = {"root": Path("/b"), "node": {"paths": [Path("/c")]}}
    kept = checkpoint_config.stored_config(config(data=data, cluster=cluster))["data"]
    assert (kept["root"], kept["all"], type(kept["root"])) == ("/photos", ["/a"], str)
    assert json.loads(json.dumps([kept["by"], kept["node"]])) == ["/b", {"paths": ["/c"]}]


def test_a_variable_of_hydra_that_looks_like_a_secret_is_read_anew(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("PLACE", "/here")
    variables = {"HF_TOKEN": "hunter2", "PLACE": "/here"}
    written = config(data={"one": "${hydra:job.env_set.HF_TOKEN}", "two": "${hydra:job.env_set.PLACE}/x"})
    whole = OmegaConf.create({**OmegaConf.to_container(written), "hydra": {"job": {"env_set": variables}}})
    found = references.with_values_of_hydra(written, references.with_own_hydra(whole))
    assert OmegaConf.to_container(found)["data"]["one"] == "${oc.env:HF_TOKEN}"
    assert checkpoint_config.stored_config(found)["data"]["one"] == "${oc.env:HF_TOKEN}"
    assert found.data.two == "/here/x"
    assert checkpoint_config.stored_config(written)["data"]["one"] == "${oc.env:HF_TOKEN}"
    monkeypatch.setenv("HF_TOKEN", "another")
    found = references.with_values_of_hydra(written, references.with_own_hydra(whole))
    assert found.data.one == "hunter2"


def test_a_variable_of_hydra_that_reads_another_one_is_kept_as_it_is_written(monkeypatch):
    for name, value in {"A_WORD": "hunter2", "WORD": "hunter2", "URL": "ftp://hunter2/", "PATH": "/here"}.items():
        monkeypatch.setenv(name, value)
    variables = {"WORD": "${oc.env:A_WORD}", "URL": "ftp://${oc.env:A_WORD}/", "PATH": "${oc.env:PATH}"}
    texts = {"one": "${hydra:job.env_set.WORD}", "two": "${hydra:job.env_set.URL}${hydra:job.name}"}
    written = config(data={**texts, "three": "${hydra:job.env_set.PATH}"})
    hydra = {"job": {"name": "a", "env_set": variables}}
    whole = OmegaConf.create({**OmegaConf.to_container(written), "hydra": hydra})
    expected = {"one": "${oc.env:A_WORD}", "two": "ftp://${oc.env:A_WORD}/a", "three": "/here"}
    of_program = references.with_values_of_hydra(written, references.with_own_hydra(whole))
    kept = checkpoint_config.stored_config(of_program)
    assert {name: kept["data"][name] for name in expected} == expected
    assert checkpoint_config.composed(kept).data.two == "ftp://hunter2/a"
    with hydra_config_of(OmegaConf.create({"hydra": hydra})):
        assert checkpoint_config.stored_config(written)["data"]["one"] == expected["one"]


@pytest.mark.medium
def test_what_looks_like_a_secret_is_not_kept_and_has_to_be_given_again():
    tracker = {"tracker": {"password": "hunter2"}}
    cfg = OmegaConf.merge(OmegaConf.create({}), config(data={"api_key": "hunter2", "token": "${oc.env:TOKEN,null}"}))
    kept = checkpoint_config.stored_config(OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(cfg)), tracker))
    assert "hunter2" not in json.dumps(kept)
    kept.pop("tracker")
    with pytest.raises(ConfigError, match=r"^data\.api_key looks like a secret.*give data\.api_key=<value>"):
        checkpoint_config.composed(kept)
    again = checkpoint_config.composed(kept, ["data.api_key=mine"])
    assert (again.data.api_key, again.data.token) == ("mine", None)


def split(train, val, *overrides):
    kept = {"seed": 1, "data": {"batch_size": 8, "size": 9, "mix": 100, "train": train, "val": val}}
    return checkpoint_config.composed(kept, overrides, split="train").data


AUGMENTED = {"_target_": "a.Set", "prefix": "train", "transform": {"_target_": "a.Crop", "size": "${data.size}"}}
PLAIN = {"_target_": "a.Set", "prefix": "???", "transform": {"_target_": "a.Resize", "size": "${data.size}"}}


def test_training_data_are_read_as_validation_data_are():
    found = split(AUGMENTED | {"shuffle_buffer": "${data.mix}"}, PLAIN | {"shuffle": False})
    assert found.val is None
    assert found.train == {
        "_target_": "a.Set", "prefix": "train", "transform": {"_target_": "a.Resize", "size": 9}, "shuffle": False
    }  # fmt: skip
    bare = {"_target_": "a.Set", "prefix": "val"}
    assert split(AUGMENTED, bare).train == {"_target_": "a.Set", "prefix": "train"}


BARE = {"_target_": "a.Set", "prefix": "train"}


@pytest.mark.parametrize(
    "around",
    [
        lambda one: {"_target_": "Subset", "dataset": one, "indices": [0, 1]},
        lambda one: {"_target_": "Concat", "datasets": [{"_target_": "Subset", "dataset": one}, {"_target_": "Other"}]},
        lambda one: {"_target_": "Mixed", "sets": {"photos": one}},
    ],
)
def test_data_sets_inside_are_read_as_validation_data_are(around):
    assert split(around(AUGMENTED), around(BARE | {"prefix": "val"})).train == around(BARE)
    assert split(around(AUGMENTED), around(PLAIN)).train.get("indices") == around(BARE).get("indices")
    for val in (None, BARE, around({"_target_": "another.Set"})):
        with pytest.raises(ConfigError, match=r"\+data\.train\.[a-z0.]+\.transform=null or a node") as refused:
            split(around(AUGMENTED), val)
        typed = str(refused.value).partition("give ")[2].partition(" or ")[0]
        assert split(around(AUGMENTED), val, typed).train == around(AUGMENTED | {"transform": None})


def test_the_sets_of_a_mixture_are_read_as_validation_data_are():
    mix = {"_target_": "Mix", "sets": "${..sets}"}
    sets = {"a": {"train": AUGMENTED, "val": BARE}, "b": {"val": BARE}, "c": "${data.sets.a}"}
    data = {"size": 9, "sets": sets, "train": mix, "val": mix | {"part": "val"}}
    found = checkpoint_config.composed({"seed": 1, "data": data}, [], split="train").data
    assert found.train == {"_target_": "Mix", "sets": sets | {key: {"train": BARE, "val": BARE} for key in "ac"}}
    sets["a"] = {"train": AUGMENTED}
    with pytest.raises(ConfigError, match=r"\+data\.sets\.a\.train\.transform=null or a node"):
        checkpoint_config.composed({"seed": 1, "data": data}, [], split="train")


@pytest.mark.parametrize("val", [None, {"_target_": "another.Set", "prefix": "val"}])
def test_a_transform_of_training_that_nothing_can_take_the_place_of_is_refused_unless_it_is_typed(val):
    with pytest.raises(ConfigError, match=r"split=train: data\.train\.transform is for training, and no data"):
        split(AUGMENTED, val)
    assert split(AUGMENTED, val, "+data.train.transform=null").train.transform is None
    assert split(AUGMENTED | {"transform": None}, val).train.transform is None


@pytest.mark.parametrize("val", [None, {"_target_": "another.Set"}])
def test_a_transform_of_training_that_refers_to_null_is_none(val):
    train = BARE | {"transform": "${..transform}", "shuffle_buffer": "${..buffer}", "parts": ["${..transform}"]}
    data = {"transform": None, "buffer": 0, "train": {"_target_": "Subset", "dataset": BARE, **train}, "val": val}
    found = checkpoint_config.composed({"data": data}, [], split="train").data.train
    assert (found.transform, found.shuffle_buffer) == (None, 0)


def test_a_key_that_the_run_has_not_is_told_in_one_line():
    with pytest.raises(ConfigError, match=r"^loss\.scale: .*no such key; loss has none; .*\+loss\.scale=<value>$"):
        checkpoint_config.changed({"loss": {"_target_": "x"}}, ["loss.scale=5"])
    assert checkpoint_config.changed({"loss": {"_target_": "x"}}, ["+loss.scale=5"]).loss.scale == 5


def test_a_key_of_the_run_is_left_out():
    config = {"metrics": {"f1": {"_target_": "x"}, "top5": {"_target_": "y"}}}
    assert list(checkpoint_config.changed(config, ["~metrics.f1"]).metrics) == ["top5"]
    with pytest.raises(ConfigError, match=r"^metrics\.f2: there is no such key; the keys of metrics are f1, top5$"):
        checkpoint_config.changed(config, ["~metrics.f2"])
    with pytest.raises(ConfigError, match=r"metrics\.tpo5: .* did you mean metrics\.top5\?"):
        checkpoint_config.changed(config, ["metrics.tpo5.k=3"])


def test_numbers_of_the_environment_have_the_types_of_their_keys(monkeypatch):
    monkeypatch.setenv("N", "5")
    monkeypatch.setenv("SWITCH", "true")
    trainer = {"threads": "${oc.env:N}", "epochs": "${seed}", "ema_decay": "${oc.env:NONE,null}", "gone": "${oc.env:N}"}
    trainer |= {"decay_all": "${oc.env:SWITCH}", "precision": "${oc.env:P,bf16}", "early_stopping_min_delta": 0.5}
    kept = {"seed": "${oc.env:N}", "data": {"a": "${oc.env:N}"}, "trainer": trainer}
    found = checkpoint_config.composed(kept)
    assert [repr(one) for one in (found.seed, found.data.a)] == ["5", "'5'"]
    assert found.trainer == {
        "threads": 5, "epochs": 5, "ema_decay": None, "gone": "5", "decay_all": True, "precision": "bf16",
        "early_stopping_min_delta": 0.5,
    }  # fmt: skip
    assert found.trainer.decay_all is True
    assert OmegaConf.to_container(checkpoint_config.changed(kept)) == kept
    monkeypatch.setenv("N", "x")
    with pytest.raises(ConfigError, match=r"^seed: .*'x'.*: give seed=<value>$"):
        checkpoint_config.composed(kept)


def test_not_a_number_is_no_other_value_than_not_a_number():
    before, now = ({"data": {"fill": float("nan"), "list": [float("nan")]}} for _ in range(2))
    assert checkpoint_config.changes(before, now) == []
    assert checkpoint_config.changes(before, {"data": {**now["data"], "fill": 1}}) == ["data.fill nan -> 1"]


def test_a_key_of_ones_own_that_nothing_reads_makes_no_difference():
    before, now = ({"paths": {"out": place, "data": place}, "data": {"bucket": "${paths.data}"}} for place in "ab")
    assert checkpoint_config.changes(before, now) == ["paths.data a -> b"]


def test_an_empty_group_is_as_good_as_none():
    assert checkpoint_config.changes({"mix": {}, "seed": 1}, {"seed": 1}) == []
    assert checkpoint_config.changes({"mix": {"alpha": 1}}, {"mix": {}}) == ["mix.alpha 1 -> (missing)"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("+data.val.n=13", r"\+data\.val\.n=13: data\.val is \$\{data\.one\}, so .*: type \+data\.one\.n=13$"),
        ("data.val.a.b=13", r"type data\.one\.a\.b=13$"),
        ("data.sets.b.val.n=1", r"data\.sets\.b is \$\{data\.two\}, .*: type \+data\.two\.val\.n=1$"),
        ("data.train.n=1", r"data\.train is \$\{oc\.select:.*: type all of it, \+data\.train=\{_target_: …, …\}$"),
    ],
)
def test_a_key_of_a_node_that_is_an_interpolation_is_one_of_the_other_node(word, said):
    data = {"one": {"a": {"b": 1}}, "two": {"val": "${data.one}"}, "sets": {"b": "${data.two}"}, "val": "${.one}"}
    kept = {"data": {**data, "train": "${oc.select:data.none,null}"}}
    with pytest.raises(ConfigError, match=said):
        checkpoint_config.changed(kept, [word])
    assert checkpoint_config.changed(kept, ["+data.val={n: 3}", "data.val.n=4"]).data.val == {"n": 4}
    assert checkpoint_config.changed(kept, ["+data.val._target_=a.B", "+data.val.n=4"]).data.val.n == 4
