"""A script as users of wids write it: DDP over shards, with a line every so many seconds.

The launcher of each source calls `train_in_process_group`: torchrun or a Ray task with the variables of a rank.

python wids_ddp.py <index> <cache folder> <world size>: makes the ranks itself, as a driver of remote tasks does.
"""

import json
import multiprocessing as mp
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import transforms

from ddp_hydra.compat import wids

transform_train = transforms.Compose(
    [
        transforms.RandomResizedCrop(16),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)


def make_sample(sample, val=False):
    image = sample[".jpg"]
    label = sample[".cls"]
    return transform_train(image), label


def make_dataloader_train(config):
    wids.create_cleanup_background_process(os.path.join(config.cache_dir, "*"), maxsize=10**9)
    dataset = wids.ShardListDataset(config.index, cache_dir=config.cache_dir, keep=True).add_transform(make_sample)
    sampler = wids.DistributedChunkedSampler(dataset, chunksize=20, shuffle=True)
    return DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)


@dataclass
class Config:
    index: str
    cache_dir: str
    rank: int = 0
    epochs: int = 2
    max_steps: int = 10**18
    lr: float = 0.01
    momentum: float = 0.9
    world_size: int = 2
    backend: str = "gloo"
    master_addr: str = "127.0.0.1"
    master_port: str = "0"
    report_s: float = 0.2
    report_growth: float = 1.1


def train(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    loader = make_dataloader_train(config)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    steps, report_s, reported = 0, config.report_s, time.time()
    losses, accuracies = deque(maxlen=100), deque(maxlen=100)
    for epoch in range(config.epochs):
        for inputs, labels in loader:
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += len(labels)
            losses.append(loss.item())
            accuracies.append((outputs.argmax(1) == labels).float().mean().item())
            if config.rank == 0 and time.time() - reported > report_s:
                print(f"epoch {epoch} steps {steps} loss {sum(losses) / len(losses):.3f}", flush=True)
                reported, report_s = time.time(), report_s * config.report_growth
            if steps > config.max_steps:
                break
    return {"rank": config.rank, "samples": steps, "loss": sum(losses) / len(losses)}


def train_in_process_group(rank, config):
    config = replace(config, rank=rank)
    if config.world_size > 1:
        os.environ["MASTER_ADDR"] = config.master_addr
        os.environ["MASTER_PORT"] = config.master_port
        dist.init_process_group(backend=config.backend, rank=rank, world_size=config.world_size)
    result = train(config)
    if config.world_size > 1:
        dist.destroy_process_group()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    config = Config(sys.argv[1], sys.argv[2], world_size=int(sys.argv[3]), master_port=port)
    context = mp.get_context("fork")
    ranks = [context.Process(target=train_in_process_group, args=(rank, config)) for rank in range(config.world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(rank.exitcode for rank in ranks))
