from ddp_hydra.api import Run as Run
from ddp_hydra.api import connect as connect
from ddp_hydra.api import run as run

__version__: str
