from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from ddp_hydra import stored
from ddp_hydra.config import Config
from ddp_hydra.errors import ConfigError


def config(**parts):
    base = {
        "cluster": {"_target_": "a.Cluster", "password": "hunter2", "n_workers": 3},
        "data": {
            "bucket": "photos", "batch_size": 8, "train": {"bucket": "${data.bucket}", "seed": "${seed}"},
            "val": {"bucket": "${..bucket}", "names": ["${data.bucket}", "b"]},
        },
        **{name: {} for name in ("model", "sampler", "optimizer", "scheduler")},
    }  # fmt: skip
    return OmegaConf.merge(OmegaConf.structured(Config), base, parts)


def test_what_is_changed_later_is_followed_by_the_keys_that_take_it_over():
    kept = json.loads(json.dumps(stored.of(config(trainer={"precision": "bf16"}))))
    again = stored.composed(kept, ["data.bucket=others", "seed=3", "trainer.epochs=9"])
    assert (again.data.train, again.data.val) == (
        {"bucket": "others", "seed": 3}, {"bucket": "others", "names": ["others", "b"]}
    )  # fmt: skip
    assert (again.trainer.precision, again.trainer.epochs) == ("bf16", 9)
    assert stored.composed(kept).data.train.bucket == "photos"


def test_the_cluster_is_not_kept_and_what_points_into_it_is_resolved():
    kept = stored.of(config(data={"parts": "${cluster.n_workers}", "lanes": ["${cluster.n_workers}"]}))
    assert "hunter2" not in json.dumps(kept)
    assert "cluster" not in kept
    assert (kept["data"]["parts"], kept["data"]["lanes"]) == (3, [3])


def test_the_environment_is_asked_anew_and_what_only_the_job_knows_is_resolved(monkeypatch):
    OmegaConf.register_new_resolver("of_a_job", lambda: "then", replace=True)
    cfg = config(data={"key": "${oc.env:A_KEY}", "made": "${of_a_job:}"})
    kept = stored.of(cfg)
    OmegaConf.clear_resolver("of_a_job")
    monkeypatch.setenv("A_KEY", "now")
    assert (stored.composed(kept).data.key, stored.composed(kept).data.made) == ("now", "then")
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ConfigError, match=r"data\.key: .*'A_KEY' not found.*: give data\.key=<value>"):
        stored.composed(kept)


@pytest.mark.parametrize(
    ("override", "said"),
    [("data.buckets=a", "buckets"), ("trainer.epochs=many", "many"), ("trainer.epoch=3", "epoch")],
)
def test_a_change_that_does_not_fit_is_refused(override, said):
    with pytest.raises(ConfigError, match=said):
        stored.composed(stored.of(config()), [override])


def test_changes_are_told_by_what_was_given():
    before = stored.of(config(optimizer={"lr": 0.1, "betas": [0.9, 0.99]}))
    now = stored.of(config(optimizer={"lr": 0.01, "betas": [0.9, 0.99]}, data={"bucket": "b", "val": None}, resume="x"))
    del now["trainer"]["epochs"]
    assert stored.changes(before, before) == []
    assert stored.changes(before, now) == [
        "data.bucket photos -> b",
        "data.val.bucket ${..bucket} -> (not there)",
        "data.val.names ['${data.bucket}', 'b'] -> (not there)",
        "optimizer.lr 0.1 -> 0.01",
        "trainer.epochs 5 -> (not there)",
        "data.val (not there) -> null",
    ]


def test_what_looks_like_a_secret_is_not_kept_and_has_to_be_given_again():
    tracker = {"tracker": {"password": "hunter2"}}
    cfg = OmegaConf.merge(OmegaConf.create({}), config(data={"api_key": "hunter2", "token": "${oc.env:TOKEN,x}"}))
    kept = stored.of(OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(cfg)), tracker))
    assert "hunter2" not in json.dumps(kept)
    kept.pop("tracker")
    with pytest.raises(ConfigError, match=r"^data\.api_key looks like a secret.*give data\.api_key=<value>"):
        stored.composed(kept)
    again = stored.composed(kept, ["data.api_key=mine"])
    assert (again.data.api_key, again.data.token) == ("mine", "x")
