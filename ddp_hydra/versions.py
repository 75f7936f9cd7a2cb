"""What Hydra 1.3 and Hydra 1.4 want to be told in different words."""

from __future__ import annotations

from typing import Any

import hydra
from hydra import utils

VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
"""For `hydra.main` and the like: Hydra 1.3 warns where it is left out, 1.4 where it is given."""

_ALLOWED: dict[str, Any] = (
    # 1.4 asks which targets may be called. A config is its user's own code, as the modules are that it names.
    {"_execution_whitelist_": utils.UNSAFE_DISABLE_EXECUTION_CHECKS}
    if hasattr(utils, "UNSAFE_DISABLE_EXECUTION_CHECKS")
    else {}
)


def instantiate(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the `_target_` of a node of the user's config, whatever it is."""
    return utils.instantiate(node, *args, **_ALLOWED, **kwargs)
