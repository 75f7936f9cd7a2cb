from ddp_hydra.api import Run as Run
from ddp_hydra.api import connect as connect
from ddp_hydra.api import run as run
from ddp_hydra.results import log_mean

__version__: str
log = log_mean
