"""Sends a job's records to tracking services: MLflow, W&B, Aim, ClearML, or a writer of one's own.

    base       what a logger for a service has to define
    sender     the job's side: a bounded queue, and the logger's process
    process    the logger's side: gives each record to the logger, and repeats what a service did not take
    mlflow, wandb, aim, clearml    one service each, imported only in the logger's process

Each logger has a process of its own. So a library that blocks, crashes, installs signal handlers or waits at exit
cannot hold up the job: a process can be ended at any time, a thread cannot.
"""
