"""Scripts as users of the sources write them, with only the import line changed; they train on real gloo ranks.

`pet_names.py` is run from the installed wheel: tests/integration/test_wheel.py.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support.s3_server import credentials  # noqa: F401 (a fixture)
from tests.support.tar_server import described, index_of, serving, tar_of

HERE = Path(__file__).parent
pytestmark = pytest.mark.integration


def run(script: str, *arguments: object, **variables: str) -> str:
    """Run a script to its end, and return what it printed."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def picture(label: int, number: int, format_: str = "PNG") -> bytes:
    """A picture whose class is easy to see: red or blue."""
    chance = random.Random(number)
    bright, dark = chance.randrange(150, 256), chance.randrange(60)
    image = Image.new("RGB", (48, 40), (dark, dark, bright) if label else (bright, dark, dark))
    file = io.BytesIO()
    image.save(file, format_)
    return file.getvalue()


@pytest.mark.slow
def test_the_article_trains_over_a_bucket(s3, credentials, tmp_path):  # noqa: F811
    """dask-pytorch-ddp's article: torchvision's transforms, forked loader processes, results at each step."""
    names = ("n01-Red", "n02-Blue")
    photos = {f"dogs/Images/{names[number % 2]}/{number}.png": picture(number % 2, number) for number in range(48)}
    bucket, folder = s3.fill(photos), tmp_path / "my-folder"
    said = run("article.py", bucket, "dogs/Images", folder, AWS_ENDPOINT_URL=s3.endpoint_url)
    assert said.splitlines()[-1] == "steps 9"
    for rank in (0, 1):
        steps = [json.loads(path.read_text()) for path in (folder / "worker" / str(rank)).glob("data-*.json")]
        steps.sort(key=lambda step: step["count"])
        assert [(step["count"], step["worker"]) for step in steps] == [(count, rank) for count in range(1, 10)]
        assert sum(step["loss"] for step in steps[-3:]) < sum(step["loss"] for step in steps[:3])
    saved = sorted(folder.glob("checkpoint-*.pkl"))
    assert len(saved) == 3
    assert all(name.startswith("module.") for name in pickle.loads(saved[0].read_bytes()))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_wids_with_ddp_trains_over_shards_of_a_web_server(tmp_path, world_size):
    """With a process group and without; the loader's processes are those that DataLoader starts by default."""
    with serving() as server:
        listed = []
        for shard in range(4):
            numbers = range(20 * shard, 20 * shard + 20)
            files = [
                (f"{number:05d}.{kind}", content)
                for number in numbers
                for kind, content in (
                    ("jpg", picture(number % 2, number, "JPEG")), ("cls", str(number % 2).encode())
                )
            ]  # fmt: skip
            server.add(**{f"train-{shard}": tar_of(files)})
            listed.append(described(f"train-{shard}.tar", 20, server.files[f"/train-{shard}.tar"]))
        server.files["/imagenet-train.json"] = index_of(*listed, name="train")
        said = run("wids_ddp.py", f"{server.url}/imagenet-train.json", tmp_path / "_cache", world_size)
        assert [server.gets(f"/train-{shard}.tar") for shard in range(4)] == [1, 1, 1, 1]
    ended = [json.loads(text) for text in re.findall(r"\{[^{}]*\}", said)]  # two ranks may write to one line
    assert sorted((one["rank"], one["samples"]) for one in ended) == [
        (rank, 2 * 80 // world_size) for rank in range(world_size)
    ]
    assert len(list((tmp_path / "_cache").rglob("*train-*.tar"))) == 4
