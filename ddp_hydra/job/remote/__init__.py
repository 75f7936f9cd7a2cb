"""Runs a job whose results go to shared storage: `results.handler=cluster results.root=s3://…`.

The job runs in a driver, a process on the host of a worker. It does what the command does otherwise: it reserves
workers, watches the gang and writes the results into a temporary folder, which is uploaded to the store.

    client        the command's part: start a driver and show its progress, or leave it alone (detach=true);
                  attach: show a run from its store alone
    start_driver  start the driver's process, on a worker, and another if it is lost (the guard, a Dask task); what
                  the command and the driver tell each other
    driver        the driver's process: run the job in a temporary folder
    status        status.json in the store, and the fence: one driver at a time writes to a run's folder
    uploader      upload the driver's folder, and look in the store for a request to stop

Nothing here imports torch.
"""
