from __future__ import annotations

import json
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import hydra
import msgspec
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError

import ddp_hydra
from ddp_hydra.api import ComposedConfig, Run
from ddp_hydra.cli import commands
from ddp_hydra.cli.compose import compose
from ddp_hydra.cluster import connect as cluster
from ddp_hydra.config.checkpoint_config import stored_config
from ddp_hydra.config.hydra_compat import IS_1_3, hydra_config_of
from ddp_hydra.errors import ClusterError, ConfigError, Interrupted
from ddp_hydra.job.job_config import find_paths
from ddp_hydra.run_state import Objective, Summary
from ddp_hydra.writers.run_dir import locked

pytestmark = pytest.mark.medium


@pytest.fixture
def project(tmp_path, monkeypatch):
    commands.write_project(tmp_path)
    monkeypatch.setenv("DDP_HYDRA_PROJECT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddp_hydra.config.project.make_importable", lambda roots: None)
    return tmp_path


def test_the_package_has_them_without_importing_them_first():
    assert {"run", "connect", "Run"} <= set(dir(ddp_hydra))
    assert ddp_hydra.Run is Run
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        _ = ddp_hydra.walk


def test_a_config_is_composed_as_the_command_does(project):
    job = ComposedConfig(["optimizer.lr=0.5", "hydra.run.dir=there"])
    assert (job.cfg.model._target_, job.cfg.optimizer.lr, job.cfg.trainer.epochs) == ("models.mlp.MLP", 0.5, 15)
    assert (job.run_dir, job.overrides) == (project / "there", ["optimizer.lr=0.5"])
    assert "hydra" not in job.cfg
    assert ComposedConfig(["model=resnet18"]).cfg.model._target_ == "models.resnet.resnet18"
    assert len(ComposedConfig([]).run_dir.relative_to(project).parts) == 3


def test_hydras_files_are_written_without_secrets(project):
    job = ComposedConfig(["hydra.run.dir=there", "+cluster.password=hunter2"])
    job.save()
    texts = {path.name: path.read_text() for path in (project / "there" / ".hydra").iterdir()}
    assert set(texts) == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert "hunter2" not in "".join(texts.values())
    assert "+cluster.password=***" in texts["overrides.yaml"]
    assert "lr: 0.01" in texts["config.yaml"]


def test_a_job_has_the_values_of_hydras_part_of_its_own_config(project, monkeypatch):
    """As the command has them: runs side by side have other ones, and what is saved keeps the interpolations."""
    found = {}

    def kept(cfg, run_dir, *_, **__):
        found[run_dir.name] = [*cfg.tags, cfg.results.mirror, cfg.places]

    monkeypatch.setattr("ddp_hydra.api.run_job", kept)
    monkeypatch.setenv("TOKEN", "hunter2")
    words = [
        'tags=["${hydra:runtime.choices.${group}}"]',
        'results.mirror="${hydra:runtime.output_dir}-copy"',
        "+group=model",
        "+places.both='${oc.env:TOKEN}@${hydra:runtime.cwd}'",
        "+places.none=${hydra:job.num}",
        "+places.wrong='${no.such}/${hydra:job.name}'",
        "+hydra.job.env_set.PLACE=${hydra:runtime.output_dir}",
    ]
    runs = [ddp_hydra.run([f"hydra.run.dir=${{hydra:runtime.cwd}}/of/{name}", *words], wait=False) for name in "ab"]
    for run in runs:
        run.wait()
        model, mirror, places = found[run.dir.name]
        assert (model, mirror) == ("mlp", f"{run.dir}-copy")
        assert run.dir == project / "of" / run.dir.name
        assert (places.both, places.none) == (f"hunter2@{project}", None)
        assert "hunter2" not in str(OmegaConf.to_container(places))
        # As the command's checkpoints have it.
        assert stored_config(run._job.cfg)["places"]["both"] == f"${{oc.env:TOKEN}}@{project}"
        with pytest.raises(InterpolationKeyError, match=r"no\.such"):
            _ = places.wrong
        assert "${hydra:runtime.output_dir}-copy" in (run.dir / ".hydra" / "config.yaml").read_text()
    assert runs[0]._job.variables() == {"PLACE": str(project / "of" / "a")}
    assert not HydraConfig.initialized()


