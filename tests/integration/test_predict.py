"""A trained model predicts and is evaluated: here, and on gangs of several sizes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.digits import DigitMasks
from ddp_hydra.cli import inference
from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import Scheduler
from ddp_hydra.errors import DdpHydraError
from models.unet import UNet
from tests.integration.project.data.tiny import Points
from tests.integration.project.models.tiny import Tiny

pytestmark = pytest.mark.integration

TINY = ("model=tiny", "data=tiny", "scheduler=none", "trainer.epochs=1", "trainer.device=cpu", "trainer.threads=1")
COLUMNS = ["index", "class", "name", "probability", "target", "target_name"]


@pytest.fixture(scope="module")
def run(module_cli) -> Path:
    """A run of two ranks, whose weights are averaged."""
    module_cli.done(*TINY, "cluster.n_workers=2", "trainer.ema_decay=0.9", "hydra.run.dir=run")
    return module_cli.folder / "run"


def validated(run: Path) -> dict[str, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    (found,) = [{name: line[name] for name in line if name.startswith("val/")} for line in lines if "val/loss" in line]
    return found


def expected(run: Path, n: int = 37) -> tuple[np.ndarray, np.ndarray]:
    """The classes and their probabilities, in plain torch."""
    model = Tiny(num_classes=4).eval()
    model.load_state_dict(torch.load(run / "checkpoints" / "last.pt", weights_only=True)["ema"]["model"])
    with torch.no_grad():
        probability, best = model(Points(n, seed=2).x).softmax(-1).max(-1)
    return best.numpy(), probability.numpy()


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check(path: Path, run: Path, n: int = 37) -> None:
    """The file has a row for each sample, in order."""
    table = read(path)
    best, probability = expected(run, n)
    assert list(table[0]) == COLUMNS
    assert [int(row["index"]) for row in table] == list(range(n))
    assert [int(row["class"]) for row in table] == best.tolist()
    assert [row["name"] for row in table] == [Points.classes[one] for one in best]
    np.testing.assert_allclose([float(row["probability"]) for row in table], probability, rtol=1e-5)


@pytest.fixture
def here(client4, project_here):
    """A running cluster in place of the command's own."""
    connect.use_existing(Scheduler(client4.scheduler.address))
    yield
    connect.use_existing(None)


several = pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)


@several
def test_any_number_of_ranks_makes_the_same_file_and_the_same_numbers(here, ranks, run, tmp_path):
    out = tmp_path / "out.csv"
    words = [f"dispatch.ranks={ranks}"]
    found = inference.predict(str(run), out, changes=words)
    assert (found["samples"], found["columns"]) == (37, COLUMNS)
    check(out, run)
    assert not (tmp_path / "out.csv.parts").exists()
    again = inference.evaluate(str(run), "last", changes=words)
    logged = validated(run)
    assert again["samples"] == 37
    assert again["metrics"]["val/accuracy"] == logged["val/accuracy"]
    assert again["metrics"]["val/loss"] == (logged["val/loss"] if ranks == 2 else pytest.approx(logged["val/loss"]))
    if ranks != 2:
        inference.predict(str(run), tmp_path / "again.csv", changes=["dispatch.ranks=2"])
        assert (tmp_path / "again.csv").read_bytes() == out.read_bytes()


def test_a_lone_checkpoint_runs_no_function_that_it_names(here, run, tmp_path):
    content = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    content["config"]["task"] = {"_target_": "os.system", "command": f"touch {tmp_path / 'ran'}"}
    torch.save(content, lone := tmp_path / "lone.pt")
    with pytest.raises(DdpHydraError, match=r"task\._target_=os\.system .* Type trust=true"):
        inference.evaluate(str(lone), changes=["dispatch.ranks=2"])
    assert not (tmp_path / "ran").exists()
    with pytest.raises(DdpHydraError, match=r"os\.system"):  # it returns no task
        inference.evaluate(str(lone), changes=["dispatch.ranks=2"], trust=True)
    assert (tmp_path / "ran").exists()


def test_a_rank_that_is_killed_leaves_no_gap_and_no_row_twice(here, run, tmp_path, caplog):
    words = ["dispatch.ranks=2", "data.batch_size=3", "+fault=kill,rank=1,step=4,at=validate"]
    inference.predict(str(run), tmp_path / "out.csv", changes=words)
    assert "restart 1 of 3" in caplog.text
    check(tmp_path / "out.csv", run)


@pytest.fixture(scope="module")
def meeting(module_cli) -> Path:
    """A run of three ranks that validate seven samples, one at a time, and meet in each forward pass."""
    words = ("model._target_=models.tiny.Meeting", "data.batch_size=1", "data.n=6", "data.val.n=7")
    module_cli.done(*TINY, *words, "cluster.n_workers=3", "dispatch.timeout_s=120", "hydra.run.dir=meeting")
    return module_cli.folder / "meeting"


