"""Jobs, checkpoints and summaries that tests of runs make."""

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig, OmegaConf

from ddp_hydra.config import project
from ddp_hydra.config.schema import Config, resolved
from ddp_hydra.job.run import Job
from ddp_hydra.job.run_dir import saved_step
from ddp_hydra.results import finite
from ddp_hydra.run_state import Summary
from ddp_hydra.storage.manifest import CheckpointEntry, CheckpointPart, encode_manifest

PACKED = project.Project("0" * 64, b"PK\x05\x06" + bytes(18))
VALUE = {
    "steps": 20,
    "samples": 160,
    "bad_samples": 0,
    "train_s": 1.5,
    "samples_per_s": 107.0,
    "tokens_per_s": 900.5,
    "mfu": None,
    "metrics": {"val/accuracy": 0.5, "train/loss": float("nan")},
    "data": {"wait_s": 0.1, "wait": 0.07},
    "exchange_s": 0.2,
    "peak_memory": 2**28,
    "slowest": {"rank": 1, "times": 1.05},
    "interrupted": "",
    "stopped_early": "",
    "matrices": {},
}


def config(**changes: Any) -> DictConfig:
    cfg = OmegaConf.structured(Config)
    groups = {name: {} for name in ("model", "sampler", "task", "optimizer", "scheduler")}
    cfg = OmegaConf.merge(cfg, groups, {"cluster": {"_target_": "a.Cluster"}, "data": {"batch_size": 8, "train": {}}})
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return cfg


def make(run_dir: Path, first_world_size: int = 0, files=None, **changes: Any) -> Job:
    cfg = config(**changes)
    made = Job(run_dir, cfg, resolved(cfg), files or {}, Summary(status="failed"))
    if (run_dir / "checkpoints").exists():
        made.sent.add(saved_step(run_dir))
    made.first_world_size = first_world_size
    return made


def zipped(content: bytes) -> bytes:
    """Return an archive, as torch's files are."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("data"), content)
    return buffer.getvalue()


def checkpoint(run_dir: Path, *steps: int, damaged: tuple[int, ...] = ()) -> None:
    """Step files and last.pt, as the writer leaves them."""
    folder, entries = run_dir / "checkpoints", {}
    folder.mkdir(parents=True)
    for step in steps:
        name, content = f"step-{step:06d}.pt", zipped(b"content %d" % step)
        digest = hashlib.sha256(content).hexdigest()
        entries[name] = CheckpointEntry(parts=[CheckpointPart(name=name, size=len(content), sha256=digest)], step=step)
        entries["last.pt"] = entries[name]
        for file in (name, "last.pt"):
            (folder / file).write_bytes(b"rubbish!!" if step in damaged else content)
    (folder / "manifest.json").write_bytes(encode_manifest(entries))


def ended(metric: str) -> Summary:
    objective = {"metric": metric, "direction": "minimize"}
    told = {"status": "done", "objective": objective, **VALUE, "metrics": finite(VALUE["metrics"])}
    return msgspec.convert(told, Summary)
