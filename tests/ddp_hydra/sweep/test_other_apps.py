from __future__ import annotations

from types import SimpleNamespace

import cloudpickle
import pytest
from hydra import utils
from hydra.core.singleton import Singleton
from hydra.errors import InstantiationException

from ddp_hydra.config.hydra_compat import allowing, targets_allowed_by
from ddp_hydra.sweep import other_apps


def called(cfg):
    """A task that calls what its config names."""
    return utils.instantiate(cfg)


def call(cfg, context):
    return cloudpickle.dumps((called, cfg, None, Singleton.get_state(), targets_allowed_by(context)))


@pytest.mark.skipif(not hasattr(utils, "execution_whitelist"), reason="Hydra 1.3 knows no such lists")
@pytest.mark.usefixtures("hydra_restore_singletons")
def test_on_a_rank_an_app_may_call_what_it_may_call_anywhere():
    with utils.execution_whitelist("fractions.*"):
        context = SimpleNamespace(execution_whitelist=("collections.Counter",))
        found = other_apps.run_task(call({"_target_": "collections.Counter", "_args_": ["aab"]}, context), [])
        assert found == {"a": 2, "b": 1}
        with pytest.raises(InstantiationException, match="not in the Hydra execution whitelist"):
            other_apps.run_task(call({"_target_": "fractions.Fraction"}, context), [])


@pytest.mark.skipif(not hasattr(utils, "execution_whitelist"), reason="Hydra 1.3 knows no such lists")
def test_an_app_that_lifts_all_checks_lifts_them_on_ranks():
    lifted = cloudpickle.loads(cloudpickle.dumps(utils.UNSAFE_DISABLE_EXECUTION_CHECKS))
    with allowing(lifted):
        assert utils.instantiate({"_target_": "collections.Counter"}) == {}


def test_an_app_that_says_nothing_of_it_is_left_alone():
    assert targets_allowed_by(SimpleNamespace()) is None
    with allowing(None):
        pass
