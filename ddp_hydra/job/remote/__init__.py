"""Runs a job whose results go to shared storage: `results.handler=cluster results.root=s3://…`.

The job runs in a driver, a process on the host of a worker. It does what the command does otherwise: it reserves
workers, watches the gang and writes the results into a temporary folder, which is uploaded to the store.

    client        the command's part: start a driver and show its progress, or leave it alone (detach=true)
    start_driver  what the command sends to the driver; start the driver's process, on a worker
    driver        the driver's process: run the job
    messages      what the driver sends to the command: records, log lines, the end
    status        status.json in the store: where a run is, for commands that can reach only the store
    attached      show a run from its store alone
    uploader      upload the driver's folder, and look in the store for a request to stop
    fence         let only one driver at a time write to a run's folder in the store
    supervisor    on the scheduler: start another driver when one is lost
    scratch       the driver's temporary folder

Nothing here imports torch.
"""
