"""The numbers that jobs get, and which of them an earlier run of the sweep has had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.sweep.planned_job import Need
from ddp_hydra.sweep.queue import JobQueue
from ddp_hydra.sweep.rows import JobRow, JobState, SweepObjective


def row(number: int, override: str) -> JobRow:
    return JobRow(number, [override], str(number), JobState.done)


def queue(earlier: list[JobRow], typed: Sequence[str] = (), **params: str) -> JobQueue:
    hydra = {"overrides": {"task": list(typed), "hydra": []}, "sweeper": {"params": params or None}}
    config = OmegaConf.create({"hydra": hydra})
    return JobQueue(Path(), SimpleNamespace(take=lambda *_: config), config, Need(), earlier, False)


def numbered(jobs: JobQueue, override: str, wanted: int) -> tuple[int, JobRow | None]:
    job = jobs.add([override], wanted)
    return job.row.number, job.earlier


def test_a_job_of_before_keeps_its_number_and_new_ones_come_after_all_of_them():
    earlier = [row(0, "a=1"), row(1, "a=2"), row(2, "a=3")]
    jobs = queue(earlier)
    found = [numbered(jobs, override, wanted) for wanted, override in enumerate(["a=0", "a=3", "a=1", "a=4"])]
    assert found == [(3, None), (2, earlier[2]), (0, earlier[0]), (4, None)]


def test_a_job_is_known_again_where_its_overrides_come_in_another_order():
    jobs = queue([JobRow(0, ["a=1", "b=2", "b=3"], "0", JobState.done)])
    assert jobs.add(["b=3", "a=1", "b=2"], 0).earlier is None, "the last one of a key wins"
    assert jobs.add(["b=2", "b=3", "a=1"], 0).earlier is not None


def test_a_secret_is_in_no_row_and_its_job_is_known_again():
    typed = ["cluster.password=hunter2", "a=1"]
    job = queue([], typed).add(typed, 0)
    assert job.row.overrides == ["cluster.password=***", "a=1"], "rows are written to files"
    assert job.overrides == typed, "which Hydra composes"
    assert queue([job.row], typed).add(typed, 0).earlier is job.row
    assert not job.is_secret


@pytest.mark.parametrize("key", ["model.n_token", "hydra.job.env_set.API_TOKEN", "+data.password", "data.url"])
def test_a_job_with_a_swept_secret_is_never_one_of_before(key, caplog):
    """Its row is that of any other value."""
    first, second = ("https://me:a@h", "https://me:b@h") if key == "data.url" else ("123456", "654321")
    jobs = queue([], [f"{key}={first},{second}", "a=1"])
    rows = [jobs.add([f"{key}={value}", "a=1"], number).row for number, value in enumerate((first, second))]
    assert rows[0].overrides == rows[1].overrides
    assert not caplog.text
    again = queue(rows, [f"{key}={second},{first}", "a=1"])
    found = [again.add([f"{key}={value}", "a=1"], number) for number, value in enumerate((second, first))]
    assert [(job.row.number, job.earlier, job.is_secret) for job in found] == [(2, None, True), (3, None, True)]
    assert [record.message for record in caplog.records] == [
        f"{key.lstrip('+')} is swept and looks like a secret, which no file keeps: all jobs run anew"
    ]


def test_a_secret_that_all_jobs_have_from_the_options_of_the_sweeper_is_not_swept():
    words = ["password=x", "a=1"]
    row = queue([], ["a=1,2"], password="x").add(words, 0).row
    assert queue([row], ["a=1,2"], password="x").add(words, 0).earlier is row
    assert queue([row], ["a=1,2"], password="x,y").add(words, 0).is_secret


def test_of_two_words_for_a_secret_the_last_one_says_whether_it_is_swept():
    assert queue([], ["password=z", "password=x,y"]).add(["password=z", "password=x"], 0).is_secret
    assert queue([], ["password=x,y"], password="z").add(["password=z", "password=x"], 0).is_secret
    assert not queue([], ["password=x,y", "password=z"]).add(["password=x", "password=z"], 0).is_secret


def test_a_small_number_is_no_secret_of_a_sweep():
    jobs = queue([], ["model.d_key=1,2"])
    rows = [jobs.add([f"model.d_key={value}"], value - 1).row for value in (1, 2)]
    again = queue(rows, ["model.d_key=2,3"])
    assert [numbered(again, f"model.d_key={value}", value) for value in (2, 3)] == [(1, rows[1]), (3, None)]


def test_a_job_whose_config_reads_another_value_of_a_variable_is_another_one():
    """Their values are not compared: the variable may choose the data."""

    def jobs_of(place: str, earlier: list[JobRow], words: Sequence[str] = (), copied: Sequence[str] = ()) -> JobQueue:
        variables = {"PLACE": place, "OTHER": place, "TOKEN": place, "DB": f"s3://me:{place[1:]}@h"}
        hydra = {"job": {"env_set": variables, "env_copy": list(copied)}, "overrides": {"hydra": list(words)}}
        reads = [f"${{oc.env:{name}}}" for name in ("PLACE", "TOKEN", "DB")]
        config = OmegaConf.create({"hydra": hydra, "reads": reads})
        return JobQueue(Path(), SimpleNamespace(compose=lambda *_: config), config, Need(), earlier, False)

    first = jobs_of("/s1", []).add(["a=1"], 0).row
    assert first.overrides == ["a=1", "hydra.job.env_set.PLACE=/s1"]
    first.state = JobState.done
    assert jobs_of("/s1", [first]).add(["a=1"], 0).earlier is first
    again = ["++hydra.job.env_set.PLACE=/s1", "hydra.job.env_copy=[]"]  # as a sweep that goes on types it
    for words, copied in ((again, []), (["hydra.job.env_copy=[PLACE]"], ["PLACE"]), ([], ["PLACE"])):
        assert jobs_of("/s1", [first], words, copied).add(["a=1"], 0).earlier is first
    second = jobs_of("/s2", [first]).add(["a=1"], 0)
    assert (second.row.number, second.earlier, second.overrides) == (1, None, ["a=1"])
    assert not SweepObjective("val/loss", maximize=False).ranks([first, second.row])


def test_jobs_whose_validation_is_made_from_a_swept_key_of_training_are_not_compared():
    val = {"noise": "${data.train.noise}", "root": "${..train.source.root}", "cache_dir": "${..train.cache_dir}"}
    val["transform"] = {"scale": "${data.train.scale}"}
    train = {
        "scale": 1,
        "noise": 0.1,
        "source": {"root": "a", "kind": 1},
        "n": 4,
        "note": "${data.train.n}",
        "cache_dir": "a",
    }
    config = OmegaConf.create({"data": {"train": train, "val": val}})
    apart, whole = OmegaConf.create({"data": {"train": train}}), SimpleNamespace(take=lambda *_: config)
    objective = SweepObjective("val/loss", maximize=False)
    cases = [("noise", False), ("source.root", False), ("source.kind", True), ("n", True), ("cache_dir", True)]
    cases.append(("scale", False))
    for key, is_ranked in cases:
        typed = [f"data.train.{key}={value}" for value in (1, 2)]
        jobs = JobQueue(Path(), None, config, Need(), None, False)
        rows = [jobs.add([word], 0).row for word in typed]
        assert objective.ranks(rows) is is_ranked, key
        chosen = JobQueue(Path(), whole, apart, Need(), None, False)
        assert objective.ranks([chosen.add(["data=a", word], 0).row for word in typed]) is is_ranked, key
        for row in rows:
            row.state, row.shared = JobState.done, []  # in a sweep.json of an older version
        kept = JobQueue(Path(), None, config, Need(), rows, False)
        assert objective.ranks([kept.add([word], 0).row for word in typed]) is is_ranked, key


def test_jobs_whose_data_are_made_from_a_swept_key_of_the_users_own_are_not_compared():
    data = {
        "root": "${paths.data}/x",
        "batch_size": "${n}",
        "train": {"fold": "${fold}", "noise": "${noise}"},
        "val": {"fold": "${fold}", "transform": {"size": "${size}"}, "split": "${seed}", "file": "${dir}{name}.tar"},
    }
    own = {"paths": {"data": "${disk.root}/data"}, "disk": {"root": "a"}, "fold": 0, "n": 1, "noise": 0, "size": 4}
    own |= {"dir": "a", "name": "b", "run": 0}
    config = OmegaConf.create({"data": data, "seed": "${run}", "model": {"n": "${fold}"}, **own})
    loader = SimpleNamespace(take=lambda *_: config)
    objective = SweepObjective("val/loss", maximize=False)
    others = ("fold", "+paths.data", "paths", "disk.root", "dir")
    for key in (*others, "n", "noise", "size", "seed", "run", "name", "model.n", "paths.other", "unused"):
        jobs = JobQueue(Path(), loader, config, Need(), None, False)
        rows = [jobs.add([f"{key}={value}"], 0).row for value in (1, 2)]
        assert objective.ranks(rows) is (key not in others), key


@pytest.mark.parametrize("word", ["paths=a", "+paths=a", "+own/paths=a", "+other/place@paths=a"])
def test_a_swept_group_of_the_users_own_brings_its_references(word):
    base = OmegaConf.create({"data": {"root": "${paths.data}"}, "hydra": {"runtime": {"choices": {"paths": "b"}}}})
    of_group = {"data": "${disk.root}", "root": "${own.paths.root}"}
    config = OmegaConf.create({"data": {"root": "${paths.data}"}, "paths": of_group, "own": {"paths": {"root": "a"}}})
    loader = SimpleNamespace(take=lambda *_: config)
    jobs = JobQueue(Path(), loader, base, Need(), None, False)
    rows = [jobs.add([word, f"disk.root={value}"], 0).row for value in (1, 2)]
    assert not SweepObjective("val/loss", maximize=False).ranks(rows)
    assert rows[0].shared == ([] if "own" in word else [word.partition("=")[0].lstrip("+")]) + ["disk.root"]


def test_a_key_that_training_data_refer_to_keeps_jobs_apart_by_a_metric_of_training_only():
    config = OmegaConf.create({"data": {"train": {"fold": "${fold}"}, "val": None}, "fold": 0})
    for metric, is_ranked in (("train/loss", False), ("val/loss", True)):
        jobs = JobQueue(Path(), None, config, Need(), None, False, metric)
        rows = [jobs.add([f"fold={value}"], 0).row for value in (1, 2)]
        assert SweepObjective(metric, maximize=False).ranks(rows) is is_ranked


@pytest.mark.parametrize(
    ("key", "metric", "is_ranked"),
    [
        ("smooth", "val/loss", False),
        ("smooth", "val/accuracy", True),
        ("beta", "val/discriminator/loss", False),
        ("beta", "val/accuracy", True),
        ("ignored", "val/accuracy", False),
        ("rate", "val/loss", True),
        ("tag", "val/loss", True),
    ],
)
def test_a_key_that_the_loss_refers_to_keeps_jobs_apart_where_the_objective_is_a_loss(key, metric, is_ranked):
    parts = {"loss": {"label_smoothing": "${smooth}"}, "task": {"alpha": "${beta}", "ignore": "${ignored}"}}
    parts |= {"optimizer": {"lr": "${rate}"}, "experiment": "run-${tag}"}
    own = {"smooth": 0, "beta": 1, "ignored": 0, "rate": 1, "tag": 1}
    config = OmegaConf.create({"data": {"val": {}}, **parts, **own})
    jobs = JobQueue(Path(), None, config, Need(), None, False, metric)
    rows = [jobs.add([f"{key}={value}"], 0).row for value in (1, 2)]
    assert SweepObjective(metric, maximize=False).ranks(rows) is is_ranked


@pytest.mark.parametrize("group", ["split@data.train", "data/split@data.train.split"])
def test_a_swept_group_of_training_data_that_validation_refers_to_keeps_jobs_apart(group):
    for read, is_ranked in (("split", False), ("n", group != "split@data.train")):
        train = {"split": {"seed": 0}, "n": 1}
        config = OmegaConf.create({"data": {"train": train, "val": {"x": f"${{data.train.{read}}}"}}})
        jobs = JobQueue(Path(), SimpleNamespace(take=lambda *_, config=config: config), config, Need(), None, False)
        rows = [jobs.add([f"{group}={value}"], 0).row for value in "ab"]
        assert SweepObjective("val/accuracy", maximize=True).ranks(rows) is is_ranked


def composing(folder: Path, is_resumed: bool = False, earlier: list[JobRow] | None = None) -> JobQueue:
    """A queue whose jobs have the folders that they are given as overrides: `sub=x`."""

    def take(_: DictConfig, overrides: list[str]) -> DictConfig:
        hydra = {"job": {}, "runtime": {"choices": {}}, "sweep": {"subdir": overrides[0].partition("=")[2]}}
        parts = {"cluster": {"_target_": "inline"}, "dispatch": {}, "trainer": {}, "dry_run": True}
        return OmegaConf.create({"hydra": hydra, **parts})

    loader = SimpleNamespace(take=take)
    return JobQueue(folder, loader, take(None, ["sub="]), Need(), earlier or ([] if is_resumed else None), False)


@pytest.mark.parametrize("same", ["x", "./x", "y/../x"])
def test_two_jobs_of_one_folder_are_refused_before_either_is_overwritten(tmp_path, same):
    jobs = composing(tmp_path)
    first, second, other = (jobs.add([f"sub={folder}"], number) for number, folder in enumerate(["x", same, "z"]))
    assert [jobs.compose(job) for job in (first, second, other)] == [True, False, True]
    assert "jobs 0 and 1 have the same folder" in second.row.message
    assert all(word in second.row.message for word in ("hydra.sweep.subdir", "${hydra.job.num}"))
    assert second.row.folder == "1", "its row shows nothing of job 0"


def test_a_folder_of_a_job_that_is_done_is_not_given_to_another_one(tmp_path):
    jobs = composing(tmp_path, earlier=[JobRow(0, ["sub=x"], "x", JobState.done)])
    assert jobs.add(["sub=x"], 0).row.state == JobState.done
    assert not jobs.compose(jobs.add(["sub=./x"], 1))


@given(st.lists(st.integers(0, 5), max_size=8), st.lists(st.integers(0, 8), max_size=12))
def test_no_two_jobs_ever_have_one_number(before, now):
    first = queue([])
    earlier = [row(numbered(first, str(job), wanted)[0], str(job)) for wanted, job in enumerate(before)]
    second = queue(earlier)
    given_now = [numbered(second, str(job), wanted) for wanted, job in enumerate(now)]
    numbers = [number for number, _ in given_now]
    assert len(set(numbers)) == len(numbers)
    known = {found.number for found in earlier}
    assert all((number in known) == (found is not None) for number, found in given_now)
