"""Composes the config of a job in this process, as the command does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf, open_dict

from ddp_hydra.cli import overrides
from ddp_hydra.cli.compose import compose
from ddp_hydra.config import redact
from ddp_hydra.errors import ConfigError
from ddp_hydra.storage.files import write_atomic


class Composed:
    """Holds the config of a job.

    Args:
        words: overrides, as they are typed in a command line: "optimizer.lr=0.1".
        config_name: the main config.

    Attributes:
        cfg: the config, without Hydra's own part.
        overrides: those of the job, with the ones of a run that it resumes.
        run_dir: the folder for its results.

    Raises:
        ConfigError: an argument is not an override.
        HydraException: there is no such config, or a value has the wrong type.
    """

    def __init__(self, words: Sequence[str], config_name: str = "config") -> None:
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"overrides are {words!r}, and must be a list of texts: ['model=resnet18', 'seed=1']")
        if options := [word for word in words if word.startswith("-")]:
            raise ConfigError(f"{options[0]} is an option of the command; from Python only overrides are taken")
        cfg = compose(overrides.read(list(words)), config_name)
        self.overrides: list[str] = list(cfg.hydra.overrides.task)
        self.run_dir = Path(cfg.hydra.run.dir)
        self._hydra = OmegaConf.masked_copy(cfg, "hydra")
        with open_dict(cfg):
            del cfg["hydra"]
        self.cfg = cfg

    def save(self) -> None:
        """Write `.hydra/` of the run directory, without secrets, as Hydra does for the command."""
        files = {"config.yaml": self.cfg, "hydra.yaml": self._hydra, "overrides.yaml": OmegaConf.create(self.overrides)}
        folder = self.run_dir / ".hydra"
        folder.mkdir(parents=True, exist_ok=True)
        for name, config in files.items():
            write_atomic(folder / name, redact.yaml_text(config).encode())