def test_ranks_and_a_job_of_this_process_work_in_the_run_directory_where_hydra_says_so(project, monkeypatch):
    found = []

    def kept(cfg, run_dir, *_, rank_settings, **__):
        find_paths(cfg)
        found.append((run_dir, Path.cwd(), rank_settings.get("cwd"), cfg.resume, cfg.data.root))

    monkeypatch.setattr("ddp_hydra.api.run_job", kept)
    (project / "a" / "checkpoints").mkdir(parents=True)
    (project / "a" / "checkpoints" / "manifest.json").write_text('{"format": 2, "checkpoints": {}}')
    (project / "photos").mkdir()
    words = ["hydra.job.chdir=true", "+data.root=photos", "resume=a"]
    own, photos = project / "b", str(project / "photos")
    ddp_hydra.run([*words, "hydra.run.dir=b"])
    ddp_hydra.run([*words, "hydra.run.dir=b", "cluster=inline"])
    ddp_hydra.run([*words[1:], "hydra.run.dir=c"])
    assert found == [
        (own, project, str(own), "a", photos),
        (own, own, str(own), str(project / "a"), photos),
        (project / "c", project, None, "a", photos),
    ]
    assert Path.cwd() == project
    assert not HydraConfig.initialized()


def test_a_hydra_app_runs_a_job_and_goes_on_as_before(project, monkeypatch):
    monkeypatch.setattr("ddp_hydra.api.run_job", lambda *_, **__: None)
    (project / "app").mkdir()
    (project / "app" / "main.yaml").write_text("rate: 0.1\n")
    base = {"version_base": "1.2"} if IS_1_3 else {}
    with initialize_config_dir(str(project / "app"), job_name="mine", **base):
        app, cfg = GlobalHydra.instance().hydra, hydra_compose("main", return_hydra_config=True)
        with hydra_config_of(cfg):
            run = ddp_hydra.run([f"optimizer.lr={cfg.rate}", "tags=['${hydra:job.name}']", "hydra.run.dir=there"])
            assert (run._job.cfg.optimizer.lr, list(run._job.cfg.tags)) == (0.1, ["ddp_hydra"])
            with pytest.raises(ConfigError, match=r"optimizer\.rate"):
                ddp_hydra.run(["optimizer.rate=1"])
            assert HydraConfig.get().job.name == "mine"
        assert GlobalHydra.instance().hydra is app
        assert hydra_compose("main", ["rate=1"], return_hydra_config=True).hydra.job.name == "mine"
        assert not IS_1_3 or str(hydra.version.getbase()) == "1.2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("seed=1", "must be a list of texts"),
        (iter(["seed=1"]), "must be a list of texts"),
        (
            ["optimizer.lr=0.1,0.2"],
            r"optimizer\.lr=0\.1,0\.2: these are several values: type optimizer\.lr=\[0\.1,0\.2\] .* for a text; "
            r"a sweep over them is typed, as ddp-hydra -m$",
        ),
        (["-m"], "-m is an option of the command"),
        (["optimizer.learning_rate=1"], "learning_rate"),
    ],
)
def test_wrong_words_are_refused(words, said, project):
    with pytest.raises(Exception, match=said):
        ddp_hydra.run(words)
    with pytest.raises(ConfigError, match="wait=False with cluster=inline"):
        ddp_hydra.run(["cluster=inline"], wait=False)
    assert not (project / "outputs").exists()