@pytest.mark.parametrize(("kind", "n"), [("map", 7), ("stream", 2)])
def test_all_ranks_make_equally_many_forward_passes(here, meeting, tmp_path, n, kind):
    """Two of three ranks have fewer samples, or one has none."""
    of_kind = ["+data.val._target_=data.streams.PointStream"] if kind == "stream" else []
    words = [*of_kind, f"data.val.n={n}", "data.batch_size=1"]
    alone = inference.evaluate(str(meeting), "last", changes=[*words, "dispatch.ranks=1"])
    found = inference.evaluate(str(meeting), "last", changes=[*words, "dispatch.ranks=3"])
    inference.predict(str(meeting), tmp_path / "out.csv", changes=[*words, "dispatch.ranks=3"])
    assert found["metrics"] == pytest.approx(alone["metrics"])
    assert [int(row["index"]) for row in read(tmp_path / "out.csv")] == list(range(n))


@pytest.mark.slow
def test_what_is_interrupted_goes_on_where_it_ended(module_cli, run):
    """It fails in the third batch, when two parts have arrived."""
    words = (f"run={run}", "out=later.csv", "cluster=inline")
    ended = module_cli.run("predict", *words, "+fault=raise,step=3,at=validate")
    assert ended.returncode == 1
    parts = module_cli.folder / "later.csv.parts" / "parts"
    before = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert len(before) == 2
    assert not (module_cli.folder / "later.csv").exists()
    other = module_cli.run("predict", *words, "data.val.n=40")
    assert (other.returncode, "overwrite=true" in other.stderr, "Traceback" in other.stderr) == (1, True, False)
    still = module_cli.run("predict", *words, "+fault=raise,step=2,at=validate")
    assert still.returncode == 1
    assert {name: (parts / name).stat().st_mtime_ns for name in before} == before
    assert len(list(parts.iterdir())) == 3
    done = module_cli.done("predict", *words)
    assert "later.csv: 37 samples, index, class, name, probability, target, target_name" in done.stdout
    check(module_cli.folder / "later.csv", run)
    assert not parts.parent.exists()
    again = module_cli.run("predict", *words)
    assert (again.returncode, "overwrite=true" in again.stderr) == (1, True)


def expected_stream(run: Path, n: int) -> list[int]:
    best, _ = expected(run, n)
    return best[torch.randperm(n, generator=torch.Generator().manual_seed(0))].tolist()


