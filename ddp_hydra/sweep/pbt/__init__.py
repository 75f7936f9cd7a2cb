"""Population-based training (Jaderberg et al., 2017), `hydra/sweeper=pbt`: repeatable from its seed."""
