"""Short jobs whose trained state has to be that of an older wheel, bit for bit, through every refactoring.

make golden OLD=ddp_hydra-0.2.0-py3-none-any.whl
python -m tests.golden ddp_hydra-0.2.0-py3-none-any.whl --only "digits, 2 ranks" resumed

Both sides run in turn on this machine, with the same torch. A state depends on the kind of CPU, so none is kept in a
file. Some jobs are resumed, killed, rolled back or run in another way: they have to come to what another job comes to.
The words of the jobs are those that older wheels know.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "tests" / "support" / "golden_project"
SHORT = ("trainer.epochs=2", "trainer.threads=1", "trainer.checkpoint_every_steps=5")
DIGITS = ("experiment=digits", *SHORT)
NAMES = ("experiment=pet_names", "data.batch_size=512", "cluster.n_workers=2", "trainer.epochs=2", "trainer.threads=1")
BF16 = ("trainer.precision=bf16", "data.image_size=32")
"""With 16 pixels, one gradient of ResNet-18 in bf16 comes out different each time: see docs/training.md."""
LSTM = ("model=lstm", "model.num_layers=2", "model.hidden_size=32", "optimizer=adamw")
TOKENS = ("data=sentences", "task=language_model", *LSTM, *SHORT)
PADDED = (*TOKENS, "data.padded=true")
STREAM = ("data=digit_stream", "model=mlp", "trainer.ema_decay=0.9", *SHORT)
TORCHRUN = "cluster=torchrun"
JOBS: dict[str, tuple[str, ...]] = {
    "digits, 2 ranks": DIGITS,
    "digits, 1 rank": (*DIGITS, "cluster.n_workers=1"),
    "digits, 3 ranks": (*DIGITS, "cluster.n_workers=3"),
    "digits, 4 ranks": (*DIGITS, "cluster.n_workers=4", "data.batch_size=32"),
    "digits, inline": (*DIGITS, "cluster=inline"),
    "digits, torchrun": (*DIGITS, TORCHRUN),
    "accumulation": (*DIGITS, "data.batch_size=32", "trainer.gradient_accumulation_steps=2"),
    "bf16 with clipping": (*DIGITS, *BF16, "trainer.clip_norm=1", "optimizer=adamw"),
    "without an average": (*DIGITS, "trainer.ema_decay=null", "scheduler=one_cycle"),
    "resumed": ("resume='{runs}/digits, 2 ranks/checkpoints/step-000015.pt'", *DIGITS),
    "resumed with 3 ranks": (
        "resume='{runs}/digits, 2 ranks/checkpoints/step-000015.pt'", *DIGITS, "cluster.n_workers=3",
    ),
    "killed": (*DIGITS, "+fault=kill,rank=1,step=14"),
    "a step left out": (*DIGITS, "+fault=nan,rank=1,step=14", "trainer.on_nonfinite=skip"),
    "rolled back": (*DIGITS, "+fault=nan,rank=1,step=14", "trainer.on_nonfinite=rollback"),
    "pet names": (*NAMES, "data.source={names}", "scheduler=step"),
    "chunked shards": (
        "data=wids", "data.index={shards}/index.json", "data.val_index={shards}/index.json", "sampler=chunked",
        "data.image_size=16", "data.batch_size=32", "trainer.max_steps=12", "trainer.threads=1",
        "data.cache_dir={runs}/cache", "scheduler.warmup_steps=4",
    ),
    "tokens, 2 ranks": TOKENS,
    "tokens, 1 rank": (*TOKENS, "cluster.n_workers=1"),
    "tokens, 3 ranks": (*TOKENS, "cluster.n_workers=3"),
    "tokens, accumulation": (*TOKENS, "data.batch_size=8", "trainer.gradient_accumulation_steps=2"),
    "tokens, resumed": ("resume='{runs}/tokens, 2 ranks/checkpoints/step-000015.pt'", *TOKENS),
    "tokens, killed": (*TOKENS, "+fault=kill,rank=0,step=8"),
    "tokens, torchrun": (*TOKENS, TORCHRUN),
    "padded tokens, 1 rank": (*PADDED, "cluster.n_workers=1"),
    "padded tokens, 2 ranks": PADDED,
    "padded tokens, killed": (*PADDED, "+fault=kill,rank=1,step=18"),
    "stream, 2 ranks": STREAM,
    "stream, 1 rank": (*STREAM, "cluster.n_workers=1"),
    "stream, 3 ranks": (*STREAM, "cluster.n_workers=3"),
    "stream, resumed": ("resume='{runs}/stream, 2 ranks/checkpoints/step-000035.pt'", *STREAM),
    "stream, killed": (*STREAM, "+fault=kill,rank=1,step=29"),
    "stream, torchrun": (*STREAM, TORCHRUN),
    "regression": ("experiment=regression", *SHORT),
    "segmentation": ("experiment=segmentation", "trainer.epochs=1", "trainer.threads=1"),
    "own loss": ("experiment=digit_tokens", "trainer.epochs=1", "trainer.threads=1"),
    "two updates": ("experiment=gan_digits", *SHORT),
}  # fmt: skip
SAME = {
    "digits, inline": "digits, 1 rank",
    "digits, torchrun": "digits, 2 ranks",
    "resumed": "digits, 2 ranks",
    "killed": "digits, 2 ranks",
    "rolled back": "a step left out",
    "tokens, resumed": "tokens, 2 ranks",
    "tokens, killed": "tokens, 2 ranks",
    "tokens, torchrun": "tokens, 2 ranks",
    "padded tokens, killed": "padded tokens, 2 ranks",
    "stream, resumed": "stream, 2 ranks",
    "stream, killed": "stream, 2 ranks",
    "stream, torchrun": "stream, 2 ranks",
}
"""Jobs that have to come to what another comes to."""
WEIGHED = "each token that counts weighs the same; before, each rank's mean did"
CHANGED = {
    "padded tokens, 1 rank": "rounded otherwise: the only loss of a step is not multiplied by n / N",
    "padded tokens, 2 ranks": WEIGHED,
    "padded tokens, killed": WEIGHED,
}
"""Jobs that come to something else on purpose than in wheels before the change, with the reason."""


@dataclass(frozen=True)
class Side:
    """Runs the jobs with one version of the code. A `with` block ends the fork server that it has warm.

    Args:
        python: the interpreter that imports it.
        folder: for its runs; it is made.
        path: folders that the interpreter looks in first.
    """

    python: str
    folder: Path
    path: str = ""

    def __enter__(self) -> Side:
        (self.folder / "warm").mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.command("-m", "ddp_hydra", "warm", "stop")

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this version."""
        own = {
            "PYTHONPATH": self.path,
            "DDP_HYDRA_PROJECT": str(PROJECT),
            "XDG_RUNTIME_DIR": str(self.folder / "warm"),
            "DDP_HYDRA_KEEP_WARM_S": "600",
        }
        return subprocess.run(
            [self.python, *words],
            cwd=self.folder,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )

    def run(self, job: str, places: dict[str, Path]) -> str:
        """Run a job and return the digest of its last checkpoint, or how it failed."""
        words = [word.format(**places, runs=self.folder) if "{" in word else word for word in JOBS[job]]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if TORCHRUN in words else []
        run_dir = self.folder / job
        ended = self.command(*launcher, "-m", "ddp_hydra", *words, f"hydra.run.dir='{run_dir}'", "seed=3")
        if ended.returncode:
            print(ended.stdout[-2000:], ended.stderr[-4000:], sep="\n", file=sys.stderr)
            return f"exit {ended.returncode}"
        return digest(run_dir / "checkpoints" / "last.pt")[:8]


