"""Runs many jobs: the implementation of our Hydra launcher, and of the sweeper `hydra/sweeper=pbt`.

Hydra imports every plugin when any app starts, so `launcher` and `pbt` import little.
"""
