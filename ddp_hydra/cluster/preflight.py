"""Checks, before any rank starts, that all workers have what a job needs."""

from __future__ import annotations

import logging
import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ddp_hydra
from ddp_hydra.cluster import worker_probe
from ddp_hydra.cluster.connection import BySource
from ddp_hydra.errors import ClusterError, ConfigError
from ddp_hydra.rank import environment

if TYPE_CHECKING:
    from distributed import Client

log = logging.getLogger(__name__)
PACKAGES = ["ddp_hydra", "torch", "distributed", "cloudpickle"]
ANSWER_S = 10.0
"""Seconds that the workers may take to answer. One that does not answer is not checked; its rank may fail later."""
MAX_NAMED = 4
"""Workers that a message names; the rest are counted."""
Probes = Mapping[str, Mapping[str, Any]]
"""Worker address -> result of `worker_probe.probe` there."""


def check_requirements(texts: Iterable[Any]) -> list[str]:
    from packaging.requirements import InvalidRequirement, Requirement

    texts = [texts] if isinstance(texts, str) else texts
    for text in texts:
        try:
            Requirement(str(text))
        except InvalidRequirement as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"cluster.pip names {text!r}, which is no requirement ({reason}): give ['timm>=1.0']"
            ) from None
    return list(map(str, texts))


def probe(client: Client, workers: Iterable[str], requirements: Sequence[str] = ()) -> Probes:
    workers = list(workers)
    if not workers:  # Dask would take an empty list for all workers
        return {}
    run = {"workers": workers, "on_error": "return", "callback_timeout": ANSWER_S}
    try:
        answers = client.sync(client._run, BySource(worker_probe.probe), PACKAGES, list(requirements), **run)
    except (OSError, TimeoutError):
        return {}
    lost = {address: answer for address, answer in answers.items() if isinstance(answer, BaseException)}
    for address, error in lost.items():
        log.debug("worker %s could not be probed: %r", address, error)
    from ddp_hydra.cluster.scheduler_plugin import natural

    return {address: answers[address] for address in sorted(answers, key=natural) if address not in lost}


def check_workers(client: Client, workers: Collection[str], requirements: Sequence[str], interface: str | None) -> None:
    """Check that the workers of a gang have what its ranks need. Each is probed once for all gangs of a client."""
    of_client: dict[object, dict[str, Any]] = vars(client).setdefault("_ddp_hydra_probes", {})
    good = of_client.setdefault((tuple(requirements), interface), {})
    if found := probe(client, [address for address in workers if address not in good], requirements):
        # They have to fit together with those that were looked at before.
        together = {address: there for address, there in (good | dict(found)).items() if address in workers}
        check(together)
        check_packages(together)
        check_network(together, interface)
        good.update(found)


def check(found: Probes) -> None:
    versions = {address: there["versions"] for address, there in found.items()}
    here = {"python": _minor(platform.python_version()), "ddp_hydra": ddp_hydra.__version__}
    torch = {_public(version["torch"]) for version in versions.values() if version["torch"]}
    wrong = []
    if any(_minor(version["python"]) != here["python"] for version in versions.values()):
        wrong.append(f"Python {here['python']}, as here: start the workers from an environment with that version")
    if any(version["ddp_hydra"] != here["ddp_hydra"] for version in versions.values()):
        wrong.append(f"ddp_hydra {here['ddp_hydra']}, as here: pip install ddp-hydra=={here['ddp_hydra']}")
    if len(torch) > 1 or any(version["torch"] is None for version in versions.values()):
        from ddp_hydra.cluster.scheduler_plugin import natural

        newest = max(torch, key=natural, default=worker_probe.version("torch"))
        wrong.append(f"torch, the same everywhere: pip install torch{f'=={_public(newest)}' if newest else ''}")
    if wrong:
        texts = {
            address: ", ".join(
                f"{name.replace('python', 'Python')} {there}" if there else f"no {name}"
                for name, there in version.items()
            )
            for address, version in versions.items()
        }
        needs = ["it needs", *(f"  {need}" for need in wrong)]
        raise _refused("the workers do not fit together with this job:", texts, *needs)
    mine = worker_probe.version("torch")
    if torch and mine and _public(mine) not in torch:
        log.warning("torch is %s on the workers, which train, and %s here", torch.pop(), _public(mine))


def check_packages(found: Probes) -> None:
    lacking = {address: there["missing"] for address, there in found.items() if there["missing"]}
    if lacking:
        texts = {
            address: ", ".join(f"{need} ({there})" for need, there in missing) for address, missing in lacking.items()
        }
        needs = dict.fromkeys(need for missing in lacking.values() for need, _ in missing)
        install = " ".join(["type there: pip install", *(f"'{need}'" for need in needs)])
        raise _refused("cluster.pip asks for what some workers lack:", texts, install)


def check_network(found: Probes, interface: str | None) -> None:
    without = {address: there for address, there in found.items() if not there["interfaces"].get(interface)}
    if interface and without:
        texts = {
            address: f"host {there['host']} has {environment.describe(there['interfaces'])}"
            for address, there in without.items()
        }
        advice = "give one that all have; or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in each worker's environment"
        raise _refused(f"dispatch.interface={interface} is not there on all hosts, or has no address:", texts, advice)
    for name in worker_probe.VARIABLES:
        values = {there["variables"].get(name) for there in found.values()}
        if len(values) > 1 or (interface and values - {None, interface, f"={interface}"}):
            texts = {address: there["variables"].get(name, "not set") for address, there in found.items()}
            log.warning("%s of the workers overrides dispatch.interface:\n%s", name, "\n".join(_grouped(texts)))


def _refused(title: str, texts: Mapping[str, str], *advice: str) -> ClusterError:
    return ClusterError("\n".join([title, *_grouped(texts), *advice]))


def _grouped(texts: Mapping[str, str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for address, text in texts.items():
        groups.setdefault(text, []).append(address)
    lines = []
    for text, addresses in sorted(groups.items(), key=lambda group: len(group[1])):
        more = f" and {len(addresses) - MAX_NAMED} more" if len(addresses) > MAX_NAMED else ""
        lines.append(f"  {', '.join(addresses[:MAX_NAMED])}{more}: {text}")
    return lines


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _public(version: str) -> str:
    """Remove the build from a version: 2.15.0+cu130 becomes 2.15.0."""
    return version.partition("+")[0]
