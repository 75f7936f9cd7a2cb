from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from ddp_hydra.cli import commands
from ddp_hydra.cli.compose import compose
from ddp_hydra.config import project
from ddp_hydra.errors import ConfigError, RecordError
from tests.support.disk import files_up_to


def test_a_project_has_all_that_a_first_change_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands.init(["my_project"])
    assert capsys.readouterr().out == "my_project has a project now. To train: cd my_project && ddp-hydra\n"
    folder = tmp_path / "my_project"
    assert (folder / "README.md").read_text().startswith("# my_project\n")
    assert "outputs/" in (folder / ".gitignore").read_text().split()
    assert project.is_project(folder)
    for name in ("model", "data"):
        (config,) = (folder / "conf" / name).iterdir()
        target = yaml.safe_load(config.read_text())
        target = target.get("_target_") or target["train"]["_target_"]
        assert (folder / (target.rpartition(".")[0].replace(".", "/") + ".py")).is_file()
    assert list((folder / "tests").glob("test_*.py"))


def test_its_command_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands.init(["my project", "--minimal"])
    assert capsys.readouterr().out.endswith("To train: cd 'my project' && ddp-hydra\n")


def test_a_minimal_one_is_its_main_config(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands.init(["--minimal", "."])
    assert capsys.readouterr().out == ". has a project now. To train: ddp-hydra\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "conf/config.yaml"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("mine")
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"has README.md, data/__init__.py already: name another"):
        commands.write_project(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "data", "README.md"}
    commands.write_project(tmp_path, minimal=True)
    with pytest.raises(ConfigError, match=r"conf/config\.yaml already"):
        commands.write_project(tmp_path, minimal=True)
    with pytest.raises(RecordError, match=rf"cannot write {tmp_path}/notes.txt/x: .*; choose another place"):
        commands.write_project(tmp_path / "notes.txt" / "x")
    for words in ([], ["a", "b"], ["--maximal", "a"]):
        with pytest.raises(ConfigError, match="give one folder, ddp-hydra init my_project"):
            commands.init(words)


def test_nothing_is_left_where_a_file_can_not_be_written(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(commands, "_template", lambda name: {"mine/a": "", "new/b": "", "new/folder/c": "x" * 9000})
    with files_up_to(5000), pytest.raises(RecordError, match=rf"^cannot write {tmp_path}/new/folder/c: File too large"):
        commands.write_project(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["mine"]


def test_the_readme_names_files_that_are_there(tmp_path):
    commands.write_project(tmp_path)
    named = {word.strip("`,.") for word in (tmp_path / "README.md").read_text().split() if "`" in word and "/" in word}
    assert {name for name in named if not (tmp_path / name).exists() and "<" not in name} == set()
    assert os.access(tmp_path / "conf/model/mlp.yaml", os.R_OK)
    assert Path(commands.TEMPLATE / "gitignore").is_file()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "model", "optimizer", "epochs"),
    [
        ([], "models.mlp.MLP", "torch.optim.AdamW", 15),
        (["experiment=digits"], "models.resnet.resnet18", "torch.optim.SGD", 12),
        (["experiment=mine", "trainer.epochs=2"], "models.unet.UNet", "torch.optim.SGD", 2),
        (["debug=one_batch"], "models.mlp.MLP", "torch.optim.AdamW", None),
    ],
    ids=str,
)
def test_an_experiment_and_typed_words_win_over_the_defaults_of_a_project(
    words, model, optimizer, epochs, tmp_path, monkeypatch
):
    commands.write_project(tmp_path / "p")
    (tmp_path / "p/conf/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: unet\n  - override /data: digit_masks\n"
    )
    monkeypatch.setenv(project.VARIABLE, str(tmp_path / "p"))
    cfg = compose(words)
    assert (cfg.model._target_, cfg.optimizer._target_, cfg.trainer.epochs) == (model, optimizer, epochs)


@pytest.mark.medium
def test_an_experiment_that_the_main_config_overrides_is_refused(tmp_path, monkeypatch):
    commands.write_project(tmp_path / "p")
    (tmp_path / "p/conf/config.yaml").write_text(
        "defaults:\n  - job\n  - _self_\n  - experiment: null\n  - debug: null\n  - override model: mlp\n"
    )
    monkeypatch.setenv(project.VARIABLE, str(tmp_path / "p"))
    with pytest.raises(
        ConfigError, match=r"experiment=digits chooses model=resnet18, and `override model: mlp` of the"
    ):
        compose(["experiment=digits"])
    assert compose(["experiment=digits", "model=resnet18"]).model._target_ == "models.resnet.resnet18"
    assert compose(["debug=inline"]).model._target_ == "models.mlp.MLP"
