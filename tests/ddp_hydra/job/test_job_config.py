"""The weights that a job starts with: a file, a run directory, or a name of pretrained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ddp_hydra.config import redact
from ddp_hydra.config.hydra_compat import hydra_config_of
from ddp_hydra.errors import CheckpointError
from ddp_hydra.job.job_config import (
    LOG_FORMAT,
    check_files,
    find_paths,
    find_weights,
    rank_log_config,
    settings_of_hydra,
    weights_path,
)


def job(weights):
    return OmegaConf.create(
        {"model": {"_target_": "models.resnet.resnet18", "weights": weights}, "results": {"retry_s": 0.0}}
    )


@pytest.mark.parametrize("given", [None, "DEFAULT", "IMAGENET1K_V1", 7])
def test_a_name_is_no_path(given):
    assert weights_path(job(given)) is None
    assert find_weights(job(given), Path()) is None
    assert find_weights(OmegaConf.create({"model": None}), Path()) is None


def test_a_file_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "mine.pt").touch()
    monkeypatch.chdir(tmp_path)
    assert find_weights(job("mine.pt"), tmp_path) == tmp_path / "mine.pt"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_weights(job("~/mine.pt"), tmp_path) == tmp_path / "mine.pt"


@pytest.mark.parametrize("given", ["no.pth", "outputs/no"])
def test_a_path_with_nothing_there_is_refused(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"^model.weights={given}: there is no such file, nor a run directory$"):
        find_weights(job(given), tmp_path)


def test_a_run_directory_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        find_weights(job(str(tmp_path)), tmp_path)


def test_a_run_directory_that_points_to_its_results_and_the_run_of_a_store_have_weights_too(tmp_path, monkeypatch):
    asked = []
    fetch = lambda url, folder, which, retry_s: asked.append((url, which)) or folder / "best.pt"  # noqa: E731
    monkeypatch.setattr("ddp_hydra.storage.run_ref.fetch_checkpoint", fetch)
    (tmp_path / "results.url").write_text("s3://bucket/runs/a\n")
    for given in ("s3://bucket/runs/a", str(tmp_path)):
        assert find_weights(job(given), tmp_path) == tmp_path / ".resume" / "best.pt"
    assert asked == [("s3://bucket/runs/a", "best")] * 2


def test_a_dry_run_takes_files_as_the_job_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("no.pth", "outputs/no"):
        with pytest.raises(CheckpointError, match=f"{given}"):
            check_files(OmegaConf.merge(job(given), {"resume": None}))
        with pytest.raises(CheckpointError, match=f"{given} does not exist"):
            check_files(OmegaConf.merge(job(None), {"resume": given}))
    check_files(OmegaConf.merge(job(None), {"resume": "s3://bucket/run"}))
    (tmp_path / "a.pt").touch()
    check_files(OmegaConf.merge(job("a.pt"), {"resume": None}))


def test_paths_of_models_and_data_are_written_whole(tmp_path, monkeypatch):
    """A later command may be typed in another folder."""
    (tmp_path / "base").mkdir()
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = {"_target_": "ddp_hydra.finetune.models.causal_lm", "path": "base"}
    sets = {"a": {"tokenizer": "base", "train": {"tokenizer": "${..tokenizer}"}}, "b": {"tokenizer": "gpt2"}}
    cfg = OmegaConf.create({"model": model, "data": {"tokenizer": "???", "sets": sets}})
    find_paths(cfg)
    assert cfg.model.path == cfg.data.sets.a.tokenizer == cfg.data.sets.a.train.tokenizer == str(tmp_path / "base")
    assert cfg.data.sets.b.tokenizer == "gpt2"
    for name in ("json", "a.json", "b.json", "photos", "train"):
        (tmp_path / name).touch()
    plain = {"path": "json", "bucket": "photos", "name": "train", "files": "s3://b/a.json", "val_table": "none.csv"}
    cfg = OmegaConf.create(
        {"model": {}, "data": {**plain, "urls": "{a..b}.json", "val_files": ["a.json", "none.json"]}}
    )
    find_paths(cfg)
    wanted = {"urls": f"{tmp_path}/{{a..b}}.json", "val_files": [f"{tmp_path}/a.json", "none.json"]}
    assert cfg.data == {**plain, **wanted}
    cfg.data.bucket = "./photos"
    find_paths(cfg)
    assert cfg.data.bucket == f"{tmp_path}/photos"
    (tmp_path / "rows.parquet").mkdir()  # as Spark writes it
    names = {"source": "", "train": {"table": "base", "index": ""}, "path": ""}
    cfg = OmegaConf.create({"model": {}, "data": {**names, "bucket": "~no user/photos"}})
    find_paths(cfg)
    assert cfg.data == {**names, "bucket": "~no user/photos"}
    cfg.data.source, cfg.data.train.table = "base", "rows.parquet"
    find_paths(cfg)
    assert (cfg.data.source, cfg.data.train.table) == (f"{tmp_path}/base", f"{tmp_path}/rows.parquet")


def found_in(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    cfg = OmegaConf.create({"model": {}, "data": data})
    find_paths(cfg)
    return {
        key: one.removeprefix(f"{folder}/") + " is whole"
        if isinstance(one, str) and one.startswith(f"{folder}")
        else one
        for key, one in redact.values_of(OmegaConf.to_container(cfg.data))
    }


def test_paths_of_data_sets_of_ones_own_are_written_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("files/a.csv", "org/name/a.csv", "root/files/a.csv", "train/a.csv", "a.csv", "b.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    whole = {"csv": "b.csv", "train.labels": "files/a.csv", "x": "./b.csv", "img_dir": "files/", "file": "*.csv"}
    given = {"csv": "b.csv", "train": {"labels": "files/a.csv"}, "x": "./b.csv", "img_dir": "files/", "file": "*.csv"}
    wanted = {key: f"{one.removeprefix('./')} is whole" for key, one in whole.items()}
    assert found_in(tmp_path, given) == wanted
    assert found_in(tmp_path, {"parts": ["files/a.csv", "b.csv"], "csv": ["b.csv"]}) == {
        "parts.0": "files/a.csv is whole",
        "parts.1": "b.csv",
        "csv.0": "b.csv is whole",
    }
    kept = {
        "name": "org/name",
        "split": "train",
        "prefix": "org/name",
        "format": "files/{}.csv",
        "glob": "files/*.csv",
        "url": "file://files/a.csv",
        "other": "b.csv",
        "csv": "no.csv",
        "text": "a/" * 9999,
        "void": "a/\0",
    }
    assert found_in(tmp_path, kept) == kept


@pytest.mark.parametrize("root", [".", "root", "${..base}"])
def test_a_path_that_is_there_below_another_key_of_the_data_set_stays(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("files/a.csv", "root/files/a.csv"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    data = {"base": "root", "missing": "???", "train": {"data": root, "csv": "files/a.csv", "more": ["files/a.csv"]}}
    assert found_in(tmp_path, data) == {
        "base": "root",
        "missing": "???",
        "train.data": root,
        "train.csv": "files/a.csv",
        "train.more.0": "files/a.csv",
    }
    named = {"a.csv": "files/a.csv", 0: "files/a.csv"}
    assert list(found_in(tmp_path, {"tables": named}).values()) == ["files/a.csv"] * 2


def test_a_folder_that_holds_one_of_its_own_name_is_written_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "data").mkdir(parents=True)
    given = {"img_dir": "data", "folder": ["data"]}
    assert found_in(tmp_path, {"a": {"img_dir": "data"}}) == {"a.img_dir": "data is whole"}
    assert found_in(tmp_path, {"a": {"folder": ["data"]}}) == {"a.folder.0": "data is whole"}
    assert found_in(tmp_path, given) == {"img_dir": "data is whole", "folder.0": "data"}


def test_runs_and_checkpoints_are_found_from_the_folder_that_the_command_was_typed_in(tmp_path, monkeypatch):
    (tmp_path / "job").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    hydra_cfg = {"job": {"chdir": True}, "runtime": {"cwd": str(tmp_path), "output_dir": str(tmp_path / "job")}}
    given = OmegaConf.create({"hydra": hydra_cfg})
    for weights, found in [("mine", str(tmp_path / "mine")), ("a/best.pt", f"{tmp_path}/a/best.pt"), ("gs", "gs")]:
        cfg = OmegaConf.merge(job(weights), {"resume": "a/checkpoints", "data": {}})
        with hydra_config_of(given):
            find_paths(cfg)
            assert settings_of_hydra()["cwd"] == str(tmp_path / "job")
        assert (cfg.resume, cfg.model.weights) == (f"{tmp_path}/a/checkpoints", found)
    cfg = OmegaConf.merge(job("s3://bucket/a"), {"resume": "s3://bucket/b", "data": {}})
    with hydra_config_of(given):
        find_paths(cfg)
    assert (cfg.resume, cfg.model.weights) == ("s3://bucket/b", "s3://bucket/a")
    assert "cwd" not in settings_of_hydra()


STREAM, FILE = {"class": "logging.StreamHandler", "formatter": "short"}, {"class": "logging.FileHandler"}
OWN = {
    "formatters": {"long": {"format": "long %(message)s"}, "short": {"format": "{message}", "style": "{"}},
    "handlers": {"file": {**FILE, "formatter": "long", "filename": "???"}, "console": STREAM},
    "root": {"level": "WARNING", "handlers": ["file", "console"]},
    "loggers": {"noisy": {"level": "ERROR", "handlers": ["file"]}, "plain": {"propagate": True}},
}


@pytest.mark.parametrize(
    ("given", "formatter", "root", "loggers"),
    [
        ({}, {"format": LOG_FORMAT}, "INFO", {}),
        ({"verbose": True}, {"format": LOG_FORMAT}, "DEBUG", {}),
        ({"verbose": "a"}, {"format": LOG_FORMAT}, "INFO", {"a": "DEBUG"}),
        ({"job_logging": OWN}, {"format": "{message}", "style": "{"}, "WARNING", {"noisy": "ERROR"}),
        ({"job_logging": OWN, "verbose": ["noisy", "b"]}, {"format": "{message}", "style": "{"}, "WARNING",
         {"noisy": "DEBUG", "b": "DEBUG"}),
        ({"job_logging": {**OWN, "formatters": {"short": {"()": "colorlog.ColoredFormatter", "format": "%(red)s"}}}},
         {"format": LOG_FORMAT}, "WARNING", {"noisy": "ERROR"}),
        ({"job_logging": {**OWN, "formatters": {"short": {"format": "%(job)s %(message)s"}}}}, {"format": LOG_FORMAT},
         "WARNING", {"noisy": "ERROR"}),  # a filter adds the field
        ({"job_logging": {"root": {"level": "ERROR"}, "disable_existing_loggers": True}}, {"format": LOG_FORMAT},
         "ERROR", {}),
    ],
)  # fmt: skip
def test_ranks_log_to_stderr_with_the_levels_and_the_format_of_hydra(given, formatter, root, loggers):
    found = rank_log_config(OmegaConf.create(given))
    assert found["formatters"]["ranks"] == formatter
    assert found["root"] == {"level": root, "handlers": ["stderr"]}
    assert {name: one["level"] for name, one in found["loggers"].items() if "level" in one} == loggers
    assert not found["disable_existing_loggers"]


@pytest.mark.parametrize("root", [None, {"handlers": []}])
def test_ranks_set_up_no_logging_where_hydra_sets_up_none(root):
    assert rank_log_config(OmegaConf.create({"job_logging": {"root": root}})) == {}


def test_ranks_keep_the_level_of_the_console_and_what_does_not_propagate():
    console = {"class": "logging.StreamHandler", "level": "ERROR"}
    given = {
        "handlers": {"console": console},
        "root": {"handlers": ["console"]},
        "loggers": {"a": {"propagate": False}},
    }
    found = rank_log_config(OmegaConf.create({"job_logging": given, "verbose": ["a"]}))
    assert (found["handlers"]["stderr"]["level"], found["root"]["level"]) == ("ERROR", "WARNING")
    assert found["loggers"] == {"a": {"propagate": False, "level": "DEBUG"}}


def test_the_starters_logs_of_ranks_name_logger_and_level_and_leave_libraries_quiet():
    node = OmegaConf.load(Path(__file__).parents[3] / "conf" / "hydra" / "job_logging" / "ddp_hydra.yaml")
    found = rank_log_config(OmegaConf.create({"job_logging": node}))
    assert found["formatters"]["ranks"] == {"format": LOG_FORMAT}
    assert found["loggers"]["botocore"] == {"level": "WARNING"}
