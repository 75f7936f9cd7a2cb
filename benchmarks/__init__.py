"""Speed of ddp_hydra and of hand-written equivalents, measured in the same run."""
