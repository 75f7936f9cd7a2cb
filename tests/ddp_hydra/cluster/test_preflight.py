from __future__ import annotations

import logging
import pickle
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ddp_hydra
from ddp_hydra.cluster import preflight, scheduler_plugin, worker_probe
from ddp_hydra.cluster.connection import BySource
from ddp_hydra.cluster.preflight import check_workers
from ddp_hydra.errors import ClusterError, ConfigError

HERE = platform.python_version()
TORCH = metadata.version("torch").partition("+")[0]


def there(python: str = HERE, ours: str | None = ddp_hydra.__version__, torch: str | None = TORCH, **more: Any) -> Any:
    versions = {"python": python, "ddp_hydra": ours, "torch": torch}
    return {"versions": versions, "missing": [], "interfaces": {}, "variables": {}, "host": "h", **more}


# -- functions that travel as text -------------------------------------------------------------------------


@pytest.mark.medium
def test_a_function_by_source_arrives_where_its_module_is_not_installed(tmp_path):
    data = pickle.dumps([BySource(scheduler_plugin.choose), BySource(scheduler_plugin.natural)])
    (tmp_path / "data").write_bytes(data)
    script = (
        "import pathlib, pickle, sys\n"
        "sys.modules['ddp_hydra'] = None\n"
        "choose, natural = pickle.loads(pathlib.Path('data').read_bytes())\n"
        "assert choose.__globals__ is natural.__globals__\n"
        "print(choose({'b:1': 'b', 'a:1': 'a', 'a:2': 'a'}, 2), natural('a10'))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{'a:1': 'a', 'a:2': 'a'} ['a', 10, '']\n", "")


@pytest.mark.parametrize("module", [scheduler_plugin, worker_probe])
def test_modules_that_travel_know_none_of_ours(module):
    text = Path(module.__file__).read_text()
    assert "import ddp_hydra" not in text
    assert "from ddp_hydra" not in text


# -- what is compared --------------------------------------------------------------------------------------


def test_how_torch_was_built_and_the_last_part_of_pythons_version_do_not_matter(caplog):
    major, minor, _ = HERE.split(".")
    preflight.check(
        {"a": there(torch=f"{TORCH}+cpu"), "b": there(torch=f"{TORCH}+cu130", python=f"{major}.{minor}.99")}
    )
    preflight.check({})
    assert caplog.records == []


def test_workers_are_named_by_what_they_have_with_what_to_type():
    found = {f"tcp://a:{number}": there() for number in range(6)} | {"tcp://b:1": there(ours=None, torch=None)}
    with pytest.raises(ClusterError) as caught:
        preflight.check(found)
    assert str(caught.value) == (
        "the workers do not fit together with this job:\n"
        f"  tcp://b:1: Python {HERE}, no ddp_hydra, no torch\n"
        "  tcp://a:0, tcp://a:1, tcp://a:2, tcp://a:3 and 2 more: "
        f"Python {HERE}, ddp_hydra {ddp_hydra.__version__}, torch {TORCH}\n"
        "it needs\n"
        f"  ddp_hydra {ddp_hydra.__version__}, as here: pip install ddp-hydra=={ddp_hydra.__version__}\n"
        f"  torch, the same everywhere: pip install torch=={TORCH}"
    )


@pytest.mark.parametrize(
    ("other", "needed"),
    [
        ({"python": "3.9.1"}, r"Python 3\.\d+, as here"),
        ({"ours": "0.0.1"}, "ddp_hydra .*, as here"),
        ({"torch": "1.13.0"}, "torch, the same everywhere: pip install torch=="),
    ],
)
def test_another_version_is_refused(other, needed):
    with pytest.raises(ClusterError, match=needed) as caught:
        preflight.check({"a": there(), "b": there(**other)})
    assert str(caught.value).count("\n  ") == 3


def test_another_torch_here_than_on_the_workers_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        preflight.check({"a": there(torch="1.13.0+cpu"), "b": there(torch="1.13.0")})
    assert [record.message for record in caplog.records] == [
        f"torch is 1.13.0 on the workers, which train, and {TORCH} here"
    ]


# -- cluster.pip -------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package, with extras."""

    def install(name: str, version: str, *lines: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""])
        )

    monkeypatch.syspath_prepend(tmp_path)
    return install


@pytest.mark.parametrize(
    ("requirement", "missing"),
    [
        ("some-pkg", []),
        ("Some_Pkg>=1.2,<2", []),
        ("some-pkg>=2", [["some-pkg>=2", "1.5rc1 is installed"]]),
        ("other-pkg>=1", [["other-pkg>=1", "not installed"]]),
        ("other-pkg; python_version<'3'", []),
        ("other-pkg; python_version>'3'", [["other-pkg", "not installed"]]),
        ("some-pkg[fast]", [["other-pkg>=3", "not installed"]]),
        ("some-pkg[Old]", []),
        ("some-pkg[all]", [["other-pkg>=3", "not installed"]]),
        ("some-pkg[nothing]", [["some-pkg[nothing]", "1.5rc1 has no extra nothing"]]),
    ],
)
def test_requirements_with_versions_extras_and_markers(package, requirement, missing):
    package(
        "some-pkg", "1.5rc1", "Provides-Extra: fast", "Provides-Extra: old", "Provides-Extra: all",
        'Requires-Dist: other-pkg>=3; extra == "fast"',
        'Requires-Dist: other-pkg>=3; python_version < "3" and extra == "old"',
        'Requires-Dist: some-pkg[fast,all]; extra == "all"',
        "Requires-Dist: never-looked-at",
    )  # fmt: skip
    assert worker_probe.missing(requirement) == missing


