from __future__ import annotations

import os

import pytest
from hydra.errors import ConfigCompositionException

from ddp_hydra import cli
from ddp_hydra.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    """A run directory that was started with some overrides."""
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(
        "- experiment=digits\n- cluster.n_workers=4\n- optimizer.lr=0.1\n- +model.extra=1\n- resume=elsewhere\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], ["experiment=digits", "cluster.n_workers=4", "optimizer.lr=0.1", "+model.extra=1"]),
        (["optimizer.lr=0.2"], ["experiment=digits", "cluster.n_workers=4", "+model.extra=1"]),
        (["cluster=inline"], ["experiment=digits", "optimizer.lr=0.1", "+model.extra=1"]),
        (["model.extra=2"], ["experiment=digits", "cluster.n_workers=4", "optimizer.lr=0.1"]),
        (["experiment=pet_names"], ["cluster.n_workers=4", "optimizer.lr=0.1", "+model.extra=1"]),
    ],
)
def test_a_resumed_run_brings_its_overrides_and_those_given_now_win(run, given, kept):
    arguments = [*given, f"resume={run}"]
    assert cli.with_resumed_overrides(arguments) == kept + arguments


def test_a_checkpoint_file_brings_the_overrides_of_its_run(run):
    arguments = [f"resume={run}/checkpoints/last.pt"]
    assert len(cli.with_resumed_overrides(arguments)) == 5


@pytest.mark.parametrize("arguments", [[], ["optimizer.lr=1"], ["resume="], ["resume=/nowhere/at/all"]])
def test_without_a_run_the_arguments_stay_as_they_are(arguments):
    assert cli.with_resumed_overrides(list(arguments)) == arguments


def raising(error: BaseException):
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("data.batch_size=0: give more"), 1, "ddp_hydra: data.batch_size=0: give more\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            ConfigCompositionException("Key 'modell' not in 'Config'"),
            1,
            "the groups and keys are cluster, data, model, sampler",
        ),
        (FileExistsError(17, "File exists", "outputs"), 1, "give another with hydra.run.dir=<folder>"),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops"),
    ],
)
def test_errors_are_told_in_a_sentence_and_become_exit_codes(error, code, said, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    assert cli.report(raising(error)) == code
    assert said in capsys.readouterr().err
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_hydra_full_error_shows_the_traceback_of_a_users_mistake(capsys, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert cli.report(raising(ConfigError("no"))) == 1
    assert "Traceback" in capsys.readouterr().err
    assert os.environ["HYDRA_FULL_ERROR"] == "1"