@pytest.mark.slow
def test_an_iterable_data_set_is_predicted_in_its_order_by_any_number_of_ranks(here, run, tmp_path):
    words = ["data=stream", "data.val.n=2900", "data.batch_size=200"]
    found = inference.predict(str(run), tmp_path / "two.csv", changes=[*words, "dispatch.ranks=2"])
    killed = [*words, "dispatch.ranks=3", "+fault=kill,rank=1,step=3,at=validate"]
    inference.predict(str(run), tmp_path / "three.csv", changes=killed)
    assert (found["samples"], found["columns"]) == (2900, COLUMNS)
    table = read(tmp_path / "two.csv")
    assert [int(row["index"]) for row in table] == list(range(2900))
    assert [int(row["class"]) for row in table] == expected_stream(run, 2900)
    assert (tmp_path / "three.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()


@pytest.mark.slow
def test_an_interrupted_prediction_of_an_iterable_data_set_goes_on(module_cli, run):
    words = (f"run={run}", "out=stream.csv", "cluster=inline", "data=stream", "data.val.n=2100", "data.batch_size=200")
    assert module_cli.run("predict", *words, "+fault=raise,step=7,at=validate").returncode == 1
    (part,) = (module_cli.folder / "stream.csv.parts" / "parts").iterdir()
    before = part.stat().st_mtime_ns
    still = module_cli.run("predict", *words, "+fault=raise,step=6,at=validate")  # of the batches that are left
    assert (still.returncode, part.stat().st_mtime_ns) == (1, before)
    assert "stream.csv: 2,100 samples" in module_cli.done("predict", *words).stdout
    table = read(module_cli.folder / "stream.csv")
    assert [int(row["class"]) for row in table] == expected_stream(run, 2100)


def test_the_command_starts_a_cluster_where_one_is_typed_and_none_otherwise(module_cli, run):
    quick = module_cli.done("predict", f"run={run}", "out=quick.csv").stdout
    assert "quick.csv: 37 samples" in quick
    module_cli.done("predict", f"run={run}", "out=ranks.csv", "cluster.n_workers=2")
    assert (module_cli.folder / "ranks.csv").read_bytes() == (module_cli.folder / "quick.csv").read_bytes()
    lines = module_cli.done("evaluate", f"run={run}", "which=last", "cluster.n_workers=2").stdout.splitlines()
    assert lines[0] == f"{run}/checkpoints/last.pt (step 6), 37 samples"
    assert {line.split()[0]: line.split()[1] for line in lines[1:]} == {
        name: f"{value:.6f}" for name, value in validated(run).items()
    }


@pytest.fixture(scope="module")
def pictures(module_cli) -> Path:
    """Folders of pictures in two classes, and some that nobody has sorted."""
    folder = module_cli.folder / "pictures"
    random = np.random.default_rng(0)
    for name in ("train/dark", "train/light", "val/dark", "val/light", "new", "new/deeper"):
        (folder / name).mkdir(parents=True)
        for number in range(5):
            pixels = random.integers(0, 90, (12, 12, 3)) + 160 * (name.endswith("light") or number % 2)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    (folder / "new" / "2.png").write_bytes(b"no picture")
    return folder


@pytest.fixture(scope="module")
def sorter(module_cli, pictures) -> Path:
    words = (
        "model=pixels",
        "data=s3_photos",
        f"data.bucket=file://{pictures}",
        "data.batch_size=5",
        "cluster=inline",
    )
    module_cli.done(*words, "data.image_size=8", "trainer.epochs=1", "hydra.run.dir=sorter")
    return module_cli.folder / "sorter"


@pytest.mark.slow
def test_pictures_without_labels_are_predicted_and_not_evaluated(module_cli, sorter, tmp_path):
    new = ("data.val_prefix=new", "data.labelled=false", "data.max_bad_fraction=0.2")
    module_cli.done("predict", f"run={sorter}", "out=new.csv", *new)
    table = read(module_cli.folder / "new.csv")
    assert [row["id"] for row in table] == sorted(
        [f"new/{number}.png" for number in range(5)] + [f"new/deeper/{number}.png" for number in range(5)]
    )
    assert {row["name"] for row in table} <= {"dark", "light"}
    assert [row["id"] for row in table if row["error"]] == ["new/2.png"]
    refused = module_cli.run("evaluate", f"run={sorter}", *new)
    assert (refused.returncode, "has no labels here" in refused.stderr) == (1, True)


def test_a_data_set_of_another_group_is_evaluated(project_here, sorter, pictures):
    table = pictures / "val.csv"
    names = sorted(str(path.relative_to(pictures)) for path in pictures.glob("val/*/*.png"))
    table.write_text("path,label\n" + "".join(f"{name},{name.split('/')[1]}\n" for name in names))
    words = ["data=image_table", f"data.table={table}", f"data.val_table={table}", "data.image_size=8"]
    there = inference.evaluate(str(sorter), "last", changes=[*words, "data.batch_size=5"])
    assert there["metrics"] == pytest.approx(validated(sorter))
    with pytest.raises(DdpHydraError, match="no_such"):
        inference.evaluate(str(sorter), changes=["data=no_such"])


@pytest.mark.slow
def test_masks_are_a_folder_of_pngs_that_hold_the_class_of_each_pixel(module_cli):
    words = ("experiment=segmentation", "cluster=inline", "trainer.epochs=1", "trainer.max_steps=20")
    module_cli.done(*words, "hydra.run.dir=masks_run")
    run = module_cli.folder / "masks_run"
    module_cli.done("predict", f"run={run}", "out=masks/", "which=last")
    folder = module_cli.folder / "masks"
    table = read(folder / "predictions.csv")
    assert [int(row["index"]) for row in table] == list(range(360))
    model = UNet(num_classes=11).eval()
    model.load_state_dict(torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"])
    with torch.no_grad():
        masks = model(DigitMasks("val").images).argmax(1)
    written = torch.stack([torch.tensor(np.array(Image.open(folder / row["prediction"]))) for row in table])
    assert (written == masks).float().mean() > 0.999  # a batch of another size rounds otherwise
    assert len(masks.unique()) > 1


@pytest.mark.slow
def test_samples_of_shards_are_named_by_shard_and_key_and_a_key_is_added(module_cli, sorter, pictures):
    module_cli.done("make", str(pictures / "val"), "shards", module="ddp_hydra.data.shards")
    index = module_cli.folder / "shards" / "index.json"
    words = ("data=wids", f"data.index={index}", f"data.val_index={index}", "data.image_size=8", "data.label=null")
    module_cli.done("predict", f"run={sorter}", "out=shards.csv", *words, "+data.val.transform.smooth=false")
    table = read(module_cli.folder / "shards.csv")
    assert len({row["id"] for row in table}) == len(table) == 10
    assert all("tar" in row["id"] for row in table)
