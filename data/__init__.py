"""Data sets: plain PyTorch datasets that know nothing of ddp_hydra; a config names them by `_target_`."""
