"""What the command does before it predicts; tests/integration/test_predict.py predicts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_hydra.api import ComposedConfig
from ddp_hydra.cli import inference, runs
from ddp_hydra.cli.inference import plan, predict, prepared_inference
from ddp_hydra.config import env_values
from ddp_hydra.errors import CheckpointError, ConfigError, Interrupted
from ddp_hydra.job.run_dir import keep_environment
from ddp_hydra.writers.run_dir import is_locked, locked


def test_a_second_one_with_the_same_file_leaves_the_folder_to_the_first(tmp_path):
    folder, checkpoint = tmp_path / "out.csv.parts", tmp_path / "last.pt"
    checkpoint.touch()
    with locked(folder):  # by the first one, which has no part yet
        with pytest.raises(ConfigError, match="give another out="):
            predict(str(checkpoint), tmp_path / "out.csv")
        assert is_locked(folder)
    with pytest.raises(CheckpointError, match=r"does not exist; in .* there is last\.pt, out\.csv\.parts/$"):
        predict(str(tmp_path / "run"), tmp_path / "other.csv")
    with pytest.raises(CheckpointError, match="does not exist"):
        predict(str(tmp_path / "run"), tmp_path / "new" / "folder" / "out.csv")
    assert set(tmp_path.iterdir()) == {checkpoint, folder}


def test_an_interrupt_before_the_ranks_start_is_told(tmp_path, monkeypatch):
    def run(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "last.pt").touch()
    monkeypatch.setattr(inference, "prepared_inference", lambda *_: SimpleNamespace(run=run))
    monkeypatch.setattr(inference, "plan", lambda *_: {})
    with pytest.raises(Interrupted, match=r"^interrupted; the same command goes on$"):
        predict(str(tmp_path / "last.pt"), tmp_path / "out.csv")


def test_parts_of_other_variables_are_not_mixed(tmp_path):
    (tmp_path / "last.pt").touch()
    job = {"checkpoint": tmp_path / "last.pt", "overrides": [], "groups": {}, "split": "val"}
    plans = [
        plan(SimpleNamespace(**job, environment={"A": value}, check=lambda: SimpleNamespace(sha256="")), "csv")
        for value in "112"
    ]
    assert plans[0] == plans[1] != plans[2]


def test_a_group_is_found_in_the_folder_of_configs_that_the_run_was_given(tmp_path, monkeypatch):
    (groups := tmp_path / "extra" / "data").mkdir(parents=True)
    (groups / "mine.yaml").write_text("val: {_target_: data.mine.Photos}\n")
    monkeypatch.chdir(tmp_path)
    ComposedConfig(["hydra.searchpath=[file://extra]", "hydra.run.dir=run"]).save()
    (other := tmp_path / "other").mkdir()
    monkeypatch.chdir(other)
    found = prepared_inference("../run", Path("last.pt"), "val", ["data=mine", "+data.val.n=3"])
    assert found.groups["data"]["val"] == {"_target_": "data.mine.Photos", "n": 3}


def test_values_that_the_environment_gives_otherwise_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALE", "4")
    word = "+data.val.scale='${oc.decode:${oc.env:SCALE}}'"
    monkeypatch.setenv("SEED", "1")
    job = ComposedConfig([word, "seed=${oc.env:SEED}", "trainer.threads=${oc.env:SEED}", "hydra.run.dir=run"])
    job.save()
    keep_environment(tmp_path / "run", env_values.values_of(job.cfg))
    prepared_inference("run", Path("last.pt"), "val", [])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SCALE", "2.5")
    prepared_inference("run", Path("last.pt"), "val", [])
    told = "ddp_hydra: data.val.scale 4 -> 2.5: the environment is not the run's\n"
    assert capsys.readouterr().err == told
    runs.reproduce(["run"])
    assert capsys.readouterr().err.endswith(told)
    prepared_inference("run", Path("last.pt"), "val", ["data.val.scale=4"])
    monkeypatch.setenv("SEED", "2")
    prepared_inference("run", Path("last.pt"), "val", ["data.val.scale=4", "trainer.threads=1"])
    assert capsys.readouterr().err == "ddp_hydra: seed 1 -> 2: the environment is not the run's\n"
    monkeypatch.setenv("SEED", "1")
    monkeypatch.setenv("OTHER", "3")
    prepared_inference("run", Path("last.pt"), "val", ["data.val.scale=${oc.decode:${oc.env:OTHER}}"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("word", ["hydra.run.dir=mine", "hydra/job_logging=none"])
def test_words_of_hydra_are_refused(word):
    with pytest.raises(ConfigError, match=f"{word}: only a training has a folder and settings of Hydra: leave it out"):
        prepared_inference("run", Path("last.pt"), "val", [word])
