"""The fork server of the tests: it has also imported what only some jobs need, so that each of their ranks has it."""

from __future__ import annotations

import sys

from ddp_hydra.rank import fork_preload, fork_server

MORE = ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")

if __name__ == "__main__":
    fork_preload.PRELOAD += MORE
    fork_server.MODULE = "tests.support.fork_server"
    fork_server.main(int(sys.argv[1]), sys.argv[2])
