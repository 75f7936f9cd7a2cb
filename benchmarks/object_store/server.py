"""Serve files with nginx on loopback: once directly, and once with the first byte 20 ms late, as of real stores."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.object_store import corpus, listing

LATE_MS = 20
PACKAGES = "nginx-light and libnginx-mod-http-echo"
_START_S = 10.0
_END_S = 5.0

_CONFIG = """
load_module {modules}/ngx_http_echo_module.so;
{user}
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/errors.log crit;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  keepalive_requests 1000000000;
  keepalive_timeout 600;
  open_file_cache max=10000 inactive=600s;
  open_file_cache_valid 600s;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  types {{ image/jpeg jpg; application/xml xml; application/json json; application/x-tar tar; }}
  map $arg_prefix $prefix {{ default none; {prefixes} }}
  map $args $number {{ default 0; "~(continuation-token|marker)=page-(?<n>[0-9]+)" $n; ~start-after= last; }}
  map $arg_delimiter $page {{ "" $number; default folders; }}
  server {{
    listen 127.0.0.1:{prompt};
    root {root};
    location ~ ^/{bucket}/?$ {{ rewrite ^ /{listing}/$prefix/$page.xml last; }}
    location /{listing}/ {{ internal; }}
  }}
  server {{
    listen 127.0.0.1:{late};
    location / {{ echo_sleep {seconds}; echo_exec /in-time$uri $args; }}
    location ~ ^/in-time/{bucket}/?$ {{ internal; rewrite ^ /{listing}/$prefix/$page.xml last; }}
    location /{listing}/ {{ internal; root {root}; }}
    location /in-time/ {{ internal; alias {root}/; }}
  }}
}}
"""


@dataclass(frozen=True)
class Store:
    """Holds the endpoints of the running server.

    Args:
        prompt: its port without delay.
        late: its port with the first byte 20 ms late.
    """

    prompt: int
    late: int

    def url(self, latency_ms: int) -> str:
        """Return the endpoint with a first-byte latency of 0 or 20 ms."""
        return f"http://127.0.0.1:{self.late if latency_ms else self.prompt}"


@contextmanager
def serve(root: Path, folder: Path) -> Iterator[Store]:
    """Run the server for the length of a `with` block.

    It takes objects by path-style addresses, reads no signature, knows GET, HEAD and ranges, and the canned
    listings of `listing`. It ends with this process, however that ends.

    Args:
        root: with the bucket and the pages of listings.
        folder: for its own files; it is emptied before and removed afterwards.
    """
    modules = _modules()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    store = Store(*_free_ports(2))
    config = folder / "nginx.conf"
    config.write_text(
        _CONFIG.format(
            modules=modules,
            user="user root;" if os.geteuid() == 0 else "",
            folder=folder,
            root=root,
            bucket=corpus.BUCKET,
            listing=listing.FOLDER,
            prefixes=" ".join(f'"~^{name}(/|%2[Ff])?$" {name};' for name in (corpus.PREFIX, corpus.MANY)),
            prompt=store.prompt,
            late=store.late,
            seconds=LATE_MS / 1000,
        )
    )
    process = start(["nginx", "-e", str(folder / "errors.log"), "-p", str(folder), "-c", str(config)])
    try:
        _wait_for(process, store)
        yield store
    finally:
        end(process)
        shutil.rmtree(folder, ignore_errors=True)


def start(command: list[str], **options: int) -> subprocess.Popen[bytes]:
    """Start a server that ends when this process does, and that a Ctrl-C does not reach."""
    libc = ctypes.CDLL(None)
    set_death_signal = 1  # PR_SET_PDEATHSIG
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(set_death_signal, signal.SIGTERM),
        **options,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _modules() -> str:
    """Return the folder of nginx's modules, with the one that waits."""
    advice = (
        f"this benchmark needs the Debian packages {PACKAGES}: type `apt-get install {PACKAGES.replace(' and', '')}`"
    )
    if shutil.which("nginx") is None:
        sys.exit(f"nginx is not installed; {advice}")
    said = subprocess.run(["nginx", "-V"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"--modules-path=(\S+)", said)
    if found is None or not (Path(found[1]) / "ngx_http_echo_module.so").is_file():
        sys.exit(f"nginx has no echo module; {advice}")
    return found[1]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def _wait_for(process: subprocess.Popen[bytes], store: Store) -> None:
    """Wait until it answers both ports."""
    deadline = time.monotonic() + _START_S
    for latency_ms in (0, LATE_MS):
        url = f"{store.url(latency_ms)}/{corpus.BUCKET}/?list-type=2&prefix={corpus.PREFIX}"
        while True:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=1).close()
                break
            except (urllib.error.URLError, OSError) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"nginx did not start: {error}")
                time.sleep(0.02)
