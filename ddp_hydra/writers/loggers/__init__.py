"""Sends a job's records to tracking services: MLflow, W&B, Aim, ClearML, or a writer of one's own.

    base       what a logger for a service has to define
    process    gives each record to the logger, and repeats what a service did not take
    services   MLflow, W&B, Aim, ClearML, imported only in the logger's process

`job/loggers.py` starts a process for each logger. These libraries take up to 9 s of CPU and 230 MiB to import, register
six exit handlers or more, start threads and processes, and set `sys.excepthook` (W&B, ClearML) or signal handlers
(ClearML). One that blocks can be ended with its process; a thread cannot.
"""