def test_a_sweep_is_refused_wherever_it_comes_from(project, monkeypatch):
    sweep = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {optimizer.lr: '0.1,0.2'}}}\n"
    for group in ("experiment", "hparams_search"):
        (project / "conf" / group).mkdir(parents=True, exist_ok=True)
        (project / "conf" / group / "wide.yaml").write_text(sweep)
    for words, what in [
        (["hparams_search=wide"], "hparams_search=wide"),
        (["+hparams_search=wide"], r"\+hparams_search=wide"),
        (["experiment=wide"], "hydra.mode=MULTIRUN of the config"),
        (["hydra.mode=MULTIRUN", "seed=1"], "hydra.mode=MULTIRUN"),
    ]:
        with pytest.raises(ConfigError, match=rf"^{what} makes a sweep, .*: a sweep is typed, as ddp-hydra -m; "):
            ddp_hydra.run(words)
    assert not (project / "outputs").exists()
    monkeypatch.setattr("ddp_hydra.api.run_job", lambda *_, **__: None)
    ddp_hydra.run(["experiment=wide", "hydra.mode=RUN"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([["data.batch_size=64"]], r"\['data\.batch_size=64'\] is no text: give each change by itself"),
        (["which=last"], r"which=last is no key of the config: give an argument of the method, which='last'"),
    ],
)
def test_changes_of_a_run_are_texts_and_keys_of_its_config(changes, said, tmp_path):
    run = Run(tmp_path)
    for call in (
        run.evaluate,
        lambda *given: run.predict("a.csv", *given),
        lambda *given: run.load_model("best", given),
    ):
        with pytest.raises(ConfigError, match=said):
            call(*changes)


def test_one_cluster_is_kept_until_it_is_closed(project, monkeypatch):
    client = SimpleNamespace(
        status="running",
        sync=lambda call, **options: call(**options),
        scheduler=SimpleNamespace(
            address="tcp://127.0.0.1:1", identity=lambda n_workers: {"workers": {"a": {}, "b": {}}}
        ),
        security=None,
        dashboard_link="http://127.0.0.1:2/status",
    )
    ended = []

    def start(cfg, stack, notify):
        stack.callback(ended.append, cfg.n_workers)
        return client

    monkeypatch.setattr(cluster, "start", start)
    with pytest.raises(ConfigError, match="cluster=inline is not a cluster: leave connect out"):
        ddp_hydra.connect(["cluster=inline"])
    with pytest.raises(ConfigError, match=r"seed=1 is not of the cluster: give it to ddp_hydra\.run"):
        ddp_hydra.connect(["cluster.n_workers=3", "seed=1"])
    words = ["cluster.n_workers=${workers}", "+workers=${n}", "+n=3"]
    with ddp_hydra.connect(words) as connection:
        assert repr(connection) == "<Connection: 2 workers at tcp://127.0.0.1:1>"
        assert (connection.dashboard_link, cluster.has_existing(), ended) == ("http://127.0.0.1:2/status", True, [])
        assert cluster.expected_workers(OmegaConf.create({"n_workers": 2})) == 3  # of the cluster, not of a job
        with pytest.raises(ConfigError, match=r"there is a cluster already: close it with \.close\(\)"):
            ddp_hydra.connect()
        jobs = []
        monkeypatch.setattr("ddp_hydra.api.run_job", lambda cfg, *_, **__: jobs.append(cfg))
        for name, words in (("a", ["cluster.n_workers=3"]), ("b", ["cluster=inline"])):
            ddp_hydra.run([f"hydra.run.dir={name}", *words])
        for word in ("cluster.n_workers=8", "cluster=remote"):
            with pytest.raises(ConfigError, match=rf"^{word}: this job runs on the cluster of connect: give it"):
                ddp_hydra.run(["hydra.run.dir=c", word])
        assert (jobs[0].cluster.n_workers, cluster.is_inline(jobs[1].cluster)) == (3, True)
    assert (repr(connection), cluster.has_existing(), ended) == ("<Connection: closed>", False, [3])
    assert cluster.expected_workers(OmegaConf.create({"n_workers": 2})) == 2
    assert cluster.expected_workers(OmegaConf.create()) is None
    connection.close()
    assert ended == [3]


