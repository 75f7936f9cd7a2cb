"""`results.loggers`: names and nodes, their settings, and the parameters that loggers show."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config import validate
from ddp_hydra.errors import ConfigError
from ddp_hydra.job import job_config
from tests.ddp_hydra.config.configs import CONF, changed, composed


def loggers(*named: Any, **values: Any) -> DictConfig:
    return changed({"results.loggers": list(named), **{f"results.{key}": value for key, value in values.items()}})


@pytest.mark.medium
def test_a_logger_is_a_name_with_the_settings_of_its_group_or_a_node():
    assert validate.logger_nodes(composed()) == {}
    node = {"_target_": "models.mine.MyWriter", "path": "x"}
    found = validate.logger_nodes(loggers("mlflow", "wandb", node, mlflow={"tracking_uri": "http://h:5000"}))
    assert list(found) == ["mlflow", "wandb", "MyWriter"]
    assert found["MyWriter"] == node
    assert found["mlflow"] == {
        "_target_": "ddp_hydra.writers.loggers.services.MlflowLogger", "tracking_uri": "http://h:5000",
        "experiment": None, "run_name": None, "tags": {}, "checkpoints": None,
    }  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize(
    ("named", "values", "sentence"),
    [
        (["mlfow"], {}, "results.loggers has 'mlfow': did you mean mlflow? Give mlflow, wandb,"),
        (["tensorboard"], {}, "results.loggers has 'tensorboard'; give mlflow, wandb,"),
        ([{"token": "hunter2"}], {}, "results.loggers has {'token': '***'}; give mlflow"),
        ([{"path": "x"}], {}, "results.loggers has {'path': 'x'}; give mlflow"),
        (["wandb", "wandb"], {}, "results.loggers names wandb more than once: leave one out"),
        (["wandb"], {"wandb": {"checkpoints": "last"}}, "results.wandb.checkpoints=last: give best, all or null"),
        ([], {"loggers_timeout_s": -1.0}, "results.loggers_timeout_s=-1: give seconds, 0 or more"),
    ],
)
def test_wrong_settings_are_refused_with_a_sentence(named, values, sentence):
    with pytest.raises(ConfigError) as raised:
        job_config.check(loggers(*named, **values))
    assert str(raised.value).startswith(sentence)


@pytest.mark.medium
def test_a_writer_of_the_project_that_does_not_exist_is_found_before_the_cluster():
    cfg = loggers({"_target_": "models.resnet.Writer"})
    with pytest.raises(ConfigError, match=r"results.loggers.0._target_=models.resnet.Writer: models/resnet.py has no"):
        job_config.packed_project(cfg, OmegaConf.to_container(cfg))


@pytest.mark.medium
def test_a_missing_package_is_said_with_what_to_type(monkeypatch):
    monkeypatch.setattr(validate.importlib.util, "find_spec", lambda package: None if package == "aim" else 1)
    validate.check_loggers_installed(loggers("wandb"))
    with pytest.raises(ConfigError, match=r"needs a package: pip install 'ddp-hydra\[aim\]'"):
        validate.check_loggers_installed(loggers("wandb", "aim"))


@pytest.mark.parametrize("name", validate.LOGGERS)
def test_each_logger_documents_its_settings_and_their_defaults(name):
    text = (CONF / "results" / "loggers" / f"{name}.yaml").read_text()
    node = OmegaConf.to_container(OmegaConf.create(text))
    parameters = inspect.signature(get_class(node.pop("_target_"))).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    assert {key: value or None for key, value in node.items()} == {
        key: value or None for key, value in defaults.items()
    }
    assert [key for key in node if not re.search(rf"^{key}: .*# \S", text, re.MULTILINE)] == []


@pytest.mark.integration
def test_no_logger_imports_its_package_in_the_job():
    script = (
        "import sys, ddp_hydra.job.loggers, ddp_hydra.writers.loggers.services; "
        f"sys.exit(', '.join({{*{(*validate.LOGGERS, 'torch')}}} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=CONF.parent, check=False).returncode == 0


@pytest.mark.medium
def test_parameters_are_flat_and_have_neither_cluster_nor_secrets(monkeypatch):
    monkeypatch.setenv("MY_PLACE", "hidden")
    given = {"api_token": "abc", "place": "${oc.env:MY_PLACE}", "again": "${data.place}", "list": [1, 2]}
    data = {f"data.{key}": value for key, value in {**given, "url": "https://me:pw@host/x"}.items()}
    cfg = changed({**data, "seed": 7, "optimizer.lr": 0.25})
    found = validate.logged_parameters(cfg)
    assert found["optimizer.lr"] == 0.25
    assert found["sampler.seed"] == 7  # ${seed}
    assert found["trainer.precision"] == "fp32"
    assert found["data.list"] == [1, 2]
    assert found["data.api_token"] == "***"
    assert found["data.place"] == found["data.again"] == "${oc.env:MY_PLACE}"
    assert "pw" not in found["data.url"]
    assert not [key for key in found if key.startswith(("cluster", "results", "resume"))]
