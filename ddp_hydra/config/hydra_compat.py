"""What Hydra 1.3 and Hydra 1.4 want to be told in different words."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import hydra
from hydra import utils
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.errors import InstantiationException

VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
"""For `hydra.main` and the like: Hydra 1.3 warns where it is left out, 1.4 where it is given."""

_ALLOWED: dict[str, Any] = (
    # 1.4 asks which targets may be called. A config is its user's own code, as the modules are that it names.
    {"_execution_whitelist_": utils.UNSAFE_DISABLE_EXECUTION_CHECKS}
    if hasattr(utils, "UNSAFE_DISABLE_EXECUTION_CHECKS")
    else {}
)


def register(name: str, node: Any) -> None:
    """Make a schema or config known to Hydra, once: 1.4 warns of the second time.

    It is there already where the state of another process was taken over before this was imported.

    Args:
        name: with its group, as in `hydra/launcher/dask_ddp`.
        node: a dataclass, or a dict.
    """
    store = ConfigStore.instance()
    if store.get_type(f"{name}.yaml") == ObjectType.NOT_FOUND:
        group, _, last = name.rpartition("/")
        store.store(last, node, group=group or None, provider="ddp_hydra")


def instantiate(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the `_target_` of a node of the user's config, whatever it is.

    Raises:
        InstantiationException: there is no such target.
        Exception: whatever the target raises; Hydra 1.3 would wrap it.
    """
    try:
        return utils.instantiate(node, *args, **_ALLOWED, **kwargs)
    except InstantiationException as error:
        if error.__cause__ is None or not str(error).startswith("Error in call to target"):
            raise
        raised = error.__cause__
    raise raised


def targets_allowed_by(context: Any) -> Any:
    """Which targets somebody else's app lets its configs call, as its `HydraContext` has it; None for Hydra 1.3."""
    return getattr(context, "execution_whitelist", None)


def allowing(targets: Any) -> AbstractContextManager[Any]:
    """Hold all `instantiate` inside the block to what `targets_allowed_by` returned, maybe in another process."""
    if targets is None or not hasattr(utils, "execution_whitelist"):
        return nullcontext()
    return utils.execution_whitelist(targets, reset=True)