def test_a_cluster_that_does_not_start_leaves_nothing_behind(project, monkeypatch):
    ended = []

    def start(cfg, stack, notify):
        stack.callback(ended.append, "ended")
        raise ClusterError("too few workers")

    monkeypatch.setattr(cluster, "start", start)
    with pytest.raises(ClusterError, match="too few workers"):
        ddp_hydra.connect()
    assert (ended, cluster.has_existing()) == (["ended"], False)


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_written(project):
    (project / "there").mkdir()
    (project / "there" / "summary.json").write_text('{"status": "done"}')
    with pytest.raises(ConfigError, match="there holds another run"):
        ddp_hydra.run(["hydra.run.dir=there"])
    assert not (project / "there" / ".hydra").exists()


def test_a_dry_run_writes_nothing(project, monkeypatch):
    monkeypatch.setattr("ddp_hydra.api.run_job", lambda *_, **__: None)
    run = ddp_hydra.run(["dry_run=true", "hydra.run.dir=there/run"])
    assert (repr(run), run.objective, run.metrics().empty) == ("<Run there/run: unknown>", None, True)
    assert not (project / "there").exists()


def test_a_run_that_was_stopped_has_its_objective_where_its_summary_has_it(project, monkeypatch):
    def stopped(cfg, run_dir, *_, **__):
        summary = Summary(status="interrupted", objective=Objective("val/f1", "maximize"), metrics={"val/f1": 0.5})
        (run_dir / "summary.json").write_bytes(msgspec.json.encode(summary))
        raise Interrupted("at step 3")

    monkeypatch.setattr("ddp_hydra.api.run_job", stopped)
    run = ddp_hydra.run(["hydra.run.dir=there"], wait=False)
    with pytest.raises(Interrupted):
        run.wait()
    assert run.objective == 0.5


def test_a_run_in_the_background_has_variables_of_the_config_that_are_as_they_would_be(project, monkeypatch):
    """`os.environ` belongs to the whole program."""
    monkeypatch.setattr("ddp_hydra.api.run_job", lambda *_, **__: None)
    reads, sets = "tags=['${oc.env:PLACE}']", "+hydra.job.env_set.PLACE=/a"
    monkeypatch.setenv("PLACE", "/a")
    ddp_hydra.run(["hydra.run.dir=a", reads, sets], wait=False).wait()
    ddp_hydra.run(["hydra.run.dir=b", reads, "hydra.job.env_copy=[PLACE]"], wait=False).wait()
    (project / "a" / "checkpoints").mkdir()
    (project / "a" / "checkpoints" / "manifest.json").write_text('{"format": 2, "checkpoints": {}}')
    again = ["resume=a", "hydra.run.dir=c"]
    ddp_hydra.run(again, wait=False).wait()
    monkeypatch.setenv("PLACE", "/b")
    advice = r"set os\.environ\['PLACE'\] to its value before, "
    with pytest.raises(
        ConfigError, match=rf"hydra\.job\.env_set\.PLACE would change .*{advice}or leave out wait=False"
    ):
        ddp_hydra.run(["hydra.run.dir=d", reads, sets], wait=False)
    theirs = rf"PLACE of the resumed run would change .*{advice}give ~hydra\.job\.env_set\.PLACE, or leave out"
    with pytest.raises(ConfigError, match=theirs):
        ddp_hydra.run([*again[:1], "hydra.run.dir=d"], wait=False)
    ddp_hydra.run([*again[:1], "hydra.run.dir=d", "~hydra.job.env_set.PLACE"], wait=False).wait()
    (project / "conf/experiment").mkdir(parents=True, exist_ok=True)
    of_file = "# @package _global_\nhydra: {job: {env_set: {PLACE: /a}}}\n"
    (project / "conf/experiment/placed.yaml").write_text(of_file)
    with pytest.raises(ConfigError, match=r"PLACE of the config would change .*, give ~hydra\.job\.env_set\.PLACE, or"):
        ddp_hydra.run(["hydra.run.dir=d", reads, "experiment=placed"], wait=False)
    monkeypatch.setenv("HF_TOKEN", "/b")
    of_hydra = ["hydra.run.dir=d", "+data.t=x-${hydra:job.env_set.HF_TOKEN}", "+hydra.job.env_set.HF_TOKEN=/a"]
    with pytest.raises(ConfigError, match=r"the config reads HF_TOKEN, and hydra\.job\.env_set\.HF_TOKEN would change"):
        ddp_hydra.run(of_hydra, wait=False)


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt(), KeyboardInterrupt("step 3 is saved"), Interrupted("at step 3")]
)
def test_a_run_that_is_stopped_at_any_time_raises_interrupted(project, monkeypatch, raised):
    def stopped(*_, **__):
        raise raised

    monkeypatch.setattr("ddp_hydra.api.run_job", stopped)
    for run in (lambda: ddp_hydra.run(["hydra.run.dir=a"]), ddp_hydra.run(["hydra.run.dir=b"], wait=False).wait):
        with pytest.raises(Interrupted, match=str(raised) or "interrupted: . has no checkpoint yet"):
            run()


