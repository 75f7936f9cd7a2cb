"""The same as the command, from Python and from notebooks: `ddp_hydra.run`, `ddp_hydra.connect`, `ddp_hydra.Run`."""
