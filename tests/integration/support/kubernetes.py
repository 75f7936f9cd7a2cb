"""What a Kubernetes API server and the Dask operator do for a DaskCluster, on loopback, with processes for pods."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.integration.support.by_hand import program
from tests.support.ports import free_port

CONDITIONS = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")]
RUNNING = {"phase": "Running", "conditions": CONDITIONS, "containerStatuses": []}
WAITING = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}


class Kubernetes:
    """One namespace, which holds one DaskCluster at most."""

    def __init__(self, folder: Path, check: Callable[[dict[str, Any]], None]) -> None:
        self.folder, self.check = folder, check
        self.stack: contextlib.ExitStack | None = None
        self.cluster: dict[str, Any] = {}
        self.created: list[dict[str, Any]] = []
        self.workers, self.most = 0, 4
        self.port = 0

    def create(self, resource: dict[str, Any]) -> dict[str, Any]:
        self.check(resource)
        resource = {**resource, "metadata": {**resource["metadata"], "namespace": "default"}}
        self.created.append(resource)
        self.cluster, self.stack, self.workers = resource, contextlib.ExitStack(), 0
        self.port = free_port()
        self.run("scheduler", "--host", "127.0.0.1", "--port", self.port, "--no-dashboard")
        self.scale(resource["spec"]["worker"]["replicas"])
        return resource

    def run(self, part: str, *options: object, **variables: str) -> None:
        """Start the container of a pod, as if it was alone on its host."""
        assert self.stack is not None
        (container,) = self.cluster["spec"][part]["spec"]["containers"]
        args = [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], arg) for arg in container["args"]]
        assert args[0] == "dask", shlex.join(args)
        own = {one["name"]: one["value"] for one in container.get("env", [])}
        command = (sys.executable, "-m", *args, *options)
        self.stack.enter_context(program(*command, log=self.folder / "pods.log", **own, **variables))

    def scale(self, n: int) -> None:
        while self.workers < min(n, self.most):
            self.workers += 1
            home = self.folder / f"{self.cluster['metadata']['name']}-{self.workers}"
            name = {"DASK_WORKER_NAME": f"w{self.workers}", "DASK_SCHEDULER_ADDRESS": f"tcp://127.0.0.1:{self.port}"}
            self.run("worker", "--host", "127.0.0.1", "--no-dashboard", "--local-directory", home, **name)

    def close(self) -> None:
        stack, self.stack, self.cluster = self.stack, None, {}
        if stack is not None:
            stack.close()

    # -- what is asked for ---------------------------------------------------------------------------------

    def answer(self, method: str, url: str, body: bytes) -> tuple[int, Any]:
        path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        kind, _, name = path.partition("/namespaces/default/")[2].partition("/")
        if not kind:
            return 200, DISCOVERY.get(path.rstrip("/"), {})
        if kind == "daskclusters" and method == "POST":
            return 201, self.create(json.loads(body))
        if kind == "daskclusters" and method == "DELETE":
            self.close()
            return 200, {"status": "Success"}
        if kind == "daskworkergroups" and method == "PATCH":
            replicas = json.loads(body)["spec"]["worker"]["replicas"]
            self.cluster["spec"]["worker"]["replicas"] = replicas
            self.scale(replicas)
        found = [one for one in self.objects(kind) if fits(one, query)]
        if not name:
            return 200, {"items": found}
        named = [one for one in found if one["metadata"]["name"] == name.partition("/")[0]]
        return (200, named[0]) if named else (404, {"message": f"{kind} {name} not found"})

    def objects(self, kind: str) -> list[dict[str, Any]]:
        if not self.cluster:
            return []
        name = self.cluster["metadata"]["name"]
        if kind == "daskclusters":
            return [{**self.cluster, "status": {"phase": "Running"}}]
        if kind == "daskworkergroups":
            replicas = self.cluster["spec"]["worker"]["replicas"]
            group = {"cluster": name, "worker": {**self.cluster["spec"]["worker"], "replicas": replicas}}
            return [{"metadata": meta(f"{name}-default", name, "workergroup"), "spec": {**group, "replicas": replicas}}]
        if kind == "services":
            ports = [{"name": port, "port": self.port} for port in ("tcp-comm", "http-dashboard")]
            ingress = {"loadBalancer": {"ingress": [{"ip": "127.0.0.1"}]}}
            spec = {**self.cluster["spec"]["scheduler"]["service"], "ports": ports}
            return [{"metadata": meta(f"{name}-scheduler", name, "scheduler"), "spec": spec, "status": ingress}]
        if kind != "pods":
            return []
        wanted = self.cluster["spec"]["worker"]["replicas"]
        pods = [(f"{name}-worker-{n}", "worker", RUNNING if n < self.workers else WAITING) for n in range(wanted)]
        pods.append((f"{name}-scheduler", "scheduler", RUNNING))
        return [{"metadata": meta(pod, name, part), "spec": {}, "status": status} for pod, part, status in pods]


def meta(name: str, cluster: str, component: str) -> dict[str, Any]:
    labels = {"dask.org/cluster-name": cluster, "dask.org/component": component}
    return {"name": name, "namespace": "default", "labels": labels, "uid": name}


def fits(one: dict[str, Any], query: dict[str, list[str]]) -> bool:
    labels = one["metadata"].get("labels", {})
    fields = {"metadata.name": one["metadata"]["name"], "status.phase": one.get("status", {}).get("phase")}
    about = {"labelSelector": labels, "fieldSelector": fields}
    wanted = [(kind, part) for kind in about for selector in query.get(kind, []) for part in selector.split(",")]
    return all(about[kind].get(part.split("=")[0]) == part.split("=")[1] for kind, part in wanted if part)


def resources(*kinds: str) -> dict[str, Any]:
    return {
        "resources": [
            {"name": kind.lower() + "s", "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": []}
            for kind in kinds
        ]
    }


DISCOVERY: dict[str, Any] = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
    "/api": {"versions": ["v1"]},
    "/apis": {
        "groups": [
            {
                "name": "kubernetes.dask.org",
                "versions": [{"groupVersion": "kubernetes.dask.org/v1", "version": "v1"}],
                "preferredVersion": {"groupVersion": "kubernetes.dask.org/v1", "version": "v1"},
            }
        ]
    },
    "/api/v1": resources("Pod", "Service"),
    "/apis/kubernetes.dask.org/v1": resources("DaskCluster", "DaskWorkerGroup", "DaskAutoscaler"),
}


@contextlib.contextmanager
def serve(kubernetes: Kubernetes) -> Iterator[Path]:
    """Answer HTTP; yields the file for KUBECONFIG."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                code, answer = kubernetes.answer(self.command, self.path, body)
            with (kubernetes.folder / "api.log").open("a") as log:
                log.write(f"{self.command} {self.path} {code}\n")
            content = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = respond  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            config = kubernetes.folder / "kubeconfig"
            url = f"http://127.0.0.1:{server.server_address[1]}"
            named = {"cluster": {"server": url}, "user": {"token": "only-for-this-test"}}
            named["context"] = {"cluster": "here", "user": "here", "namespace": "default"}
            lists = {f"{kind}s": [{"name": "here", kind: value}] for kind, value in named.items()}
            config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "here", **lists}))
            yield config
        finally:
            server.shutdown()
            thread.join()
            kubernetes.close()
