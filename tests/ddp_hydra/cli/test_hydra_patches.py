"""Hydra, as the command changes it, composes and lists what it does by itself."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core import utils
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from omegaconf import OmegaConf

from ddp_hydra.cli.compose import composed_once, listed_without_copies, saved_without_secrets
from ddp_hydra.config.hydra_compat import IS_1_3, VERSION_BASE
from ddp_hydra.config.project import starter
from tests.support.disk import files_up_to


@pytest.fixture
def app(tmp_path, monkeypatch):
    """Run an app, and return what it got and how often Hydra has composed."""
    (tmp_path / "conf" / "group").mkdir(parents=True)
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [{group: a}, _self_]\nnumber: 1\n")
    (tmp_path / "conf" / "missing.yaml").write_text("defaults:\n- group: ???\n")
    (tmp_path / "conf" / "sweeps.yaml").write_text(
        "hydra: {mode: MULTIRUN, sweeper: {params: {number: '1,2'}}}\nnumber: 1\n"
    )
    (tmp_path / "conf" / "group" / "a.yaml").write_text("name: a\n")
    (tmp_path / "conf" / "group" / "b.yaml").write_text("name: b\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    load: Any = ConfigLoaderImpl._load_configuration_impl
    composed: list[Any] = []

    def count(*args: Any, **kwargs: Any) -> Any:
        composed.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", count)

    def run(*words: str, once: bool, config: str = "config") -> tuple[list[Any], int]:
        got: list[Any] = []

        def main(cfg: Any) -> None:
            got.append((cfg.copy(), HydraConfig.get().copy()))

        monkeypatch.setattr(sys, "argv", ["app", *words, "hydra.run.dir=out", "hydra.sweep.dir=swept"])
        composed.clear()
        GlobalHydra.instance().clear()
        with composed_once("-m" in words) if once else nullcontext():
            hydra.main(config_path=str(tmp_path / "conf"), config_name=config, **VERSION_BASE)(main)()
        return got, len(composed)

    return run


@pytest.mark.medium
@pytest.mark.parametrize("words", [(), ("group=b", "number=2", "+more=3"), ("hydra.job.name=x",), ("hydra.mode=RUN",)])
def test_the_config_is_the_one_that_hydra_composes_itself(app, words):
    expected, twice = app(*words, once=False)
    got, composed = app(*words, once=True)
    assert got == expected
    assert twice == (2 if IS_1_3 else 1)
    assert composed == 1


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "config"),
    [
        (("-m", "number=1,2"), "config"),
        pytest.param((), "sweeps", marks=pytest.mark.slow),
        pytest.param(("hydra.mode=MULTIRUN", "number=1,2"), "config", marks=pytest.mark.slow),
    ],
)
def test_a_sweep_is_composed_as_hydra_does(app, words, config):
    expected, before = app(*words, once=False, config=config)
    got, composed = app(*words, once=True, config=config)
    assert got == expected
    assert [cfg.number for cfg, _ in got] == [1, 2]
    if IS_1_3 and "-m" in words:
        assert composed == before - 1


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "config"),
    [(("number=1,2",), "config"), (("nothing=1",), "config"), (("group=c",), "config"), ((), "missing")],
)
def test_a_mistake_is_reported_as_hydra_does(app, words, config):
    errors = []
    for once in (False, True):
        with pytest.raises(HydraException) as raised:
            app(*words, once=once, config=config)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    assert not Path("out").exists()


@pytest.mark.medium
def test_no_secret_is_saved(app, tmp_path):
    word = "+password=top-secret"
    app(word, once=False)
    as_hydra = {path.name: path.read_text() for path in (tmp_path / "out" / ".hydra").iterdir()}
    before = utils._save_config
    with saved_without_secrets():
        app(word, once=False)
    assert utils._save_config is before
    saved = {path.name: path.read_text() for path in (tmp_path / "out" / ".hydra").iterdir()}
    assert saved.keys() == as_hydra.keys() == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    for name, text in as_hydra.items():
        assert "***" in saved[name]
        assert OmegaConf.create(saved[name].replace("***", "top-secret")) == OmegaConf.create(text)


def test_a_run_directory_whose_config_can_not_be_written_is_named_and_removed(tmp_path):
    folder = tmp_path / "run" / ".hydra"
    with saved_without_secrets(), files_up_to(100):
        utils._save_config(OmegaConf.create({"a": 1}), "hydra.yaml", folder)
        with pytest.raises(OSError, match="File too large") as raised:
            utils._save_config(OmegaConf.create({"a": "x" * 200}), "config.yaml", folder)
    assert raised.value.filename == str(folder / "config.yaml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.medium
def test_the_options_are_those_that_hydra_lists(monkeypatch):
    before = ConfigLoaderImpl.get_group_options
    with initialize_config_dir(str((starter() / "conf").absolute()), **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        groups = loader.list_groups("")
        kinds = (ObjectType.CONFIG, ObjectType.GROUP, None)
        wanted = [loader.get_group_options(group, kind) for group in groups for kind in kinds]
        with listed_without_copies():
            monkeypatch.setattr("hydra._internal.config_repository.copy.deepcopy", None)
            assert [loader.get_group_options(group, kind) for group in groups for kind in kinds] == wanted
    assert {"cluster", "data", "model"} <= set(groups)
    assert ConfigLoaderImpl.get_group_options is before
