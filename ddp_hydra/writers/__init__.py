"""Turns a job's records into files and a live display.

    handler            the protocol of a writer; gives each record of a job to every writer, and waits for a full disk
    tensorboard        tensorboard/events…, and TensorBoard's HParams tab
    files              metrics.jsonl, logs/rank-<r>.log; files that ranks submit, complete or not at all; checkpoints/,
                       its manifest and retention
    checkpoint_mirror  a copy of checkpoints/ in a bucket
    progress           the live display
    loggers/           MLflow, W&B, ClearML, Aim or a user's own writer, each in a process of its own
    run_dir            the lock of a run directory, its summary.json, and its status.json while the job runs

Nothing here imports torch, and nothing that a rank sent is unpickled.
"""
