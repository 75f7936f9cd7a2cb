from __future__ import annotations

import pytest
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType

from ddp_hydra.cli.groups import listed_without_copies
from ddp_hydra.cli.search_path import config_folders
from ddp_hydra.config.hydra_compat import VERSION_BASE


@pytest.mark.medium
def test_the_options_are_those_that_hydra_lists(monkeypatch):
    before = ConfigLoaderImpl.get_group_options
    with initialize_config_dir(str(config_folders()[0].absolute()), **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        groups = loader.list_groups("")
        kinds = (ObjectType.CONFIG, ObjectType.GROUP, None)
        wanted = [loader.get_group_options(group, kind) for group in groups for kind in kinds]
        with listed_without_copies():
            monkeypatch.setattr("hydra._internal.config_repository.copy.deepcopy", None)
            assert [loader.get_group_options(group, kind) for group in groups for kind in kinds] == wanted
    assert {"cluster", "data", "model"} <= set(groups)
    assert ConfigLoaderImpl.get_group_options is before
