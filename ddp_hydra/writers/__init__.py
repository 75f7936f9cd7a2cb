"""Turns a job's records into files and a live display.

    base               the protocol of a writer
    default            the writers of a run directory
    handler            checks each record of a job, and gives it to every writer; waits for a full disk
    validate           the fields of each kind of record

    jsonl              metrics.jsonl
    tensorboard        tensorboard/events…
    submitted_files    files that ranks submit
    checkpoints        checkpoints/, with last.pt, best.pt, manifest.json and retention
    checkpoint_mirror  a copy of checkpoints/ in a bucket
    logs               logs/rank-<r>.log
    progress           the live display
    status             status.json, while the job runs
    loggers/           MLflow, W&B, ClearML, Aim or a user's own writer, each in a process of its own
    hparams            TensorBoard's HParams tab; not a writer, because it needs to know how the job ended

    receive_file       receives a file completely or not at all
    tfevents           encodes TensorBoard's event files
    progress_state     describes the progress of a job in words

Nothing here imports torch, and nothing that a rank sent is unpickled. Only `default_writers` imports the writers, so
that a reader of checkpoints does not load them.
"""
