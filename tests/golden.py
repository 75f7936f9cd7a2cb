"""Short jobs whose final state has to stay the same, bit for bit, through every refactoring.

python -m tests.golden record golden.json     # before a change
python -m tests.golden compare golden.json    # after it: exits 1 where a job came to something else

The digests hold for one kind of CPU and one version of torch; they are not committed. Some jobs are resumed, killed or
rolled back on the way: they have to come to what another job comes to, on any machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
DIGITS = ("experiment=digits", "trainer.epochs=2", "trainer.threads=1", "trainer.checkpoint_every_steps=5")
NAMES = ("experiment=pet_names", "data.batch_size=512", "cluster.n_workers=2", "trainer.epochs=2", "trainer.threads=1")
BF16 = ("trainer.precision=bf16", "data.image_size=32")
"""With 16 pixels, one gradient of ResNet-18 in bf16 comes out different each time: see docs/training.md."""
JOBS: dict[str, tuple[str, ...]] = {
    "digits, 2 ranks": DIGITS,
    "digits, 4 ranks": (*DIGITS, "cluster.n_workers=4", "data.batch_size=32"),
    "accumulation": (*DIGITS, "data.batch_size=32", "trainer.gradient_accumulation_steps=2"),
    "bf16 with clipping": (*DIGITS, *BF16, "trainer.clip_norm=1", "optimizer=adamw"),
    "without an average": (*DIGITS, "trainer.ema_decay=null", "scheduler=one_cycle"),
    "pet names": (*NAMES, "data.source={names}", "scheduler=step"),
    "chunked shards": (
        "data=wids", "data.index={shards}/index.json", "data.val_index={shards}/index.json", "sampler=chunked",
        "data.image_size=16", "data.batch_size=32", "trainer.max_steps=12", "trainer.threads=1",
        "data.cache_dir={cache}", "scheduler.warmup_steps=4",
    ),
    "resumed": ("resume='{digits}/checkpoints/step-000015.pt'", *DIGITS),
    "killed and restarted": (*DIGITS, "+fault=kill,rank=1,step=14"),
    "a step left out": (*DIGITS, "+fault=nan,rank=1,step=14", "trainer.on_nonfinite=skip"),
    "rolled back": (*DIGITS, "+fault=nan,rank=1,step=14", "trainer.on_nonfinite=rollback"),
}  # fmt: skip
SAME = {
    "resumed": "digits, 2 ranks",
    "killed and restarted": "digits, 2 ranks",
    "rolled back": "a step left out",
}
"""Jobs that have to come to what another comes to."""


def digest(checkpoint: Path) -> str:
    """Return the sha256 over the model, the optimizers and the average of a checkpoint."""
    content = torch.load(checkpoint, weights_only=True)
    hashed = hashlib.sha256()
    for name in ("model", "optimizer", "ema"):
        for path, value in leaves(content.get(name), name):
            hashed.update(path.encode())
            data = value.contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            hashed.update(data)
    return hashed.hexdigest()


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers of a nested state with their paths."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}.{number}")
    elif isinstance(value, (torch.Tensor, int, float)):
        yield path, value


def prepare(folder: Path) -> dict[str, str]:
    """Write the data that the jobs read, and return where it is."""
    chance = random.Random(0)
    syllables = ("lu", "na", "bel", "la", "max", "co", "per", "mi", "lo", "ro", "xy", "ze", "us", "da", "isy")
    names = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(600)]
    (folder / "names.json").write_text(json.dumps(names))
    write_digits(folder / "images")
    make = [sys.executable, "-m", "ddp_hydra.data.shards", "make", "images", "shards", "--shard-mb", "0.03"]
    subprocess.run(make, cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)
    places = {"names": "names.json", "shards": "shards", "cache": "cache", "digits": "digits, 2 ranks"}
    return {name: str(folder / place) for name, place in places.items()}


def write_digits(folder: Path) -> None:
    """Write some of scikit-learn's digits as PNG files, a folder a class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    for number, (pixels, label) in enumerate(zip(found.images[:600], found.target, strict=False)):
        place = folder / str(label) / f"{number:04d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).resize((16, 16)).save(place)


def environment() -> dict[str, str]:
    """Return the environment in which the code of this checkout runs, from any folder."""
    return {**os.environ, "DDP_HYDRA_PROJECT": str(ROOT), "PYTHONPATH": str(ROOT)}


def run(folder: Path, name: str, places: dict[str, str]) -> str:
    """Run a job and return the digest of its last checkpoint."""
    given = [word.format(**places) if "{" in word else word for word in JOBS[name]]
    command = [sys.executable, "-m", "ddp_hydra", *given, f"hydra.run.dir='{folder / name}'", "seed=3"]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{name}: exit {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
    return digest(folder / name / "checkpoints" / "last.pt")


def arithmetic() -> dict[str, str]:
    """Return what the digests depend on besides the code: torch's version and the CPU's vector instructions."""
    cpus = Path("/proc/cpuinfo")
    words = cpus.read_text().split() if cpus.exists() else [platform.processor()]
    vectors = {word for word in words if word.startswith(("avx", "amx", "fma", "sve", "asimd"))}
    return {"torch": torch.__version__, "vectors": " ".join(sorted(vectors))}


def main() -> int:
    """Record or compare; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="JSON: a digest of each job")
    parser.add_argument("--only", choices=JOBS, nargs="*", default=list(JOBS), help="these jobs alone")
    given = parser.parse_args()
    here, found = arithmetic(), {}
    before = json.loads(given.file.read_text()) if given.command == "compare" else {"arithmetic": here}
    if (there := before.get("arithmetic")) != here:
        raise SystemExit(f"{given.file} was recorded with {there}, and here is {here}: record it anew")
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        places = prepare(folder)
        for job in given.only:
            found[job] = run(folder, job, places)
            print(f"{found[job][:16]}  {job}", flush=True)
    wrong = [f"{job}: not as {other}" for job, other in SAME.items() if job in found and found[job] != found.get(other)]
    if given.command == "record":
        given.file.write_text(json.dumps({"arithmetic": here, "digests": found}, indent=2) + "\n")
    else:
        wrong += [f"{job}: not as recorded" for job in found if before["digests"].get(job) != found[job]]
    print("\n".join(wrong) or "all the same")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
