"""What our option would have the Dask operator make, by the operator's own schema."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import dask_kubernetes
import jsonschema
import pytest
import yaml
from distributed.cli import dask_scheduler, dask_worker
from omegaconf import OmegaConf

from ddp_hydra.cluster.kinds import services
from ddp_hydra.cluster.kinds.services import Kubernetes

CRDS = Path(dask_kubernetes.__file__).parent / "operator/deployment/helm/dask-kubernetes-operator/crds"
OPTION = OmegaConf.load(Path(__file__).parents[4] / "conf/cluster/kubernetes.yaml")


@functools.cache
def validator() -> Any:
    """Return a validator of a DaskCluster that refuses what the API server would drop in silence."""
    crd = yaml.load((CRDS / "daskcluster.yaml").read_text(), yaml.CSafeLoader)
    schema = strict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]) | {"additionalProperties": True}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def strict(node: Any) -> Any:
    if isinstance(node, list):
        return [strict(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    node = {key: strict(inner) for key, inner in node.items()}
    if node.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    preserves = node.get("x-kubernetes-preserve-unknown-fields", False)
    if node.get("type") == "object" and isinstance(node.get("properties"), dict) and not preserves:
        node.setdefault("additionalProperties", False)
    return node


def created(monkeypatch, **changes: Any) -> dict[str, Any]:
    """The arguments with which KubeCluster is called."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        Kubernetes, "instantiate", lambda self, target, arguments: given.update(arguments, _target_=target)
    )
    Kubernetes(OmegaConf.merge(OPTION, changes)).open()
    return given


EVERYTHING = {
    "name": "mine",
    "image": "registry.example.org/train:1",
    "n_workers": 5,
    "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}, "requests": {"cpu": "500m"}},
    "env": {"NCCL_DEBUG": 1},
    "idle_timeout": 30,
    "scheduler_service_type": "LoadBalancer",
}


@pytest.mark.medium
@pytest.mark.parametrize("changes", [{}, EVERYTHING])
def test_the_resource_is_as_the_operator_wants_it(monkeypatch, changes):
    given = created(monkeypatch, **changes)
    validator().validate(given["custom_cluster_spec"])
    assert given["_target_"] == "dask_kubernetes.operator.KubeCluster"
    assert given["shutdown_on_close"] is None


@pytest.mark.medium
def test_the_schema_refuses_what_it_does_not_know(monkeypatch):
    spec = created(monkeypatch)["custom_cluster_spec"]
    spec["spec"]["worker"]["spec"]["containers"][0]["unheard_of"] = ["x"]
    with pytest.raises(jsonschema.ValidationError, match="unheard_of"):
        validator().validate(spec)


@pytest.mark.medium
def test_native_arguments_arrive(monkeypatch):
    spec = created(monkeypatch, **EVERYTHING)["custom_cluster_spec"]
    worker = spec["spec"]["worker"]["spec"]["containers"][0]
    assert spec["metadata"]["name"] == "mine"
    assert spec["spec"]["idleTimeout"] == 30
    assert spec["spec"]["worker"]["replicas"] == 5
    assert spec["spec"]["scheduler"]["service"]["type"] == "LoadBalancer"
    assert worker["image"] == "registry.example.org/train:1"
    limits = {"nvidia.com/gpu": "1", "memory": "16Gi"}
    assert worker["resources"] == {"limits": limits, "requests": {"cpu": "500m"}}
    assert worker["env"] == [{"name": "NCCL_DEBUG", "value": "1"}]


@pytest.mark.medium
def test_the_commands_are_those_of_todays_dask(monkeypatch):
    spec = created(monkeypatch)["custom_cluster_spec"]["spec"]
    scheduler, worker = (spec[part]["spec"]["containers"][0]["args"] for part in ("scheduler", "worker"))
    for args, command in ((scheduler, dask_scheduler.main), (worker, dask_worker.main)):
        assert args[:2] == ["dask", command.name if command.name != "main" else args[1]]
        parsed = command.make_context("dask", args[2:])  # refuses an option that it does not have
        assert parsed.params["host"] == ("0.0.0.0" if args is scheduler else None)
    assert (scheduler[1], worker[1]) == ("scheduler", "worker")
    assert worker[worker.index("--nthreads") + 1] == "1"


def test_a_command_of_ones_own(monkeypatch):
    spec = created(monkeypatch, worker_command="dask cuda worker")["custom_cluster_spec"]
    assert spec["spec"]["worker"]["spec"]["containers"][0]["args"][:3] == ["dask", "cuda", "worker"]


def test_a_spec_of_ones_own_stays(monkeypatch):
    own = {"metadata": {"name": "own"}}
    assert created(monkeypatch, custom_cluster_spec=own)["custom_cluster_spec"] == own


def test_names_are_made_that_kubernetes_takes(monkeypatch):
    from dask_kubernetes.operator.validation import validate_cluster_name

    monkeypatch.setattr("getpass.getuser", lambda: "Dr. Who_2")
    names = {created(monkeypatch)["custom_cluster_spec"]["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    for name in names:
        assert name.startswith("ddp-hydra-dr-who-2-")
        validate_cluster_name(name)


def test_templates_without_the_old_commands_are_left_as_they_are(monkeypatch):
    import dask_kubernetes.operator

    def of_a_later_version(name, **_):
        container = {"args": ["dask", "scheduler"]}
        return {"spec": {"scheduler": {"spec": {"containers": [container]}}, "worker": {}}}

    monkeypatch.setattr(dask_kubernetes.operator, "make_cluster_spec", of_a_later_version)
    spec = services.cluster_spec("x", 1)
    assert spec["spec"]["scheduler"]["spec"]["containers"][0]["args"] == ["dask", "scheduler"]
