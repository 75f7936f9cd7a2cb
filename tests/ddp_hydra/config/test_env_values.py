"""Which values of the environment are kept beside a config: no secret ever is."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from ddp_hydra.config import env_values


@pytest.mark.parametrize(
    ("key", "text", "kept"),
    [
        ("data.scale", "${oc.decode:${oc.env:VALUE}}", 4),
        ("data.scale", "${oc.decode:${oc.env:NOT_SET, 1.5}}", 1.5),
        ("data.folder", "${oc.env:PLACE}/.", "/tmp/."),
        ("data.folder", "${oc.env:PLACE}/not there", None),
        ("data.name", "${oc.env:PLAIN}", None),
        ("data.password", "${oc.decode:${oc.env:VALUE}}", None),
        ("secret.value", "${oc.decode:${oc.env:VALUE}}", None),
        ("data.scale", "${oc.decode:${oc.env:API_TOKEN}}", None),
        ("model.d_key", "${oc.decode:${oc.env:VALUE}}", 4),
        ("model.d_key", "${oc.env:PLACE}/.", None),
        ("data.scale", "${oc.decode:${oc.env:${data.which}}}", None),
        ("data.scale", "${oc.env:NOT_SET}", None),
        ("data.folder", "${oc.env:PLACE}/${data.other}", None),
        ("data.pass", "${oc.decode:${oc.env:VALUE}}", None),
        ("data.pin", "${oc.decode:${oc.env:VALUE}}", None),
        ("data.otp", "${oc.decode:${oc.env:VALUE}}", None),
        ("data.scale", "${oc.decode:${oc.env:DB_PASS}}", None),
        ("data.scale", "${oc.decode:${oc.env:PIN}}", None),
        ("data.passes", "${oc.decode:${oc.env:VALUE}}", 4),
        ("data.pin_memory", "${oc.decode:${oc.env:VALUE}}", 4),
        ("cluster.port", "${oc.decode:${oc.env:VALUE}}", None),
        ("data.scale", 4, None),
    ],
)
def test_only_what_hardly_is_a_secret_is_kept(key, text, kept, monkeypatch):
    for name, value in {
        "VALUE": "4",
        "PLACE": "/tmp",
        "PLAIN": "hunter2",
        "API_TOKEN": "12",
        "DB_PASS": "4",
        "PIN": "4",
    }.items():
        monkeypatch.setenv(name, value)
    cfg = OmegaConf.create({"data": {"which": "VALUE", "other": "."}})
    OmegaConf.update(cfg, key, text)
    assert env_values.values_of(cfg) == ({} if kept is None else {key: kept})
    OmegaConf.update(cfg, "model.sizes", [1, {"x": text}])
    found = env_values.values_of(cfg)
    assert env_values.decoded(env_values.encoded(found)) == found


def test_a_value_that_is_another_one_is_told_as_it_is_typed():
    assert env_values.changes({"a": 4, "b": True, "c": 1, "old": 1}, {"a": 2.0, "b": False, "c": 1, "new": 2}) == [
        "a 4 -> 2.0",
        "b true -> false",
    ]


def test_not_a_number_is_no_other_value_than_not_a_number():
    before = env_values.decoded(env_values.encoded({"a": float("nan"), "b": 1}))
    assert env_values.changes(before, {"a": float("nan"), "b": True}) == ["b 1 -> true"]


def test_the_environment_has_changed_only_what_is_written_as_it_was():
    content = b"a: '${oc.env:A}'\nb: '${oc.env:A}'\nc: 1\nd: ['${oc.env:D}']\n"
    values = {"a": 4, "b": 4, "c": 1, "d.0": 5, "e": 6}
    cfg = OmegaConf.create({"a": "${oc.env:A}", "b": "${oc.env:B}", "c": 1, "d": ["${oc.env:D}"], "e": "${oc.env:E}"})
    assert env_values.written_alike(values, content, cfg) == {"a": 4, "d.0": 5}
    for damaged in (b"", b"[1]", b"a: [", b"\xff"):
        assert env_values.written_alike(values, damaged, cfg) == {}


@pytest.mark.parametrize("content", [b"", b"[1]", b"a: [", b"\xff", b"!!python/object:os.x {}"])
def test_a_damaged_file_says_nothing(content):
    assert env_values.decoded(content) == {}
