"""Results on shared storage: `results.handler=cluster results.root=s3://…`.

A job is run by a driver, a process on the host of a worker, which does there what the client does otherwise: it
reserves workers, watches the gang, and writes the results, into a folder of its own. From there they go to the store.

    order      what a driver is told to do
    start      starts a driver; runs on a worker
    client     the command's part: has a driver started, and shows what it says; or leaves it alone
    voice      what a driver says to the command: records, lines of its log, the end
    status     status.json in the store: where a run is, for those who have nothing but the store
    uploader   brings the files of a folder to the store, and hears from there that the run shall end
    keeper     on the scheduler: has a driver that was lost followed by another
    scratch    the driver's folder, which does not stay behind

`driver.py` is the process itself, `attach.py` shows a run from the store alone. No torch here.
"""
