"""What the MLflow logger does where a server answers with an error; whole runs are in the integration tests."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_hydra.record import Metrics, Record
from ddp_hydra.writers.loggers import RunInfo
from ddp_hydra.writers.loggers.services import MlflowLogger, allowed_name

pytestmark = pytest.mark.medium


def mlflow_error(code: str) -> Exception:
    from mlflow import exceptions  # takes a second

    return exceptions.MlflowException("no", error_code=exceptions.ErrorCode.Value(code))


class Client:
    """Notes calls, and raises or returns what is asked for."""

    tracking_uri = "http://127.0.0.1:5000/"

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            answer = self.answers.get(name)
            if isinstance(answer, list):
                answer = answer.pop(0)
            if isinstance(answer, str):
                raise mlflow_error(answer)
            return answer

        return call

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def a_run(run_id: str, stage: str = "active", **params: str) -> SimpleNamespace:
    info = SimpleNamespace(run_id=run_id, experiment_id="7", lifecycle_stage=stage)
    return SimpleNamespace(info=info, data=SimpleNamespace(params=params))


def logger_of(client: Client, **options: Any) -> MlflowLogger:
    logger = MlflowLogger(**options)
    logger.client = client
    return logger


def job(tmp_path, **more: Any) -> RunInfo:
    return RunInfo("day/time", tmp_path, ["good"], "sweep-1", {"optimizer.lr": 0.2, "seed": None}, **more)


def experiment(number: int) -> SimpleNamespace:
    return SimpleNamespace(experiment_id=number)


@pytest.fixture(autouse=True)
def own_variables(monkeypatch):
    for name in ("MAX_RETRIES", "TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)


def test_a_new_run_has_its_tags_and_parameters(tmp_path):
    client = Client(get_experiment_by_name=experiment(3), create_run=a_run("r1"))
    started = logger_of(client, tags={"team": "vision"}).begin(job(tmp_path))
    assert (started.id, started.url) == ("r1", "http://127.0.0.1:5000/#/experiments/7/runs/r1")
    (_, (number,), created), (_, _, logged) = (call for call in client.calls if call[0] in ("create_run", "log_batch"))
    assert (number, created["run_name"]) == ("3", "day/time")
    assert created["tags"] == {"run_dir": "day/time", "team": "vision", "sweep": "sweep-1", "tags": "good"}
    assert {param.key: param.value for param in logged["params"]} == {"optimizer.lr": "0.2", "seed": "null"}


def test_a_run_goes_on_and_what_has_changed_is_a_tag(tmp_path):
    client = Client(get_run=a_run("r1", **{"optimizer.lr": "0.1"}))
    assert logger_of(client).begin(job(tmp_path, earlier="r1")).id == "r1"
    assert client.calls[1] == ("update_run", ("r1",), {"status": "RUNNING"})
    params, tags = (kwargs for name, _, kwargs in client.calls if name == "log_batch")
    assert [param.key for param in params["params"]] == ["seed"]
    assert [(tag.key, tag.value) for tag in tags["tags"]] == [("changed.optimizer.lr", "0.2")]


@pytest.mark.parametrize("found", ["RESOURCE_DOES_NOT_EXIST", a_run("r1", "deleted")], ids=["unknown", "deleted"])
def test_a_run_that_is_gone_is_replaced_by_a_new_one(found, tmp_path):
    client = Client(get_run=found, get_experiment_by_name=experiment(3), create_run=a_run("r2"))
    assert logger_of(client).begin(job(tmp_path, earlier="r1")).id == "r2"


def test_an_experiment_that_another_job_creates_meanwhile_is_used(tmp_path):
    client = Client(
        get_experiment_by_name=[None, experiment(4)],
        create_experiment="RESOURCE_ALREADY_EXISTS",
        create_run=a_run("r1"),
    )
    logger_of(client, experiment="mine").begin(job(tmp_path))
    assert next(args for name, args, _ in client.calls if name == "create_run") == ("4",)
    assert client.calls[0][1] == ("mine",)


@pytest.mark.parametrize(("code", "is_refused"), [("PERMISSION_DENIED", True), ("INTERNAL_ERROR", False)])
@pytest.mark.parametrize("call", ["get_run", "create_experiment"])
def test_only_errors_that_time_may_mend_are_tried_again(call, code, is_refused, tmp_path):
    logger = logger_of(Client(**{call: code}))
    with pytest.raises(type(mlflow_error(code))) as caught:
        logger.begin(job(tmp_path, earlier="r1" if call == "get_run" else ""))
    assert logger.is_refusal(caught.value) is is_refused


def test_metrics_that_are_refused_are_given_up_and_others_are_kept():
    record = Record(Metrics({}), step=3, time_s=12.5)
    logger = logger_of(Client(log_batch=["TEMPORARILY_UNAVAILABLE", None, "INVALID_PARAMETER_VALUE", None]))
    logger.metrics({"train/loss": 1.0, "a b?": 2.0}, record)
    with pytest.raises(type(mlflow_error("TEMPORARILY_UNAVAILABLE"))):
        logger.flush()
    logger.flush()
    sent = logger.client.calls[1][2]["metrics"]
    assert [(metric.key, metric.value, metric.timestamp, metric.step) for metric in sent] == [
        ("train/loss", 1.0, 12500, 3), ("a b_", 2.0, 12500, 3),
    ]  # fmt: skip
    logger.metrics({"train/loss": 0.5}, record)
    with pytest.raises(type(mlflow_error("INVALID_PARAMETER_VALUE"))):
        logger.flush()
    logger.flush()
    assert len(logger.client.calls) == 3


def test_texts_images_and_checkpoints_are_artifacts(tmp_path):
    from PIL import Image

    png = io.BytesIO()
    Image.new("RGB", (2, 3)).save(png, "png")
    logger = logger_of(Client())
    logger.id = "r1"
    logger.text("sample?", "hello", 7)
    logger.image("grid", png.getvalue(), 7)
    logger.checkpoint(tmp_path / "step-000007.pt", 7, is_best=True)
    logger.checkpoint(tmp_path / "step-000008.pt", 8, is_best=False)
    logger.end("killed")
    text, image, *files, end = logger.client.calls
    assert text == ("log_text", ("r1", "hello", "texts/sample_/step-000007.md"), {})
    assert (image[1][1].size, image[2]) == ((2, 3), {"key": "grid", "step": 7, "synchronous": True})
    assert files == [
        ("log_artifact", ("r1", str(tmp_path / "step-000007.pt"), "checkpoints"), {}),
        ("set_tag", ("r1", "best_checkpoint", "checkpoints/step-000007.pt"), {}),
        ("log_artifact", ("r1", str(tmp_path / "step-000008.pt"), "checkpoints"), {}),
    ]
    assert end == ("set_terminated", ("r1", "KILLED"), {})


@pytest.mark.parametrize(
    ("name", "allowed"), [("a/b c", "a/b c"), ("lr (%)", "lr ___"), ("../x", "x"), ("?", "_"), ("", "_")]
)
def test_names_have_only_what_mlflow_allows(name, allowed):
    assert allowed_name(name) == allowed
