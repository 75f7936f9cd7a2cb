from ddp_hydra.api.connection import connect as connect
from ddp_hydra.api.run import Run as Run
from ddp_hydra.api.run import run as run

__version__: str