def installed(wheel: Path, folder: Path) -> str:
    """Install a wheel beside the packages of this interpreter, so that both sides have the same; return its Python."""
    venv.create(folder)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    zipfile.ZipFile(wheel).extractall(site)
    # A path in such a file comes last, and the .pth files there, as of this editable checkout, are not read.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


def digest(checkpoint: Path) -> str:
    """Return the sha256 over the model, the optimizers and the average of a checkpoint."""
    content = torch.load(checkpoint, weights_only=True)
    hashed = hashlib.sha256()
    for name in ("model", "optimizer", "ema"):
        for path, value in leaves(numbered(content.get(name)), name):
            hashed.update(path.encode())
            data = value.contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            hashed.update(data)
    return hashed.hexdigest()


def numbered(state: Any) -> Any:
    """Return a part of a checkpoint with numbers in place of the names of an optimizer's parameters, as older ones."""
    if not isinstance(state, dict):
        return state
    if "param_groups" not in state:
        return {name: numbered(part) for name, part in state.items()}
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    slots = {numbers.get(name, name): value for name, value in state["state"].items()}
    return {**state, "param_groups": groups, "state": slots}


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


def prepare(folder: Path) -> dict[str, Path]:
    """Write the data that the jobs read, and return where they are."""
    chance = random.Random(0)
    syllables = ("lu", "na", "bel", "la", "max", "co", "per", "mi", "lo", "ro", "xy", "ze", "us", "da", "isy")
    names = ["".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(600)]
    (folder / "names.json").write_text(json.dumps(names))
    write_digits(folder / "images")
    make = [sys.executable, "-m", "ddp_hydra.data.shards", "make", "images", "shards", "--shard-mb", "0.03"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(make, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return {"names": folder / "names.json", "shards": folder / "shards"}


def write_digits(folder: Path) -> None:
    """Write some of scikit-learn's digits as PNG files, a folder a class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    for number, (pixels, label) in enumerate(zip(found.images[:600], found.target, strict=False)):
        place = folder / str(label) / f"{number:04d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).resize((16, 16)).save(place)


def compare(before: Side, now: Side, jobs: Sequence[str], places: dict[str, Path]) -> bool:
    """Run jobs on both sides, print a row for each, and return whether all came to what they have to come to."""
    found: dict[str, str] = {}
    wrong = []
    print(f"{'job':24}{'before':10}now", flush=True)
    for job in jobs:
        old, found[job] = before.run(job, places), now.run(job, places)
        faults = list(find_faults(job, old, found))
        wrong += [job] if faults else []
        verdict = ", ".join(faults) or ("equal" if old == found[job] else f"changed: {CHANGED[job]}")
        print(f"{job:24}{old:10}{found[job]:10}{verdict}", flush=True)
    print(f"wrong: {'; '.join(wrong)}" if wrong else f"all {len(jobs)} jobs are right")
    return not wrong


def find_faults(job: str, old: str, found: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with a job.

    Args:
        job: its name.
        old: what it came to with the old wheel.
        found: what the jobs so far, and this one, came to with this checkout.
    """
    new = found[job]
    if new.startswith("exit"):
        yield "FAILED"
    elif new != old and job not in CHANGED:
        yield "DIFFERS"
    other = SAME.get(job)
    if other in found and found[other] != new:
        yield f"NOT AS {other}"


def main() -> int:
    """Compare; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="an older wheel")
    parser.add_argument("--only", choices=JOBS, nargs="*", default=list(JOBS), metavar="JOB", help="these jobs alone")
    given = parser.parse_args()
    if not given.wheel.is_file():
        parser.error(f"there is no file {given.wheel}: type make golden OLD=<wheel>, as make dist writes it into dist/")
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        old = Side(installed(given.wheel, folder / "venv"), folder / "before")
        with old as before, Side(sys.executable, folder / "now", str(ROOT)) as now:
            return int(not compare(before, now, given.only, prepare(folder)))


if __name__ == "__main__":
    sys.exit(main())
