"""Runs on the worker's host: starts, watches and ends the processes of ranks.

task            the Dask task that runs a worker's ranks
rank_process    one of them: has its process started, watches it, says how it ended
record_relay    passes the ranks' records and output on to the client
process         the rank itself: joins the process group (process_group) and calls the function
fork_server     imports torch once; each rank is a fork of it
spare_forks     its connections, and forks that wait for the next ranks
fork_client     finds the host's fork server, or starts it
inbox           messages of the client to a worker's task, and of a worker that is shut down
outbox          files on their way from ranks to the client; checkpoints that stay, for ranks that resume there
device_leases   shares the GPUs and cores of a host between gangs
fault_injection faults on purpose
environment     of this host, with its GPUs and network; processes: what a rank leaves behind
dask_preload    loaded by workers of a local cluster: they do not react to Ctrl-C
torchrun        the processes that torchrun starts, and their end; torchrun_store: their way between hosts
spec            data that goes to the rank and comes back
"""
