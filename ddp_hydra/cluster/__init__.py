"""Connects to any Dask cluster, chosen by one key: `cluster=…`.

connect.py           opens the cluster of a job, waits for its workers, and closes it
connection.py        connects to a scheduler, or says why that fails
kinds/               one file for each kind of cluster; nothing else knows what it needs
ray/                 Dask's scheduler and workers as actors of Ray, for kinds/ray.py
preflight.py         checks what the workers have; worker_probe.py looks there
reservation.py       reserves workers for a gang; scheduler_plugin.py does it on the scheduler
idle_shutdown.py     ends a cluster whose client was killed
by_source.py         sends functions to machines that lack ddp_hydra
"""
