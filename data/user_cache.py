"""Where this user's caches are."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the folder of this project in the user's cache folder (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_hydra"
