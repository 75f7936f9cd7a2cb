"""The command line: Hydra composes a config, `main` runs it as one job."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ddp_hydra import config, project


def main(cfg: DictConfig) -> float | None:
    """Run one job: the whole task function, for plain runs and for any launcher."""
    from ddp_hydra import job

    return job.run(cfg, Path(HydraConfig.get().runtime.output_dir))


def entry() -> None:
    """Entry of `python -m ddp_hydra` and of the console script.

    Exit codes: 0 done, 1 failed, 130 interrupted.
    """
    try:
        root = project.find()
        sys.path.insert(0, str(root))
        config.register()
        # Hydra 1.3 wants to be told its version, 1.4 would rather not be.
        version = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
        hydra.main(config_path=str(root / "conf"), config_name="config", **version)(main)()
    except config.ConfigError as error:
        sys.exit(f"ddp_hydra: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
