"""What was written is read by TensorBoard's own backend of the HParams tab."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

from ddp_hydra.errors import Interrupted
from ddp_hydra.record import Metrics, Record, Start
from ddp_hydra.writers import tensorboard
from ddp_hydra.writers.tensorboard import TensorBoardWriter

STATUSES = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("tensorboard").setLevel(logging.ERROR)


class Tab:
    """The HParams tab over a folder."""

    def __init__(self, folder) -> None:
        multiplexer = EventMultiplexer()
        multiplexer.AddRunsFromDirectory(str(folder))
        self.multiplexer = multiplexer
        self.reload()
        provider = MultiplexerDataProvider(multiplexer, str(folder))
        self.backend = backend_context.Context(TBContext(data_provider=provider))

    def reload(self) -> None:
        self.multiplexer.Reload()

    def rows(self):
        """By session: what it was given, its metrics, its status."""
        request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=1000, allowed_statuses=STATUSES)
        answer = list_session_groups.Handler(context.RequestContext(), self.backend, "", request).run()
        found = {}
        for group in answer.session_groups:
            (session,) = group.sessions
            given = {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()}
            metrics = {value.name.tag: round(value.value, 6) for value in session.metric_values}
            found[session.name] = given, metrics, api_pb2.Status.Name(session.status).removeprefix("STATUS_").lower()
        return found

    def experiment(self):
        request = api_pb2.GetExperimentRequest()
        return get_experiment.Handler(context.RequestContext(), self.backend, "", request).run()


def metrics(step: int, **values: float) -> Record:
    return Record(Metrics({name.replace("__", "/"): v for name, v in values.items()}), 0, step, 1.0)


def train(run_dir, overrides, accuracy: float | None = None, error: BaseException | None = None) -> None:
    with tensorboard.session(run_dir, overrides):
        writer = TensorBoardWriter(run_dir)
        if accuracy is not None:
            writer.write(metrics(10, val__accuracy=0.125, lr=1.0))
            writer.write(metrics(20, val__accuracy=accuracy, lr=1.0))
        writer.close()
        if error is not None:
            raise error


def test_two_jobs_can_be_compared(tmp_path):
    common = [
        "data.batch_size=32",
        "+trainer.channels_last=true",
        "model=resnet18",
        "tags=[a, b]",
        "trainer.epochs=null",
    ]
    train(tmp_path / "0", ["optimizer.lr=1e-1", *common], 0.5)
    train(tmp_path / "1", ["optimizer.lr=1e-2", *common], 0.75)
    texts = {"model": "resnet18", "tags": "[a, b]", "trainer.epochs": "null"}
    given = {"data.batch_size": 32.0, "trainer.channels_last": True, **texts}
    assert Tab(tmp_path).rows() == {
        "0/tensorboard": ({"optimizer.lr": 0.1, **given}, {"val/accuracy": 0.5, "lr": 1.0}, "success"),
        "1/tensorboard": ({"optimizer.lr": 0.01, **given}, {"val/accuracy": 0.75, "lr": 1.0}, "success"),
    }


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError(), "failure"), (Interrupted(), "unknown"), (KeyboardInterrupt(), "unknown")]
)
def test_a_job_that_does_not_succeed_says_so(tmp_path, error, status):
    with pytest.raises(type(error)):
        train(tmp_path / "0", ["seed=1"], error=error)
    assert Tab(tmp_path).rows() == {"0/tensorboard": ({"seed": 1.0}, {}, status)}


def test_a_running_job_is_there_already(tmp_path):
    with tensorboard.session(tmp_path / "0", ["seed=1"]):
        tab = Tab(tmp_path)
        assert tab.rows() == {"0/tensorboard": ({"seed": 1.0}, {}, "unknown")}
        writer = TensorBoardWriter(tmp_path / "0")
        for step in (1, 2):
            writer.write(metrics(step, loss=step))
            tab.reload()
    writer.close()
    tab.reload()
    assert tab.rows()["0/tensorboard"][2] == "success"
    assert [event.step for event in tab.multiplexer.Tensors("0/tensorboard", "loss")] == [1, 2]


def test_a_job_that_runs_again_in_its_folder_has_one_session(tmp_path):
    with pytest.raises(ValueError, match="x"):
        train(tmp_path / "0", ["seed=1"], 0.25, ValueError("x"))
    train(tmp_path / "0", ["seed=2"], 0.5)
    assert Tab(tmp_path).rows() == {"0/tensorboard": ({"seed": 2.0}, {"val/accuracy": 0.5, "lr": 1.0}, "success")}
    assert len(list(tmp_path.rglob("*.hparams"))) == 2
    train(tmp_path / "0", [], 0.5)
    assert Tab(tmp_path).rows() == {}


def test_an_attempt_that_takes_points_back_leaves_the_session(tmp_path):
    with tensorboard.session(tmp_path, ["seed=1"]):
        writer = TensorBoardWriter(tmp_path)
        writer.write(metrics(10, loss=1))
        writer.write(Record(Start(), step=0, attempt=1, time_s=1.0))
        writer.write(Record(Metrics({"loss": 2}), step=10, attempt=1, time_s=1.0))
        writer.close()
    assert Tab(tmp_path).rows() == {"tensorboard": ({"seed": 1.0}, {"loss": 2.0}, "success")}


def test_a_sweep_shows_what_differs_and_its_objective_first(tmp_path):
    jobs = [
        ["optimizer.lr=0.1", "model=a", "x=1", "seed=3", "data.flip=true"],
        ["optimizer.lr=0.2", "model=b", "x=a", "seed=3", "data.flip=false"],
        ["optimizer.lr=0.2", "model=b", "seed=3", "data.flip=true"],
    ]
    for number, overrides in enumerate(jobs):
        train(tmp_path / str(number), overrides, number / 4)
    tensorboard.write_experiment(tmp_path, jobs[:1], ["lr"])
    tensorboard.write_experiment(tmp_path, jobs, ["val/accuracy", "val/loss"])
    tab = Tab(tmp_path)
    experiment = tab.experiment()
    assert [info.name.tag for info in experiment.metric_infos] == ["val/accuracy", "val/loss"]
    assert {info.name: info.type for info in experiment.hparam_infos} == {
        "optimizer.lr": api_pb2.DATA_TYPE_FLOAT64,
        "model": api_pb2.DATA_TYPE_STRING,
        "x": api_pb2.DATA_TYPE_STRING,
        "data.flip": api_pb2.DATA_TYPE_BOOL,
    }
    assert [row[1] for row in tab.rows().values()] == [{"val/accuracy": number / 4} for number in range(3)]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("a=1", 1.0),
        ("++a=-1.5e-3", -0.0015),
        ("a=True", True),
        ("a=nan", "nan"),
        ("a=-inf", "-inf"),
        ("a=" + "9" * 400, "9" * 400),
        ("a='1'", "1"),
        ("a='x, y'", "x, y"),
        ("a=", ""),
        ("a=null", "null"),
        ("a={b: 1}", "{b: 1}"),
        ("a=${oc.env:HOME}", "${oc.env:HOME}"),
        ("a=s3://bucket/folder", "s3://bucket/folder"),
        ("a='https://u:secret@host/x?sig=secret'", "https://host/x"),
        ("a='host=h user=u'", "host=h user=u"),
        ("a={d_key: 8}", "{d_key: 8}"),
        ("a='na\udcefve'", "na?ve"),
    ],
)
def test_a_value_is_a_number_a_boolean_or_text(override, value, tmp_path):
    assert tensorboard.values([override]) == {"a": value}
    assert type(tensorboard.values([override])["a"]) is type(value)
    with tensorboard.session(tmp_path, [override]):
        pass
    assert Tab(tmp_path).rows()["tensorboard"][0] == {"a": value}


@pytest.mark.parametrize(
    "override",
    [
        "resume=outputs/x", "dry_run=true", "faults=['kill,rank=1']", "results.mirror=s3://a/b", "results=default",
        "a.token=***", "hydra.run.dir=x", "hydra/launcher=basic", "hydra.job.num=1", "~scheduler", "~a.b=1",
    ],
)  # fmt: skip
def test_what_makes_no_other_job_is_left_out(override):
    assert tensorboard.values([override]) == {}


@pytest.mark.parametrize(
    "override",
    [
        "+data.secret=hush", "data.aws_secret_access_key=hush", "data.token=hush", "data.api_key=hush", "a.apiKey=hush",
        "data.dbPassword=hush", "+data.storage={endpoint: x, key: hush}", "a=[{b: {client_secret: hush}}]",
        "data.credentials=hush", "data.password2=hush", "a.GITHUB_TOKEN=hush", "x@data.token=hush", "a='s3://k:hush@b/c'",
        "a='postgres://hush@b'", "a='http://x/y?token=hush'", "a=['http://k:hush@b/c']", "a={b: 'http://x/y?t=hush'}",
        "a='host=h user=u password=hush'", "a='Server=h;Password=hush'", "tags=['token=hush',ok]",
        "a={x: 'password=hush'}", "a={token: '${oc.env:NAME,hush}'}",
        "a='it\\'s password=hush'", "a=[{private_key: '-----BEGIN PRIVATE KEY-----hush'}]",
        "a='-----BEGIN PRIVATE KEY-----hush'",
    ],
)  # fmt: skip
def test_no_secret_is_written(override, tmp_path):
    with tensorboard.session(tmp_path / "0", [override, "seed=1"]):
        pass
    tensorboard.write_experiment(tmp_path, [[override, "seed=1"]], [])
    for path in tmp_path.rglob("*.hparams"):
        assert b"hush" not in path.read_bytes()


def test_without_overrides_nothing_is_written(tmp_path):
    train(tmp_path, [])
    assert list(tmp_path.rglob("*")) == []


def test_a_folder_that_cannot_be_written_ends_no_job(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("")
    with tensorboard.session(tmp_path, ["seed=1"]):
        pass
    tensorboard.write_experiment(tmp_path / "tensorboard" / "x", [["seed=1"]], [])
    assert len(caplog.messages) == 3
    assert all("HParams tab does not show" in message for message in caplog.messages)


@pytest.mark.integration
def test_no_torch_and_no_tensorflow_are_imported():
    code = "import sys; from ddp_hydra.writers import tensorboard; sys.exit(any(n in sys.modules for n in sys.argv))"
    subprocess.run([sys.executable, "-c", code, "torch", "tensorflow"], check=True)
