"""Which jobs a sweep has."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError
from ddp_hydra.sweep import planned_job
from ddp_hydra.sweep.planned_job import Need, PlannedJob
from ddp_hydra.sweep.rows import JobRow, JobState


def row(number: int, override: str, state: JobState = JobState.done) -> JobRow:
    return JobRow(number, [override], str(number), state)


def planned(folder: Path, earlier: JobRow | None = None, is_ours: bool = True) -> PlannedJob:
    config = OmegaConf.create({"resume": None, "hydra": {}})
    return PlannedJob(JobRow(0, [], "0"), (), earlier, config, Need(), folder, is_ours)


@pytest.mark.parametrize(
    ("state", "has_checkpoint", "is_ours", "resumes"),
    [
        (JobState.interrupted, True, True, True),
        (JobState.interrupted, False, True, False),
        (JobState.interrupted, True, False, False),
    ],
)
def test_a_job_goes_on_from_its_checkpoint_where_it_has_one(tmp_path, state, has_checkpoint, is_ours, resumes):
    if has_checkpoint:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "manifest.json").write_text("{}")
    job = planned(tmp_path, row(0, "", state), is_ours)
    planned_job.resume(job, 60.0)
    assert (job.config.resume == str(tmp_path)) == resumes
    assert job.spent_s == 60.0 * resumes, "the time that it took before counts, where it is not begun anew"


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_job_that_was_killed_before_its_first_manifest_goes_on_where_its_checkpoint_is_whole(tmp_path, is_whole):
    (tmp_path / "checkpoints").mkdir()
    file = tmp_path / "checkpoints" / "step-000004.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data", "weights")
    if not is_whole:
        file.write_bytes(file.read_bytes()[:-9])
    job = planned(tmp_path, row(0, "", JobState.running), True)
    planned_job.resume(job, 60.0)
    assert (job.config.resume == str(tmp_path)) == is_whole


def test_the_folder_of_another_job_is_not_taken(tmp_path):
    planned_job.take_over_folder(planned(tmp_path))
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- lr=1\n- data=b\n")
    with pytest.raises(ConfigError, match=r"lr=1 data=b.*give another hydra\.sweep\.dir"):
        planned_job.take_over_folder(planned(tmp_path))


def test_a_job_that_had_started_and_was_not_noted_goes_on(tmp_path):
    job = planned(tmp_path)
    job.row.overrides = ["lr=1", "data=b", "key=${oc.env:NOT_SET}"]
    saved = "".join(f"- {word}\n" for word in job.row.overrides)
    for name, content in ((".hydra/overrides.yaml", saved), ("checkpoints/manifest.json", "{}")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    planned_job.take_over_folder(job)
    assert job.config.resume == str(tmp_path)


def test_the_secrets_of_an_app_of_others_are_not_shown_and_do_not_make_it_another_job(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- db.password=hunter2\n")  # as Hydra writes it
    job = planned(tmp_path)
    with pytest.raises(ConfigError, match=r"another job \(db\.password=\*\*\*\)"):
        planned_job.take_over_folder(job)
    job.row.overrides = ["db.password=***"]
    planned_job.take_over_folder(job)


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        ({"cluster": {"_target_": "a"}, "dispatch": {}, "trainer": {}}, True),
        ({"cluster": {"_target_": "a"}, "dispatch": {}}, False),
        ({"cluster": {"size": 3}, "dispatch": {}, "trainer": {}}, False),
        ({}, False),
    ],
)
def test_our_configs_are_known_by_their_groups(config, ours):
    assert planned_job.is_ours(OmegaConf.create(config)) == ours


def test_apps_of_others_get_a_local_cluster_of_as_many_workers_as_ranks_unless_they_say_which():
    assert planned_job.own_need(None, {"n_workers": 3}) == Need()
    local = OmegaConf.create(planned_job.own_need(2, None).cluster)
    assert (local._target_, local.n_workers, local.host) == ("distributed.LocalCluster", 2, "127.0.0.1")
    assert OmegaConf.create(planned_job.own_need(2, {"n_workers": 4}).cluster).n_workers == 4
    other = OmegaConf.create(planned_job.own_need(2, {"_target_": "some.Cluster"}).cluster)
    assert other == {"_target_": "some.Cluster", "n_workers": 2}
