"""A script as users of dask-pytorch-ddp write it: ResNet over a bucket, loss and checkpoints to the client.

python article.py <bucket> <prefix> <folder for results>; the store is the one that the environment names.
"""

import datetime
import json
import logging
import math
import multiprocessing as mp
import pickle
import sys
import uuid

import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from distributed.worker import logger
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import models, transforms

from ddp_hydra.compat.dask_pytorch_ddp import data, dispatch, results

key = uuid.uuid4().hex
rh = results.DaskResultsHandler(key)

transform = transforms.Compose([transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor()])


def now():
    return datetime.datetime.now().isoformat()


def train(bucket, prefix, n_epochs, batch_size, num_workers=1):
    worker_rank = int(dist.get_rank())
    torch.manual_seed(0)
    logger.setLevel(logging.INFO)
    logger.info("rank %s begins", worker_rank)
    whole_dataset = data.S3ImageFolder(bucket, prefix, transform=transform)
    sampler = DistributedSampler(whole_dataset)
    loader = DataLoader(
        whole_dataset,
        sampler=sampler,
        batch_size=batch_size,
        num_workers=num_workers,
        multiprocessing_context=mp.get_context("fork"),
    )
    model = models.resnet18(num_classes=len(whole_dataset.classes))
    model = DDP(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    count = 0
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            count += 1
            rh.submit_result(
                f"worker/{worker_rank}/data-{now()}.json",
                json.dumps({"loss": loss.item(), "epoch": epoch, "count": count, "worker": worker_rank}),
            )
            if count % 3 == 0 and worker_rank == 0:
                rh.submit_result(f"checkpoint-{now()}.pkl", pickle.dumps(model.state_dict()))
    return count


if __name__ == "__main__":
    bucket, prefix, folder = sys.argv[1:]
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0")
    client = Client(cluster)
    client.wait_for_workers(2)
    futures = dispatch.run(client, train, bucket, prefix, 3, 8, backend="gloo")
    rh.process_results(folder, futures, raise_errors=False)
    counts = [future.result() for future in futures]
    assert counts[0] == counts[1] == 3 * math.ceil(48 / 2 / 8)
    client.close()
    cluster.close()
    print("steps", counts[0])
