"""What differs between Hydra 1.3 and 1.4; warnings are errors here, so each of these says that there is none."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from ddp_hydra.config import hydra_compat


def refusing(*_: Any) -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise OSError("no such bucket") from error


def made(target: str, **kwargs: Any) -> Any:
    return hydra_compat.instantiate(OmegaConf.create({"_target_": target, **kwargs}))


def test_any_target_may_be_called():
    assert made("fractions.Fraction", numerator=3) == 3


@pytest.mark.parametrize("text", ["${X}", r"\${X}", r"\\${X}", "a${b}${c}", r"C:\x\${d}\\", "$${e}"])
def test_a_resolved_text_is_read_as_it_is(text):
    values = {"_target_": "builtins.dict", "text": text, "inside": {"list": [text]}}
    config = hydra_compat.config_of(values)
    assert OmegaConf.to_container(config, resolve=True) == values
    assert values["text"] == text
    for node in (config, values):  # as Hydra 1.4 does for what is escaped once
        assert hydra_compat.instantiate(node, _convert_="all") == {"text": text, "inside": {"list": [text]}}
        for made in (hydra_compat.instantiate(node), hydra_compat.instantiate(node, _partial_=True)()):
            assert (made["text"], made["inside"]["list"][0]) == (text, text)


@pytest.mark.parametrize("more", [{}, {"_convert_": "partial"}, {"_recursive_": False}])
def test_a_resolved_text_inside_another_target_is_read_as_it_is(more):
    node = {"_target_": "types.SimpleNamespace", "text": "${X}", "inside": {"text": "${X}"}}
    outer = {"_target_": "builtins.dict", "list": [{"nodes": [node | more]}], "_args_": [[["text", "${X}"]]]}
    made = hydra_compat.instantiate(hydra_compat.config_of(outer))
    inner = made["list"][0]["nodes"][0]
    assert (made["text"], inner.text, inner.inside["text"]) == ("${X}", "${X}", "${X}")


def test_what_a_target_raises_is_passed_on_as_it_is(monkeypatch):
    monkeypatch.setattr("fractions.Fraction", refusing)
    for settings in (
        {"_target_": "fractions.Fraction"},
        {"_target_": "builtins.list", "_args_": [{"_target_": "fractions.Fraction"}]},
    ):
        with pytest.raises(OSError, match=r"\Ano such bucket") as raised:
            hydra_compat.instantiate(OmegaConf.create(settings))
        assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("target", ["no_such_package.Model", "fractions.Fractal"])
def test_a_target_that_is_not_there(target):
    with pytest.raises(InstantiationException, match=target):
        made(target)


@pytest.mark.usefixtures("hydra_restore_singletons")
def test_what_is_registered_twice_stays_as_it_was_first():
    for value in (1, 2):
        hydra_compat.register("one/more/config", {"a": value})
        hydra_compat.register("one_more_config", {"a": value})
    assert ConfigStore.instance().load("one/more/config.yaml").node == {"a": 1}
    assert ConfigStore.instance().load("one_more_config.yaml").node == {"a": 1}
