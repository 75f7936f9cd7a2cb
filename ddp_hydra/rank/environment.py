"""Computes the environment variables and the cores of a rank and of its fork server, and which ranks share a server.

Network interfaces are looked up here, too, and the socket is bound on which the ranks meet. GPUs have names that mean
the same to all programs of this host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import ddp_hydra
from ddp_hydra.errors import ClusterError, ConfigError
from ddp_hydra.rank.processes import RANK_PID
from ddp_hydra.rank.spec import JobSpec, RankSpec
from ddp_hydra.storage.retry import Backoff

THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""The variables of torch's number of threads, the one that wins first. OpenMP takes "4,2" for nested regions."""
PORT_S = 5.0
"""How long a port of `dispatch.port_range` may still be held by a rank or a job that ends, in seconds."""


def search_place(entry: str) -> str:
    """Return an entry of sys.path as another working folder needs it.

    What is no path stays: an editable install of a namespace package has an entry that only its own hook knows.
    """
    return str(Path(entry).absolute()) if not entry or Path(entry).exists() else entry


def of_rank(
    job: JobSpec, spec: RankSpec, interface: str | None = None, error_file: str = "", gpu: int | None = None
) -> dict[str, str]:
    """Return the environment of a rank: the worker's, plus the variables that torchrun sets.

    Args:
        interface: by which the ranks reach each other.
        error_file: where torch's `record` writes the error of a script.
        gpu: position of the rank's GPU among the visible ones; None where there are none.
    """
    variables = without_dasks_limits(os.environ) | of_job(job.settings.variables) | of_place(spec)
    variables |= {
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": job.gang,
        "TORCHELASTIC_RESTART_COUNT": str(job.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.settings.max_restarts),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if interface:
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        variables.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without =, eth1 would also mean eth10
    own = spec.local_rank if gpu is None else gpu
    # A script takes the GPU of its local rank.
    return variables | own_gpu_first(variables, own if job.makes_group else own - spec.local_rank)


def of_job(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job is given, without GPUs: a worker has these from its cluster."""
    return {name: value for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"}


def of_place(spec: RankSpec) -> dict[str, str]:
    """Return the variables that a rank's place in its world decides."""
    return {
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(spec.local_rank),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "NODE_RANK": str(spec.node_rank),
        "GROUP_RANK": str(spec.node_rank),
        "GROUP_WORLD_SIZE": str(spec.nodes),
        "ROLE_RANK": str(spec.rank),
        "ROLE_WORLD_SIZE": str(spec.world_size),
    }


def is_placed() -> bool:
    """Return whether dask-cuda runs this worker: it puts each worker's own GPU first."""
    return "dask_cuda" in sys.modules


def seen_gpus() -> list[str]:
    """Return the GPUs that this worker's ranks can share among them; [] if each worker has its own already."""
    return [] if is_placed() else gpu_identities(os.environ)


def threads(total: int, ranks: int) -> int:
    """Return a rank's number of threads: its share of the host's cores, within those that its worker is bound to."""
    return max(1, min(len(cores()) or total, total // ranks))


def threads_of_job(variables: Mapping[str, str]) -> int:
    """Return the number of threads that the variables of a job ask for, as torch reads them; 0 without any."""
    given = (re.match(r"\s*0*([1-9]\d{0,3})\s*(,|$)", variables.get(name, "")) for name in THREADS)
    return next((int(found[1]) for found in given if found), 0)


def shared_cores(nanny: int | None) -> list[int]:
    """Return the cores that the ranks of this host share: dask-cuda binds a worker to some, but not its nanny."""
    found = set(cores())
    if nanny and found:
        with contextlib.suppress(OSError):
            found |= os.sched_getaffinity(nanny)
    return sorted(found)


def cores() -> list[int]:
    """Return the cores that this worker is bound to; [] on systems without such bindings.

    dask-cuda binds a worker to the cores near its GPU. It does so after the start, so only the main thread is bound.
    """
    return sorted(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else []


def own_gpu_first(variables: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the variable with which each local rank sees its own GPU first; a negative number undoes it."""
    if not (seen := visible_gpus(variables)):
        return {}
    first = local_rank % len(seen)
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[first:] + seen[:first])}


# -- which ranks may share a fork server: a fork has the modules, variables, limits, cgroup and namespaces of its server

DASKS_LIMITS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "PYTHONHASHSEED": "6640",
}
"""Variables that Dask's nanny sets for its workers. Most would slow a rank down: each rank has its own number of
threads, and allocates its large buffers again and again."""
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(256 * 2**20), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
"""Variables with which glibc keeps the buffers that each step frees, instead of asking the kernel for them again. glibc
reads them when a process starts, so they are set for the server. Setting only one of the two would switch off its own
adaptation."""
BATCH_JOB = (
    "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX", "JOB_ID", "SGE_TASK_ID", "OAR_JOB_ID", "FLUX_JOB_ID",
)  # fmt: skip
"""Variables in which SLURM, PBS, LSF, Grid Engine, OAR and Flux name the batch job of a process."""
READ_AT_IMPORT = (
    "LD_", "PYTHON", "LANG", "LC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "CUDA_", "TORCH",
    "PYTORCH_", "NPY_", "NUMPY_", "PILLOW_", "KINETO_",
)  # fmt: skip
"""Beginnings of the variables that Python, glibc, numpy, Pillow and torch read while they start, so that a rank comes
too late to set them."""
READ_LATER = (
    "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHINDUCTOR_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",
)  # fmt: skip
"""Exceptions: a rank reads its own. torch and scikit-learn set the last three when they are imported."""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user")


def of_server() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name != RANK_PID}  # of a thread that is a rank
    return with_package(ALLOCATOR | without_dasks_limits(variables))


def with_package(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that runs a module of this package."""
    path = [str(Path(ddp_hydra.__file__).parents[1]), *_python_path(variables)]
    return {**variables, "PYTHONPATH": os.pathsep.join(path)}


def without_dasks_limits(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if DASKS_LIMITS.get(name) != value}


def identity() -> str:
    """Return the name of the server for this process: the same for all that may share one."""
    parts = [sys.executable, sys.prefix, *_versions(), *_import_time_variables(), *batch_job(), *_confinement()]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


@functools.cache
def _versions() -> list[str]:
    """Return the versions of the code that a server loads. They are read once: later edits do not change the server."""
    found = [f"{path} {size} {mtime_ns}" for folder in ddp_hydra.__path__ for path, size, mtime_ns in _sources(folder)]
    for name in ("torch", "distributed"):
        found.append(f"{name} {importlib.metadata.version(name)}")
        if (spec := importlib.util.find_spec(name)) is not None and spec.origin:
            found.append(f"{spec.origin} {Path(spec.origin).stat().st_mtime_ns}")
    return found


def _sources(folder: str) -> Iterator[tuple[str, int, int]]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry.path)
        elif entry.name.endswith(".py"):
            status = entry.stat()
            yield entry.path, status.st_size, status.st_mtime_ns


def _python_path(variables: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH, absolute, because the server runs in another folder."""
    return [str(Path(entry).absolute()) for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _import_time_variables() -> list[str]:
    """Return variables that matter when torch is imported, so that they cannot be set per rank later."""
    variables = without_dasks_limits(os.environ)
    found = {
        name: value
        for name, value in variables.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith(READ_LATER) and name not in ALLOCATOR
    }
    return [f"{name}={found[name]}" for name in sorted(found.keys() - {"PYTHONPATH"})] + _python_path(variables)


def batch_job() -> list[str]:
    """Return the batch job of this process, [] outside of one: its ranks belong to that job, and end with it."""
    return [f"{name}={os.environ[name]}" for name in BATCH_JOB if name in os.environ]


def _confinement() -> list[str]:
    """Return what a fork always has from its server: user and groups, limits, cgroup and namespaces."""
    found = [f"{os.getuid()} {os.getgid()} {sorted(os.getgroups())} {os.nice(0)}"]
    for name in sorted(name for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_CORE"):
        found.append(f"{name} {resource.getrlimit(getattr(resource, name))}")
    with contextlib.suppress(OSError):  # not on this system
        status = Path("/proc/self/status").read_text()
        found += [line for line in status.splitlines() if line.startswith(("Umask:", "CapEff:", "NoNewPrivs:"))]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/self/cgroup").read_text())
    for name in NAMESPACES:  # two containers may have cgroups of the same name
        with contextlib.suppress(OSError):
            found.append(str(Path("/proc/self/ns", name).readlink()))
    return found


UUID_BYTES = 96


def visible_gpus(variables: Mapping[str, str]) -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in variables:
        names = [gpu.strip() for gpu in variables["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()]
        return list(itertools.takewhile(lambda name: not name.startswith("-"), names))  # as CUDA does
    return [str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def gpu_identities(variables: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the visible GPUs; their names if the driver tells no UUIDs."""
    names = visible_gpus(variables)
    known = gpu_uuids() if names else []
    return [_uuid(name, known) for name in names]


def _uuid(name: str, known: list[str]) -> str:
    if name.isdigit():
        return known[int(name)] if int(name) < len(known) else name
    return next((uuid for uuid in known if uuid.startswith(name)), name)  # CUDA, too, takes the beginning of a UUID


@functools.cache
def gpu_uuids() -> list[str]:
    """Return the UUID of each GPU; its number where the driver does not tell it. No torch is imported."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # NVIDIA's management library
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        gpus = ctypes.c_uint(0)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(gpus))
        return [_uuid_of(nvml, number) for number in range(gpus.value)]
    finally:
        nvml.nvmlShutdown()


def _uuid_of(nvml: ctypes.CDLL, number: int) -> str:
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
    is_known = nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0
    return text.value.decode() if is_known and nvml.nvmlDeviceGetUUID(handle, text, UUID_BYTES) == 0 else str(number)


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface, IPv4 first, as gloo prefers; without link-local ones."""
    import psutil  # the command begins with a look at this host, and needs none of it

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [
            entry.address.partition("%")[0]
            for family in families
            for entry in addresses
            if entry.family == family and not entry.address.startswith("fe80:")
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }


def address_of(interface: str) -> str:
    found = interfaces()
    if not found.get(interface):
        raise ClusterError(f"dispatch.interface={interface}: host {socket.gethostname()} has {describe(found)}")
    return found[interface][0]


def describe(interfaces: dict[str, list[str]]) -> str:
    """Return a text such as "eth0 (10.0.0.1), lo (127.0.0.1)"."""
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in sorted(interfaces.items()) if addresses)


def interface_of(host: str) -> str | None:
    """Return the interface that has an address; None if no interface of this machine has it."""
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError:
        return None
    return next((name for name, addresses in interfaces().items() if address in addresses), None)


def interface_towards(address: str) -> str | None:
    """Return the interface through which this machine reaches a server; None if it does not."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as datagrams:
            datagrams.connect(target)  # sends nothing
            return interface_of(datagrams.getsockname()[0])
    except (OSError, ValueError):
        return None


def bind(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Listen for the ranks that meet here, on this host's own address only; rank 0 takes the socket over.

    It is bound before rank 0 exists, so that no rank has to retry.

    An address that this machine does not have (a container's mapped ports, a cloud's public address) leads here from
    outside. Only then the socket listens on all interfaces.

    Args:
        host: the address under which the other ranks reach this host.
        ports: first and last port allowed; None lets the system choose.
    """
    first, last = ports or (0, 0)
    family, _, _, _, (address, *_) = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    reason: OSError | None = None
    pauses = Backoff(PORT_S if ports else 0.0)
    while reason is None or pauses.wait():
        for port, own in itertools.product(range(first, last + 1), (str(address), "")):
            if not own and reason is not None and reason.errno != errno.EADDRNOTAVAIL:
                continue
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((own, port))
                listener.listen(4096)
            except OSError as error:
                listener.close()
                reason = error
            else:
                return listener
    chosen = "chosen by the system" if not first else f"{first} to {last}" if last > first else str(first)
    kind = ConfigError if ports else ClusterError  # without a range, another try may find a port
    raise kind(f"rank 0 can't listen on {host}, port {chosen}: {reason}; free it, or widen dispatch.port_range")
