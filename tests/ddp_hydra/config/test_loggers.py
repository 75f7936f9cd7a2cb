"""`results.loggers`: names and nodes, their settings, and the parameters that loggers show."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config import schema, validate
from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.errors import ConfigError
from ddp_hydra.job import job_config

CONF = Path(__file__).parents[3] / "conf"


def composed(*overrides: str) -> DictConfig:
    schema.register()
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        return compose("config", [*overrides])


@pytest.mark.medium
def test_there_are_no_loggers_unless_they_are_named():
    assert validate.logger_nodes(composed()) == {}


@pytest.mark.medium
def test_a_name_has_the_settings_of_its_group():
    found = validate.logger_nodes(
        composed("results.loggers=[mlflow,wandb]", "results.mlflow.tracking_uri=http://h:5000")
    )
    assert list(found) == ["mlflow", "wandb"]
    assert found["mlflow"] == {
        "_target_": "ddp_hydra.writers.loggers.services.MlflowLogger", "tracking_uri": "http://h:5000",
        "experiment": None, "run_name": None, "tags": {}, "checkpoints": None,
    }  # fmt: skip


@pytest.mark.medium
def test_a_node_is_a_logger_by_the_name_of_its_class():
    found = validate.logger_nodes(composed("results.loggers=[clearml,{_target_:models.mine.MyWriter,path:x}]"))
    assert found["MyWriter"] == {"_target_": "models.mine.MyWriter", "path": "x"}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["results.loggers=[mlfow]"], "results.loggers has 'mlfow': did you mean mlflow? Give mlflow, wandb,"),
        (["results.loggers=[tensorboard]"], "results.loggers has 'tensorboard'; give mlflow, wandb,"),
        (["results.loggers=[{path:x}]"], "results.loggers has {'path': 'x'}; give mlflow"),
        (["results.loggers=[wandb,wandb]"], "results.loggers names wandb more than once: leave one out"),
        (
            ["results.loggers=[wandb]", "results.wandb.checkpoints=last"],
            "results.wandb.checkpoints=last: give best, all or null",
        ),
        (["results.loggers_timeout_s=-1"], "results.loggers_timeout_s=-1: give seconds, 0 or more"),
    ],
)
def test_wrong_settings_are_refused_with_a_sentence(overrides, sentence):
    with pytest.raises(ConfigError) as raised:
        job_config.check(composed(*overrides))
    assert str(raised.value).startswith(sentence)


@pytest.mark.medium
def test_a_writer_of_the_project_that_does_not_exist_is_found_before_the_cluster(monkeypatch):
    cfg = composed("results.loggers=[{_target_:models.resnet.Writer}]")
    with pytest.raises(ConfigError, match=r"results.loggers.0._target_=models.resnet.Writer: models/resnet.py has no"):
        job_config.packed_project(cfg, OmegaConf.to_container(cfg))


@pytest.mark.medium
@pytest.mark.parametrize("name", validate.LOGGERS)
def test_a_missing_package_is_said_with_what_to_type(name, monkeypatch):
    monkeypatch.setattr(validate.importlib.util, "find_spec", lambda package: None if package == name else 1)
    with pytest.raises(ConfigError, match=rf"needs a package: pip install 'ddp-hydra\[{name}\]'"):
        validate.check_loggers_installed(composed(f"results.loggers=[{name}]"))


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
@pytest.mark.parametrize("name", validate.LOGGERS)
def test_no_logger_imports_its_package_in_the_job(name):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    script = (
        "import sys, ddp_hydra.job.loggers, ddp_hydra.writers.loggers.services; "
        f"sys.exit({name!r} in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=CONF.parent, check=False).returncode == 0


@pytest.mark.medium
def test_parameters_are_flat_and_have_neither_cluster_nor_secrets(monkeypatch):
    monkeypatch.setenv("MY_PLACE", "hidden")
    cfg = composed(
        "+data.api_token=abc", "+data.place=${oc.env:MY_PLACE}", "+data.again=${data.place}", "seed=7",
        "+data.url='https://me:pw@host/x'", "optimizer.lr=0.25", "+data.list=[1,2]",
    )  # fmt: skip
    found = validate.logged_parameters(cfg)
    assert found["optimizer.lr"] == 0.25
    assert found["sampler.seed"] == 7  # ${seed}
    assert found["trainer.precision"] == "fp32"
    assert found["data.list"] == [1, 2]
    assert found["data.api_token"] == "***"
    assert found["data.place"] == found["data.again"] == "${oc.env:MY_PLACE}"
    assert "pw" not in found["data.url"]
    assert not [key for key in found if key.startswith(("cluster", "results", "resume"))]