@pytest.mark.parametrize("call", [lambda: ddp_hydra.run(["hydra.run.dir=there"]), ddp_hydra.connect])
def test_an_interrupt_while_the_config_is_composed_comes_afterwards(project, monkeypatch, call):
    composed = []

    def interrupted(words):
        signal.raise_signal(signal.SIGINT)
        composed.append(compose(words))
        return composed[0]

    monkeypatch.setattr("ddp_hydra.api.compose", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"interrupted: (nothing has begun|there is no cluster yet)"):
        call()
    assert composed
    assert signal.getsignal(signal.SIGINT) is before
    assert not (project / "there").exists()


def test_an_interrupt_while_the_package_imports_comes_afterwards(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nis_whole = True")
    monkeypatch.setattr(ddp_hydra, "__path__", [*ddp_hydra.__path__, str(tmp_path)])
    monkeypatch.setitem(ddp_hydra._PLACES, "is_slow", "slow:is_whole")
    try:
        with pytest.raises(Interrupted, match="interrupted: nothing has begun"):
            _ = ddp_hydra.is_slow
        assert ddp_hydra.is_slow
    finally:
        del sys.modules["ddp_hydra.slow"]
        del ddp_hydra.slow


def test_threads_may_start_runs_side_by_side(project, monkeypatch):
    seeds = []
    monkeypatch.setattr("ddp_hydra.api.run_job", lambda cfg, *_, **__: seeds.append(cfg.seed))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: ddp_hydra.run([f"seed={seed}", f"hydra.run.dir=of/{seed}"]), range(8)))
    assert sorted(seeds) == list(range(8))


def test_a_run_is_found_after_the_program_has_changed_its_folder(project, monkeypatch, tmp_path):
    has_moved, folders = threading.Event(), []
    begin = ComposedConfig.in_its_folder

    def begin_later(job):
        has_moved.wait()
        return begin(job)

    monkeypatch.setattr(ComposedConfig, "in_its_folder", begin_later)
    monkeypatch.setattr("ddp_hydra.api.run_job", lambda cfg, run_dir, *_, **__: folders.append(run_dir))
    run = ddp_hydra.run(["hydra.run.dir=a"], wait=False)
    assert repr(run).startswith("<Run a: ")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    has_moved.set()
    run.wait()
    assert folders == [run.dir] == [project / "a"]
    assert run.dir.is_dir()
    (tmp_path / "other").rmdir()
    assert repr(run).startswith(f"<Run {project / 'a'}: ")


