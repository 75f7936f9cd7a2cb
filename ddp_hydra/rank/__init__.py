"""Runs on the worker's host: starts, watches and ends the processes of ranks.

task            the Dask task that runs a worker's ranks
rank_process    watches one of them: starts its process, says how it ended
launcher        has the fork server start the process
record_relay    passes the ranks' records and output on to the client
process         the rank itself: joins the process group (process_group) and calls the function
fork_server     imports torch once (fork_preload); each rank is a fork of it (forked_rank)
fork_caller     one connection to it
spare_forks     forks that wait for the next ranks
fork_client     finds the host's fork server, or starts it
fork_environment, fork_idle     who may share it, how long it stays
inbox           messages of the client to a worker's task
outbox          files on their way from ranks to the client; checkpoints that stay, for ranks that resume there
preemption      lets ranks finish when their worker is shut down
device_leases   shares the GPUs and cores of a host between gangs
fault_injection faults on purpose
environment network gpus processes               of this host; processes that a rank leaves behind
garbage         Python's search for garbage, while modules are imported
lazy_dynamo     imports torch's compiler only when something is compiled
dask_preload    loaded by workers of a local cluster: they do not react to Ctrl-C
rows            rows of predictions on their way to the client
torchrun_*      ranks that torchrun starts: how they meet, their tasks, their messages
spec return_values                    data that goes to the rank and comes back
"""
