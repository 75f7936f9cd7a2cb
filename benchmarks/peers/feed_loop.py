"""By hand: ResNet from an S3 store, by torch's DataLoader over `S3ImageFolder`, on one device; or the loader alone."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.object_store import corpus
from ddp_hydra.data.image_folder import S3ImageFolder
from ddp_hydra.data.transforms import TrainTransform
from models import resnet

LEARNING_RATE, MOMENTUM = 0.01, 0.9


def main() -> None:
    """Read, and train unless the loader is measured alone; print the samples per second as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.feed_loop", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="URL of the store")
    parser.add_argument("--model", required=True, help="a function of models/resnet.py")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), required=True)
    parser.add_argument("--side", type=int, required=True, help="of the crops, pixels")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, required=True, help="first steps, which are not counted")
    parser.add_argument("--workers", type=int, required=True, help="processes of the loader")
    parser.add_argument("--threads", type=int, required=True, help="fetches at a time, of each process")
    parser.add_argument("--decoders", type=int, required=True, help="images decoded at a time, of each process")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--alone", action="store_true", help="read only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    images = S3ImageFolder(
        corpus.BUCKET,
        "train",
        endpoint_url=given.endpoint,
        transform=TrainTransform(given.side),
        threads=given.threads,
        decoders=given.decoders,
        cache_mb=0,
    )
    loader = DataLoader(
        images,
        batch_size=given.batch_size,
        sampler=RandomSampler(images, num_samples=given.steps * given.batch_size, replacement=True),
        num_workers=given.workers,
        collate_fn=images.collate,
        pin_memory=given.device == "cuda",
        prefetch_factor=4,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )
    steps = iter(loader) if given.alone else trained(given, images, loader)
    for _ in itertools.islice(steps, given.skip):
        pass
    settle(given.device)
    begin = time.perf_counter()
    for _ in steps:
        pass
    settle(given.device)
    seconds = time.perf_counter() - begin
    print(json.dumps({"samples_per_s": (given.steps - given.skip) * given.batch_size / seconds}), flush=True)
    del steps, loader  # with it its processes
    images.close()


def trained(given: argparse.Namespace, images: S3ImageFolder, loader: DataLoader) -> Iterator[None]:
    """Take a step with each batch. Nothing in a step waits for the device."""
    device = torch.device(given.device)
    model = getattr(resnet, given.model)(len(images.classes)).to(device, memory_format=torch.channels_last)
    if given.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
    kind = torch.float16 if given.precision == "fp16" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=given.precision == "fp16")
    for batch in loader:
        x, y = images.prepare([part.to(device, non_blocking=True) for part in batch])
        with torch.autocast(device.type, kind, enabled=given.precision != "fp32"):
            loss = F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield


def settle(device: str) -> None:
    """Wait until the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
