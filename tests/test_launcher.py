"""Hydra's own test suites for launchers, against ours."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hydra import version
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite

from ddp_hydra.config.hydra_compat import VERSION_BASE
from ddp_hydra.sweep import launcher

pytestmark = [
    pytest.mark.integration,
    # The suites' own tasks say nothing of the working directory, on which Hydra 1.3 remarks.
    pytest.mark.filterwarnings("ignore:Future Hydra versions will no longer change working directory"),
]


@pytest.fixture(autouse=True)
def hydra_of_no_version(monkeypatch):
    """The suites expect a Hydra that nobody has told its version yet; other tests have. Hydra 1.4 is told nothing."""
    if not VERSION_BASE:
        return
    monkeypatch.setattr(version.VersionBase.instance(), "version_base", version._UNSPECIFIED_)


@pytest.fixture(autouse=True)
def closed_at_the_end():
    """Hydra does not tell a launcher when its sweep is over; a process still draws the picture then."""
    yield
    launcher.close_all()


def test_the_launcher_is_discovered():
    """Comes first: the suites need a Hydra that has looked for its plugins."""
    assert "DaskDDPLauncher" in [plugin.__name__ for plugin in Plugins.instance().discover(Launcher)]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("dask_ddp", [])])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher_name", "overrides"), [("dask_ddp", ["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"])]
)
class TestBatchedSweeper(BatchedSweeperTestSuite):
    pass


def test_other_apps_can_list_the_plugins_of_an_editable_install(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = "import hydra_plugins, pkgutil; print([one.name for one in pkgutil.iter_modules(hydra_plugins.__path__)])"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "'ddp_hydra_plugins'" in found.stdout, "type pip install --no-deps --editable ."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"), [({}, ["-m", "hydra/job_logging=disabled", "hydra/launcher=dask_ddp"])]
)
class TestIntegration(IntegrationTestSuite):
    pass