def test_a_run_is_looked_at_by_its_directory(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is not a run directory"):
        Run(tmp_path / "no")
    with pytest.raises(ConfigError, match=r"^s3://a/b is a URL, and Run reads a folder"):
        Run("s3://a/b")
    with pytest.raises(ConfigError, match=r"^https://host/b is a URL"):
        Run("https://user:pw@host/b?sig=1")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert Run(f"~/{tmp_path.name}").dir == tmp_path
    assert Run(tmp_path).metrics().empty
    assert Run(tmp_path).objective is None
    lines = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0, "val/loss": 1.5}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "tra')
    run = Run(tmp_path)
    assert run.records() == lines
    assert (run.status, run.summary) == ("killed", {})
    with locked(tmp_path):
        assert run.status == "running"
    objective = Objective("val/f1", "maximize")
    summary = Summary(status="done", steps=2, objective=objective, metrics={"val/f1": 0.5})
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode(summary))
    assert (run.status, run.summary["steps"], repr(run)) == ("done", 2, f"<Run {tmp_path}: done>")
    assert run.objective == 0.5
    table = run.metrics()
    assert table.loc[2, "val/loss"] == 1.5
    assert list(table.index) == [1, 2]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'ddp-hydra\[notebook\]'"):
        run.metrics()


@pytest.fixture
def of_two_ranks(tmp_path):
    """A run whose ranks have logged `loss`, rank 1 also `temperature`, in the order in which they came."""
    lines = [
        {"step": 2, "epoch": 1, "samples": 8, "rank": 1, "loss": 20.0},
        {"step": 1, "epoch": None, "samples": None, "loss": 1.0},
        {"step": 1, "epoch": 1, "samples": 4, "rank": 1, "loss": 10.0},
        {"step": 2, "epoch": 1, "samples": 8, "loss": 2.0},
        {"step": 2, "epoch": None, "samples": None, "val/loss": 3.0},
        {"step": None, "epoch": None, "samples": None, "note": 4.0},
        {"step": 2, "epoch": None, "samples": None, "rank": 1, "temperature": 50.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(tmp_path)


def test_a_table_is_in_the_order_of_steps_and_ranks_and_no_null_hides_a_value(of_two_ranks):
    table = of_two_ranks.metrics()
    assert table.index[:4].tolist() == [1, 1, 2, 2]
    assert table["rank"].tolist() == [0, 1, 0, 1, 0]
    assert table["loss"].tolist()[:4] == [1.0, 10.0, 2.0, 20.0]
    assert table["epoch"].tolist()[1:4] == [1, 1, 1]
    assert table["samples"].tolist()[1:4] == [4, 8, 8]
    assert table["val/loss"].tolist()[2] == 3.0
    assert table["note"].tolist()[4] == 4.0


def test_a_metric_that_is_never_finite_is_a_column_of_numbers(tmp_path):
    lines = [{"step": step, "loss": None, "val/loss": [None, 2.0][step]} for step in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = Run(tmp_path).metrics()
    assert {name: str(kind) for name, kind in table.dtypes.items()} == {"loss": "float64", "val/loss": "float64"}
    assert table["loss"].isna().all()
    assert Run(tmp_path).plot("loss", ax=Figure().subplots()).get_lines()[0].get_xydata().tolist() == []


def test_a_curve_is_of_rank_0_where_several_ranks_have_logged(of_two_ranks):
    lines = of_two_ranks.plot("loss", "temperature", ax=Figure().subplots()).get_lines()
    assert [line.get_xydata().tolist() for line in lines] == [[[1, 1.0], [2, 2.0]], [[2, 50.0]]]


def test_curves_have_a_line_where_metrics_are_logged_at_other_steps(tmp_path):
    lines = [{"step": n, "train/loss": 1 / n, **({"val/loss": 2 / n} if n % 3 == 0 else {})} for n in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    axes = Run(tmp_path).plot(ax=Figure().subplots())  # else it would be the last one that other code has drawn in
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert drawn["val/loss"] == [[3, 2 / 3], [6, 2 / 6]]
    assert len(drawn["train/loss"]) == 6
    for wrong, said in (("val/los", "did you mean val/loss"), ("speed", "the metrics are train/loss, val/loss")):
        with pytest.raises(ConfigError, match=f"no metric '{wrong}' was logged: {said}"):
            Run(tmp_path).plot(wrong)
