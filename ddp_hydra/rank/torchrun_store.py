"""Passes lines from RANK 0 to the other hosts through torchrun's store: `python -m ddp_hydra.rank.torchrun_store`.

For RANK 0 it reads them from stdin, for other ranks it writes them to stdout. It is a process, because it imports
torch. Where no agent of torchrun serves the store, it does so for RANK 0.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
import threading
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from ddp_hydra.rank.processes import die_with_parent

MEET = timedelta(minutes=30)
"""How long the store may take to be there."""
END = timedelta(seconds=5)
"""How long the other hosts may take to read the last line: the store may end with this one."""
LATE = timedelta(seconds=15)
"""The same where RANK 0 ends at its start, because the numbers of processes don't fit together."""


def main() -> None:
    die_with_parent(os.getppid())
    rank, local = int(os.environ["RANK"]), os.environ["LOCAL_WORLD_SIZE"]
    hosts, left = divmod(int(os.environ["WORLD_SIZE"]), int(local))
    if rank:
        read(connect(), local)
        return
    store, session = connect(serves=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"), secrets.token_hex(8)
    threading.Thread(target=answer, args=(connect(), f"{session} {local}"), daemon=True).start()
    for number, line in enumerate(sys.stdin):
        store.set(f"{session}/{number}", line)
    with contextlib.suppress(RuntimeError):  # of torch: a host is gone
        store.wait([f"{session}/heard/{number}" for number in range(1, hosts + bool(left))], LATE if left else END)
    os._exit(0)


def connect(serves: bool = False) -> Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("ddp_hydra", TCPStore(address, port, None, serves, timeout=MEET, wait_for_workers=False))


def answer(store: Store, session: str) -> None:
    """Tell each host which lines are this process's, and how many processes its host has.

    torchrun's store outlives its restarts, which hosts count differently. Only a process that lives can answer.
    """
    with contextlib.suppress(RuntimeError):
        for number in itertools.count(1):
            store.set(f"session/{wait_for(store, f'hello/{number}')}", session)


def read(store: Store, local: str) -> None:
    own = secrets.token_hex(8)
    store.set(f"hello/{store.add('hellos', 1)}", own)
    session, _, of_first = wait_for(store, f"session/{own}").partition(" ")
    if of_first != local:
        sys.stdout.write('{"exit": 1}\n')
        sys.stdout.flush()
        say_heard(store, session)
        sys.exit(
            f"ddp_hydra: RANK {os.environ['RANK']} has LOCAL_WORLD_SIZE={local}, and RANK 0 has {of_first}: each host "
            "needs equally many processes"
        )
    for number in itertools.count():
        line = wait_for(store, f"{session}/{number}")
        sys.stdout.write(line)
        sys.stdout.flush()
        if '"exit"' in line:
            say_heard(store, session)
            return


def say_heard(store: Store, session: str) -> None:
    store.set(f"{session}/heard/{store.add(f'{session}/hosts', 1)}", "")


def wait_for(store: Store, key: str) -> str:
    store.wait([key], timedelta(days=365))
    return str(store.get(key).decode())


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:  # of torch: the store is gone, or never came
        sys.exit(f"ddp_hydra: torchrun's store: {str(error).partition(chr(10))[0]}")
