"""The real KubeCluster, against an API server that checks and runs what it is given."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.ddp_hydra.cluster.kinds.test_kubernetes import validator
from tests.integration.support.kubernetes import Kubernetes, serve
from tests.integration.support.training import summary_of

pytestmark = pytest.mark.integration

TINY = ("cluster=kubernetes", "+cluster.scheduler_service_type=LoadBalancer", "data=tiny", "model=tiny")


@pytest.fixture(scope="module")
def served(warm_server, tmp_path_factory) -> Iterator[tuple[Kubernetes, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("kubernetes")
    kubernetes = Kubernetes(folder, validator().validate)
    with serve(kubernetes) as config:
        yield kubernetes, {"KUBECONFIG": str(config)}


@pytest.fixture
def kubernetes(served) -> Iterator[Kubernetes]:
    yield served[0]
    served[0].close()


@pytest.fixture(scope="module")
def login(served) -> dict[str, str]:
    return served[1]


@pytest.mark.slow
def test_the_main_job_on_pods(cli, kubernetes, login):
    ended = cli.done(*TINY, "hydra.run.dir=run", **login)
    assert (summary_of(cli.folder / "run")["status"], summary_of(cli.folder / "run")["world_size"]) == ("done", 2)
    assert not kubernetes.cluster
    assert "HTTP Request" not in ended.stderr


@pytest.mark.slow
def test_a_cluster_that_is_kept_serves_the_next_job_with_more_workers(cli, kubernetes, login):
    ended = cli.done(*TINY, "cluster.keep=true", "cluster.n_workers=1", "hydra.run.dir=one", **login)
    name = kubernetes.cluster["metadata"]["name"]
    (typed,) = re.findall(r"left running: the next job uses it with (\S+)", ended.stderr)
    assert typed == f"cluster.name={name}"
    created = len(kubernetes.created)
    cli.done(*TINY, typed, "hydra.run.dir=two", **login)
    assert len(kubernetes.created) == created
    assert (summary_of(cli.folder / "two")["status"], summary_of(cli.folder / "two")["world_size"]) == ("done", 2)
    assert not kubernetes.cluster


@pytest.mark.slow
def test_pods_that_do_not_come_up(cli, kubernetes, login):
    ended = cli.run(*TINY, "cluster.n_workers=5", "cluster.wait_timeout_s=40", **login)
    assert ended.returncode == 1
    assert re.search(r"4 of 5 workers came in \d+ s: its pods: .*worker-4 Pending \(ImagePullBackOff\)", ended.stderr)
    assert not kubernetes.cluster


@pytest.mark.slow
def test_no_kubernetes_here(cli, kubernetes, tmp_path):
    ended = cli.run(*TINY, KUBECONFIG=str(tmp_path / "nowhere"))
    assert ended.returncode == 1
    assert "could not be started" in ended.stderr
    assert "does `kubectl get daskclusters` work from here?" in ended.stderr
