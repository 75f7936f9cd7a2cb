"""Speed of ddp_hydra beside hand-written equivalents, measured in the same run."""
