"""Tar shards as a stream, and pipelines of webdataset."""

from __future__ import annotations

import gc
import io
import tarfile
from typing import Any

import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

from ddp_hydra.data import TarSamples
from ddp_hydra.data.streams import StreamLoader, StreamSampler, split
from ddp_hydra.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def urls(tmp_path) -> str:
    """Four shards of three samples, numbered from 0 to 11."""
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(3 * shard, 3 * shard + 3):
                add(tar, f"{number:03d}.cls", str(number).encode())
                image = io.BytesIO()
                Image.new("RGB", (2, 2), (number, 0, 0)).save(image, "png")
                add(tar, f"{number:03d}.png", image.getvalue())
    return f"{tmp_path}/{{0..3}}.tar"


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def read(data: Any, rank: int = 0, world_size: int = 1, epoch: int = 0, position: int = 0) -> list[int]:
    part = split(data, rank, world_size)
    part.open(epoch, position)
    return [label for samples in iter(lambda: part.take(1), None) for _, label in samples]


def test_samples_are_decoded_tuples(urls):
    (x, y), *_ = TarSamples(urls, shuffle=False)
    assert (x.shape, x.dtype, y) == ((3, 2, 2), torch.float32, 0)
    *_, (image, label) = TarSamples([urls], ["png", "cls"], decode="pil", transform=lambda pair: pair, shuffle=False)
    assert (image.size, label) == ((2, 2), 11)
    raw, _ = next(iter(TarSamples(urls, decode=None)))
    assert raw.startswith(b"\x89PNG")


def test_the_order_hangs_on_seed_and_epoch(urls):
    orders = [read(TarSamples(urls, seed=seed), epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert read(TarSamples(urls, seed=1), epoch=1) == orders[-1]
    mixed = TarSamples(urls, shuffle_buffer=5)
    assert read(mixed) == read(mixed) != orders[0]
    assert read(mixed, position=7) == read(mixed)[7:]


@pytest.mark.medium
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_a_users_dataloader_share_the_shards(urls, workers):
    loaded = DataLoader(TarSamples(urls, transform=label_of), batch_size=None, num_workers=workers)
    assert sorted(loaded) == list(range(12))


def label_of(sample: tuple[Any, int]) -> int:
    return sample[1]


def test_ranks_share_the_shards_in_another_way_each_epoch(urls):
    data = TarSamples(urls)
    for epoch in range(3):
        parts = [read(data, rank, 2, epoch) for rank in range(2)]
        assert sorted(parts[0] + parts[1]) == list(range(12))
    assert read(data, 0, 2, 0) != read(data, 0, 2, 1)
    few = [read(data, rank, 6) for rank in range(6)]  # fewer shards than ranks
    assert sorted(sample for part in few for sample in part) == list(range(12))
    assert {len(part) for part in few} == {2}


def test_it_is_loaded_in_batches(urls):
    data = TarSamples(urls, shuffle=False)
    sampler = StreamSampler(split(data, 0, 1), 4)
    steps = StreamLoader(data, CPU).steps(sampler.batches(0), 2)
    batches = [(micro.batch[0].shape, micro.batch[1].tolist()) for step in steps for micro in step]
    assert batches == [((2, 3, 2, 2), [number, number + 1]) for number in range(0, 12, 2)]


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_pipelines_of_ones_own_split_by_node_or_by_samples(urls, monkeypatch):
    def pipeline(nodesplitter: Any) -> Any:
        return (
            webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=nodesplitter).decode().to_tuple("png", "cls")
        )

    monkeypatch.setenv("WORLD_SIZE", "2")
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        found.append(read(pipeline(webdataset.split_by_node), rank, 2))
    assert found == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert [read(pipeline(None), rank, 2) for rank in range(2)] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    with pytest.raises(ConfigError, match=r"nodesplitter=webdataset\.split_by_node"):
        split(pipeline(webdataset.shardlists.single_node_only), 0, 2)
    gc.collect()  # webdataset leaves its files open
