"""Describes the GPUs of this machine, and measures how fast one multiplies matrices. CUDA is opened in a child only."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch

from benchmarks.commands import ROOT, with_ours

GIB = 2**30
QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Card:
    """Holds what is known of the GPUs, or of the CPU in their place.

    Args:
        name: of the first GPU.
        gpus: how many there are; 0 on the CPU.
        memory_gib: of the first GPU.
        driver: its version, or "".
        torch_version: of torch.
        cuda_version: of the CUDA that torch was built for, or "".
        bf16: whether the GPU computes in bf16 itself.
    """

    name: str
    gpus: int = 0
    memory_gib: float = 0.0
    driver: str = ""
    torch_version: str = str(torch.__version__)
    cuda_version: str = torch.version.cuda or ""
    bf16: bool = True


def look(device: str) -> Card:
    """Return what a child process sees.

    Args:
        device: cuda or cpu.
    """
    return Card(**child("--device", device))


def child(*arguments: str) -> dict[str, object]:
    """Run this file as a command of its own, and return what it prints.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.card", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=with_ours({}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it printed nothing"])[-1])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def memory_used_mib() -> list[int]:
    """Return the memory that is taken on each GPU, by all processes, in MiB."""
    told = subprocess.run(QUERY, capture_output=True, text=True, check=True)
    return parse_memory(told.stdout)


def parse_memory(text: str) -> list[int]:
    """Read the lines of nvidia-smi: a number of MiB for each GPU."""
    return [int(line) for line in text.split() if line.strip()]


def describe(device: str) -> Card:
    """Look at the GPUs of this process."""
    if device == "cpu":
        return Card(platform.processor() or platform.machine())
    seen = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = ""
    return Card(
        name=torch.cuda.get_device_name(0),
        gpus=torch.cuda.device_count(),
        memory_gib=seen.total_memory / GIB,
        driver=driver,
        bf16=seen.major >= 8,
    )


def matmul_tflops(device: str, precision: str, size: int, seconds: float) -> float:
    """Measure the matrix products of a device, as the share that a training reaches is one of them.

    Args:
        device: cuda or cpu.
        precision: fp32, bf16 or fp16.
        size: rows and columns of the matrices.
        seconds: how long to multiply.

    Returns:
        10^12 floating-point operations in a second, of the best of three turns.
    """
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    one, other = (torch.randn(size, size, device=device).to(kind) for _ in range(2))

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    best = 0.0
    for _ in range(3):
        wait()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds / 3:
            for _ in range(10):
                torch.mm(one, other)
            count += 10
            wait()
        best = max(best, 2 * size**3 * count / (time.perf_counter() - begin) / 1e12)
    return best


def main() -> None:
    """Print one line of JSON: the card, or how fast it multiplies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--matmul", metavar="PRECISION")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=6.0)
    given = parser.parse_args()
    if given.matmul:
        found: dict[str, object] = {"tflops": matmul_tflops(given.device, given.matmul, given.size, given.seconds)}
    else:
        found = asdict(describe(given.device))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
