"""A scheduler and workers that were started by hand, with TLS and without."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import dask
import pytest
from omegaconf import OmegaConf

from ddp_hydra import dispatch
from ddp_hydra.cluster import connect
from ddp_hydra.cluster.connection import workers_of
from ddp_hydra.errors import ClusterError
from tests.integration.support.by_hand import address_in, dask_scheduler, dask_worker
from tests.integration.support.certificates import Authority
from tests.integration.support.training import summary_of
from tests.support.ports import free_port

pytestmark = pytest.mark.integration

TINY = ("data=tiny", "model=tiny", "optimizer.lr=0.1", "trainer.log_every_steps=1", "cluster=remote")


@dataclass
class Secured:
    """A cluster that speaks TLS."""

    file: Path
    authority: Authority
    other: Authority

    @property
    def address(self) -> str:
        return address_in(self.file)

    def certificates(self, **changes: object) -> dict[str, str]:
        """What the client has to give, or something else."""
        cert, key = self.authority.folder / "client.pem", self.authority.folder / "client.key"
        given = {"tls_ca_file": self.authority.ca, "tls_client_cert": cert, "tls_client_key": key}
        return {name: str(value) for name, value in (given | changes).items()}


@pytest.fixture(scope="module")
def secured(warm_server, tmp_path_factory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority, other = Authority(folder / "ca", "ours"), Authority(folder / "other", "theirs")
    for one in (authority, other):
        one.issue("client")
    cert, key = authority.issue("server")
    tls = ("--tls-ca-file", authority.ca, "--tls-cert", cert, "--tls-key", key)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(dask_scheduler(folder, *tls))
        for name in ("a", "b"):
            stack.enter_context(dask_worker(folder, file, name, *tls))
        yield Secured(file, authority, other)


@pytest.fixture(scope="module")
def plain(warm_server, tmp_path_factory) -> Iterator[Path]:
    """The file of a scheduler without TLS and without workers."""
    with dask_scheduler(tmp_path_factory.mktemp("plain")) as file:
        yield file


def remote(**arguments: object) -> contextlib.AbstractContextManager:
    return connect.connect(OmegaConf.create({"_target_": "ddp_hydra.cluster.kinds.local.Remote", **arguments}))


def why_not(**arguments: object) -> str:
    with pytest.raises(ClusterError) as caught, remote(**arguments):
        pass
    return str(caught.value)


def results_are_whole(run: Path) -> None:
    assert summary_of(run)["status"] == "done"
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert {
        "metrics.jsonl",
        "checkpoints/last.pt",
        "checkpoints/best.pt",
        "logs/rank-0.log",
        "logs/rank-1.log",
    } <= files


def test_the_main_job_over_tls(cli, secured):
    given = [f"cluster.security.{name}={file}" for name, file in secured.certificates().items()]
    where = f"cluster.scheduler_file={secured.file}"
    cli.done(*TINY, where, *given, "cluster.n_workers=2", "hydra.run.dir=run")
    results_are_whole(cli.folder / "run")


@pytest.mark.slow
def test_certificates_may_come_from_dasks_own_config(cli, secured):
    files = secured.certificates()
    names = {"CA_FILE": "tls_ca_file", "CLIENT__CERT": "tls_client_cert", "CLIENT__KEY": "tls_client_key"}
    variables = {f"DASK_DISTRIBUTED__COMM__TLS__{name}": files[key] for name, key in names.items()}
    where = f"cluster.address={secured.address}"
    cli.done(*TINY, where, "cluster.n_workers=2", "hydra.run.dir=run", **variables)
    results_are_whole(cli.folder / "run")


def test_files_go_to_ranks_and_come_back_over_tls(secured, gang, heard, tmp_path):
    def read(files):
        from ddp_hydra import results

        content = Path(files["resume"]).read_bytes()
        results.submit("copy.bin", content)
        return len(content)

    source = tmp_path / "source.bin"
    source.write_bytes(bytes(range(256)) * 4000)
    with remote(address=secured.address, security=secured.certificates(), n_workers=2) as client:
        workers = workers_of(client)
        assert all(address.startswith("tls://") for address in workers)
        made = gang(client, ranks=1, files={"resume": source})
        made.on_record = lambda record: record.kind == "file" and made.fetch(record, tmp_path / "copy.bin")
        assert made.run(read) == [source.stat().st_size]
    assert (tmp_path / "copy.bin").read_bytes() == source.read_bytes()


def test_a_remote_cluster_stays_and_dasks_config_too(secured):
    before = dask.config.get("distributed.comm.tls.ca-file")
    for _ in range(2):
        with remote(address=secured.address, security=secured.certificates(), n_workers=2, keep=False) as client:
            assert dispatch.run(client, "os.path:join", "a", "b") == ["a/b"] * 2
    assert dask.config.get("distributed.comm.tls.ca-file") == before


# -- what can be wrong -------------------------------------------------------------------------------------


WRONG: dict[str, tuple[Callable[[Secured], dict[str, object]], str]] = {
    "certificates of another authority": (
        lambda it: {
            "security": it.certificates(
                tls_client_cert=it.other.folder / "client.pem", tls_client_key=it.other.folder / "client.key"
            )
        },
        r"does not accept cluster\.security\.tls_client_cert=\S+/other/client\.pem .*its CA has signed",
    ),
    "another authority": (
        lambda it: {"security": it.certificates(tls_ca_file=it.other.ca)},
        r"is not signed by cluster\.security\.tls_ca_file=\S+/other/",
    ),
    "no such file": (
        lambda it: {"security": it.certificates(tls_client_cert="/nowhere/me.pem")},
        r"^cluster\.security\.tls_client_cert=/nowhere/me\.pem: there is no file that can be read: give cluster\.",
    ),
    "somebody else's key": (
        lambda it: {"security": it.certificates(tls_client_key=it.other.folder / "client.key")},
        r"tls_client_key=\S+/other/client\.key: not the certificate of an authority, .* its key.*MISMATCH",
    ),
    "a folder": (
        lambda it: {"security": it.certificates(tls_ca_file=it.other.folder)},
        r"^cluster\.security\.tls_ca_file=\S+: there is no file that can be read: give cluster\.",
    ),
    "something else": (
        lambda it: {"security": it.certificates(tls_client_cert=__file__)},
        r"tls_client_cert=\S+\.py, tls_client_key=\S+: not .*, a certificate and its key in PEM format, .*: \[SSL\]",
    ),
    "no certificates": (lambda it: {}, r"wants to see a certificate: give cluster\.security\.tls_ca_file="),
    "tcp": (
        lambda it: {"address": it.address.replace("tls://", "tcp://")},
        r"speaks TLS: give cluster\.address=tls://[\d.:]+ cluster\.security",
    ),
    "no such key": (
        lambda it: {"security": {"ca": "x.pem"}},
        r"Unknown parameters: \['ca'\].*give cluster\.security\.tls_ca_file=<file>",
    ),
    "no such host": (lambda it: {"address": "tcp://no-such-host.invalid:8786"}, "no host of this name"),
    "no port": (lambda it: {"address": "scheduler"}, "prints, tcp://<host>:<port>"),
    "no address": (lambda it: {"address": None}, "give cluster.address=tcp://<host>:8786"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_with_what_to_give(secured, what):
    given, said = WRONG[what]
    assert re.search(said, why_not(**{"address": secured.address, **given(secured)}))


def test_tls_where_the_scheduler_does_not_speak_it(secured, plain):
    where = address_in(plain).removeprefix("tcp://")
    said = why_not(address=f"tls://{where}", security=secured.certificates())
    assert f"does not speak TLS: give cluster.address=tcp://{where}" in said


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("ddp_hydra.cluster.kinds.local.CONNECT_S", 0.3)
    monkeypatch.setattr("ddp_hydra.cluster.connection.PROBE_S", 0.5)


def test_nobody_listens(impatient):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert f"cluster.address={address}: nobody listens there" in why_not(address=address)


def test_somebody_else_listens(impatient):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "what listens there is no Dask scheduler" in why_not(address=f"tcp://127.0.0.1:{port}")


def test_a_scheduler_may_come_up_meanwhile(warm_server, tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_hydra.cluster.kinds.local.CONNECT_S", 60.0)  # on a busy machine, too
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(why_not, address=f"tcp://127.0.0.1:{port}", wait_timeout_s=0.1)
        with dask_scheduler(tmp_path, "--port", port):
            assert waiting.result().startswith("0 of 1 workers came")


def test_a_scheduler_file_that_nobody_writes(tmp_path, impatient):
    said = why_not(scheduler_file=str(tmp_path / "s.json"))
    assert "`dask scheduler --scheduler-file` has not written it" in said
    (tmp_path / "s.json").write_text("{}")
    assert "has not written it" in why_not(scheduler_file=str(tmp_path / "s.json"))


def test_workers_that_do_not_come(plain):
    said = why_not(scheduler_file=str(plain), n_workers=2, wait_timeout_s=0.2)
    assert re.match(r"0 of 2 workers came in \d+ s: ", said)
    assert "cluster.n_workers=1, or cluster.wait_timeout_s=60" in said