def test_what_is_missing_is_said_by_worker_with_what_to_type():
    lack = ["timm>=1.0", "not installed"]
    found = {
        "tcp://a:1": there(missing=[lack]),
        "tcp://a:2": there(missing=[["scikit-learn>=2", "1.5 is installed"], lack]),
        "tcp://a:3": there(missing=[lack]),
        "tcp://a:4": there(),
    }
    with pytest.raises(ClusterError) as caught:
        preflight.check_packages(found)
    assert str(caught.value) == (
        "cluster.pip asks for what some workers lack:\n"
        "  tcp://a:2: scikit-learn>=2 (1.5 is installed), timm>=1.0 (not installed)\n"
        "  tcp://a:1, tcp://a:3: timm>=1.0 (not installed)\n"
        "type there: pip install 'timm>=1.0' 'scikit-learn>=2'"
    )


def test_what_is_no_requirement_is_refused_at_once():
    fine = ["timm>=1.0", "a[b]; python_version>'3'"]
    assert preflight.check_requirements(fine) == fine
    assert preflight.check_requirements("timm") == ["timm"]
    with pytest.raises(ConfigError, match=r"cluster.pip names 'timm>>1'.*give \['timm>=1.0'\]"):
        preflight.check_requirements(["timm>>1"])


# -- the network -------------------------------------------------------------------------------------------


def test_hosts_without_the_interface_are_named_with_those_they_have():
    found = {
        "tcp://a:1": there(interfaces={"eth1": ["10.0.0.1"]}),
        "tcp://b:1": there(interfaces={"eth1": [], "eth0": ["10.0.0.2", "fd00::2"], "lo": ["127.0.0.1"]}),
    }
    with pytest.raises(ClusterError) as caught:
        preflight.check_network(found, "eth1")
    assert (
        "hosts, or has no address:\n  tcp://b:1: host h has eth0 (10.0.0.2, fd00::2), lo (127.0.0.1)\ngive one"
        in str(caught.value)
    )
    preflight.check_network(found, None)


def test_other_choices_in_the_environment_of_the_workers_are_told(caplog):
    found = {
        "tcp://a:1": there(interfaces={"eth1": ["10.0.0.1"]}, variables={"GLOO_SOCKET_IFNAME": "eth1"}),
        "tcp://b:1": there(interfaces={"eth1": ["10.0.0.2"]}),
    }
    with caplog.at_level(logging.WARNING):
        preflight.check_network({"tcp://a:1": found["tcp://a:1"]}, "eth1")
        assert caplog.records == []
        preflight.check_network(found, "eth1")
    (record,) = caplog.records
    assert record.message.startswith("GLOO_SOCKET_IFNAME of the workers")
    assert "  tcp://a:1: eth1\n  tcp://b:1: not set" in record.message


@pytest.mark.integration
def test_asking_for_requirements_brings_no_dask_in():
    """Which sets up its loggers when it is imported, and takes as long as torch takes to be there."""
    look = "import sys; from ddp_hydra.job import run; "
    look += "from ddp_hydra.cluster import preflight; preflight.check_requirements(['a>=1']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert "distributed" not in done.stdout.split()


# -- once for all gangs of a client that need the same -------------------------------------------------------


@pytest.fixture
def probed(monkeypatch) -> list[list[str]]:
    """The workers that were looked at, call by call."""
    calls: list[list[str]] = []

    def probe(client: Any, workers: list[str], *_: Any) -> dict[str, Any]:
        calls.append(workers)
        return dict.fromkeys(workers)

    monkeypatch.setattr(preflight, "probe", probe)
    for name in ("check", "check_packages", "check_network"):
        monkeypatch.setattr(preflight, name, lambda *_: None)
    return calls


def test_a_worker_is_looked_at_once_for_each_need(probed):
    client: Any = SimpleNamespace()
    check_workers(client, ["a", "b"], [], None)
    check_workers(client, ["b", "c"], [], None)
    check_workers(client, ["a"], ["timm"], None)
    check_workers(client, ["a"], [], "eth1")
    other: Any = SimpleNamespace()
    check_workers(other, ["a"], [], None)
    assert probed == [["a", "b"], ["c"], ["a"], ["a"], ["a"]]


def test_a_worker_that_lacks_something_is_looked_at_again(probed, monkeypatch):
    def refuse(found: Any) -> None:
        raise ClusterError("no torch")

    client: Any = SimpleNamespace()
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "check", refuse)
        with pytest.raises(ClusterError):
            check_workers(client, ["a"], [], None)
    check_workers(client, ["a"], [], None)
    assert probed == [["a"], ["a"]]


def test_a_new_worker_has_to_fit_together_with_those_looked_at_before(probed, monkeypatch):
    client: Any = SimpleNamespace()
    check_workers(client, ["a", "b", "gone"], [], None)
    together: list[list[str]] = []
    monkeypatch.setattr(preflight, "check", lambda found: together.append(sorted(found)))
    check_workers(client, ["a", "b", "c"], [], None)
    check_workers(client, ["a", "c"], [], None)
    assert together == [["a", "b", "c"]]
