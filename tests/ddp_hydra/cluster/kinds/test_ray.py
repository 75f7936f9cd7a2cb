"""What is refused before Ray is asked."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from ddp_hydra.cluster import kinds
from ddp_hydra.cluster.kinds.services import Ray
from ddp_hydra.errors import ClusterError

TARGET = "ddp_hydra.cluster.kinds.ray_cluster.RayCluster"


def manager(**settings):
    return Ray(OmegaConf.create({"_target_": TARGET, **settings}))


def test_a_ray_that_ends_with_the_command_keeps_nothing():
    with pytest.raises(ClusterError, match=r"^cluster\.keep=true: .*ray start --head.*cluster\.address=auto$"):
        manager(keep=True).check()
    manager(keep=True, address="auto").check()


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setattr(kinds, "is_installed", lambda package: package != "ray")
    with pytest.raises(ClusterError, match=r"pip install 'ddp-hydra\[ray\]'"):
        manager().check()


@pytest.mark.parametrize(
    ("address", "given", "environment"),
    [
        ("auto", {}, {"pip": ["timm>=1.0"]}),
        ("auto", {"pip": []}, {"pip": []}),
        (None, {}, {}),  # its workers have this environment
    ],
)
def test_ray_installs_what_workers_must_have(address, given, environment):
    made = manager(address=address, pip=["timm>=1.0"], runtime_env=given)
    assert made.arguments["runtime_env"] == environment


def test_a_kept_cluster_is_named_with_its_ray():
    class Kept:
        name = "ddp-hydra-1"

    assert manager(address="auto").reuse_with(Kept()) == "cluster=ray cluster.address=auto cluster.name=ddp-hydra-1"


def test_a_name_that_is_not_there():
    said = manager(address="auto", name="mine").explain(ValueError("Failed to look up actor"))
    assert said == "no cluster of the name mine runs on this Ray: leave out cluster.name=mine to start one"


def test_what_ray_could_not_install_is_told_without_its_stacks():
    class RuntimeEnvSetupError(Exception):
        pass

    error = RuntimeEnvSetupError("Failed to set up\nTraceback (most recent call last):\n  File\nRuntimeError: no such")
    said = manager(address="auto").explain(error)
    assert said == "Ray could not install cluster.pip or set up cluster.runtime_env on a node: RuntimeError: no such"
