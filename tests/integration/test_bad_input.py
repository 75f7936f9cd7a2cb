"""What a user can get wrong, beyond test_mistakes.py: a sentence that says what was given, and what to type."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest

from tests.support.s3_server import KEYS

pytestmark = pytest.mark.integration

TINY = ("data=tiny", "model=tiny", "trainer.max_steps=1")
INLINE = (*TINY, "cluster=inline")


def refused(cli, *arguments: str, said: str, **variables: str) -> str:
    """Run what can't be done; it has to fail in a readable way."""
    ended = cli.run(*arguments, **variables)
    assert ended.returncode == 1, ended.stdout
    assert re.search(said, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_the_project_space_is_missing(cli):
    refused(cli, *TINY, said="DDP_HYDRA_PROJECT=.*holds no project.*unset it", DDP_HYDRA_PROJECT=str(cli.folder))


def test_a_target_that_does_not_exist(cli):
    refused(cli, *INLINE, "model._target_=models.tiny.Huge", "hydra.run.dir=run", said=r"models\.tiny\.Huge")
    summary = json.loads((cli.folder / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "models.tiny.Huge" in summary["failure"]["message"]


def test_an_objective_that_is_no_metric_ends_the_job_and_is_not_tried_again(cli):
    words = (*TINY, "cluster.n_workers=2", "trainer.checkpoint_every_epochs=0", "hydra.run.dir=run")
    said = refused(
        cli, *words, "objective.metric=val/acc", said=r"there are .*val/accuracy.*objective\.metric=val/accuracy"
    )
    assert "attempt 1" not in said
    assert json.loads((cli.folder / "run" / "summary.json").read_text())["restarts"] == 0


# -- where results go and come from ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(module_cli):
    """A run with two checkpoints."""
    words = ("trainer.max_steps=4", "trainer.checkpoint_every_steps=2", "cluster=inline", "hydra.run.dir=finished")
    module_cli.done(*TINY, *words)
    return module_cli.folder / "finished"


@pytest.fixture
def finished(cli, trained):
    """A copy of it, with its hard links."""
    subprocess.run(["cp", "-a", trained, cli.folder / "finished"], check=True)
    return cli.folder / "finished"


def test_an_output_directory_below_a_file(cli):
    (cli.folder / "file").write_text("I was here first")
    refused(cli, *INLINE, "hydra.run.dir=file/run", said=r"(?s)file/run.*hydra\.run\.dir=<folder>")
    assert (cli.folder / "file").read_text() == "I was here first"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable for root")
def test_an_output_directory_without_permission(cli):
    (cli.folder / "mine").mkdir(mode=0o500)
    refused(cli, *INLINE, "hydra.run.dir=mine/run", said=r"(?s)mine/run.*hydra\.run\.dir=<folder>")


@pytest.mark.slow
def test_a_truncated_checkpoint_names_the_one_before_it(cli, finished):
    last = finished / "checkpoints" / "last.pt"
    content = last.read_bytes()
    last.unlink()  # it shares its content with the step file
    last.write_bytes(content[: len(content) // 2])
    (finished / "checkpoints" / "step-000004.pt").write_bytes(content[:100])
    said = refused(cli, f"resume={last}", said=r"last\.pt is damaged.*bytes.*use the one before it")
    earlier = re.search(r"the one before it, (\S+)", said)[1]
    assert earlier.endswith("step-000002.pt")
    ended = cli.done(f"resume={finished}", "hydra.run.dir=again")
    assert "step-000002.pt" in ended.stderr + ended.stdout


def test_a_checkpoint_of_another_model_or_optimizer(cli, finished):
    path = finished / "checkpoints" / "step-000004.pt"
    again = (f"resume={path}", "trainer.max_steps=6")
    refused(cli, *again, "optimizer=adam", said=r"does not fit this optimizer")
    refused(cli, *again, "model.num_classes=7", said=r"not of this model.*7")


def test_a_resume_that_is_refused_leaves_the_run_in_its_folder_as_it_was(cli, finished):
    def files() -> dict[str, bytes]:
        found = [path for path in finished.rglob("*") if path.is_file() and path.parent.name != "logs"]
        return {str(path.relative_to(finished)): path.read_bytes() for path in found}

    before = files()
    again = (f"resume={finished}", f"hydra.run.dir={finished}")
    for word, said in (
        ("model.num_classes=7", r"not of this model.*7"),
        ("data.batch_size=0", r"data\.batch_size=0: give"),
    ):
        refused(cli, *again, word, said=said)
        assert files() == before
    cli.done(*again, "trainer.max_steps=6")
    after = files()
    assert json.loads(after["summary.json"])["steps"] == 6
    assert b"trainer.max_steps=6" in after[".hydra/overrides.yaml"]
    assert b"model.num_classes" not in after[".hydra/overrides.yaml"]


# -- objects in a bucket -----------------------------------------------------------------------------------


@pytest.fixture
def images(s3, png):
    """A bucket of images, one of which is a text, and the arguments to read of its server."""
    objects = {f"{part}/{label}/{n}.png": png(red=n) for part in ("train", "val") for label in "ab" for n in range(8)}
    objects["train/a/3.png"] = b"I am a text"
    bucket = s3.fill(objects)
    return bucket, ("data.batch_size=4", f"data.endpoint_url={s3.endpoint_url}", "trainer.max_steps=1")


def test_a_bucket_that_is_not_there(cli, images):
    said = r"no bucket 'no-such-bucket' at http://127\.0\.0\.1.*data\.bucket="
    refused(cli, *images[1], "cluster.n_workers=1", "data.bucket=no-such-bucket", said=said, **KEYS)


@pytest.mark.slow
def test_a_text_among_the_images(cli, images):
    bucket, settings = images
    said = r"rank 0 on 127\.0\.0\.1: 1 of 16 samples.*allows 0.*train/a/3\.png.*I am a text.*max_bad_fraction="
    refused(cli, *settings, "cluster.n_workers=1", f"data.bucket={bucket}", said=said, **KEYS)


@pytest.mark.slow
def test_one_text_among_many_images_is_allowed_and_named_in_the_log(cli, images):
    bucket, settings = images
    allowed = ("data.max_bad_fraction=0.1", "trainer.max_steps=4", "hydra.run.dir=run")
    cli.done(*settings, "cluster.n_workers=1", f"data.bucket={bucket}", *allowed, **KEYS)
    assert "train/a/3.png" in (cli.folder / "run" / "logs" / "rank-0.log").read_text()


def test_wrong_credentials_are_named_and_not_shown(cli, images):
    bucket, settings = images
    told = refused(
        cli,
        *settings,
        "cluster.n_workers=1",
        f"data.bucket={bucket}",
        "hydra.run.dir=run",
        said=r"refused the credentials of the environment.*data\.anon=true",
        **{**KEYS, "AWS_ACCESS_KEY_ID": "another-key"},
    )
    secret = KEYS["AWS_SECRET_ACCESS_KEY"]
    assert secret not in told
    written = [path for path in cli.folder.rglob("*") if path.is_file()]
    assert not [path for path in written if secret.encode() in path.read_bytes()]
    assert written


@pytest.mark.slow
def test_names_without_a_network(cli):
    said = refused(
        cli,
        "experiment=pet_names",
        "cluster.n_workers=1",
        "data.source=http://127.0.0.1:9/names.json",
        said=r"http://127\.0\.0\.1:9/names\.json is not reachable",
    )
    assert "data.source=" in said
