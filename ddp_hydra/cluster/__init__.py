"""Connects to any Dask cluster, chosen by one key: `cluster=…`.

connect.py           opens the cluster of a job, waits for its workers, and closes it
connection.py        connects to a scheduler, or says why that fails; sends it functions by their source
kinds/               what one kind of cluster needs; nothing else knows
preflight.py         checks what the workers have; worker_probe.py looks there
reservation.py       reserves workers for a gang; scheduler_plugin.py does it on the scheduler
"""
