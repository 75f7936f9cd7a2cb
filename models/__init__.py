"""Models: plain PyTorch modules that know nothing of ddp_hydra; a config names them by `_target_`."""
