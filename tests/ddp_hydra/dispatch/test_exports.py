from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

from ddp_hydra import dispatch


@pytest.mark.parametrize("name", dispatch.__all__)
def test_a_name_is_no_module_even_when_all_modules_are_imported(name):
    for module in pkgutil.iter_modules(dispatch.__path__, "ddp_hydra.dispatch."):
        importlib.import_module(module.name)
    assert not inspect.ismodule(getattr(dispatch, name))
