"""Writers turn a job's records into files and a display, where the command was typed.

    handler      the one consumer of a job's records: checks each, hands it to every writer
    validate     what a record must look like before a writer sees it
    jsonl        metrics.jsonl
    tensorboard  tensorboard/events…
    hparams      what TensorBoard's HParams tab wants; no writer, for it knows how the job ended
    submitted_files    any file a rank submits
    checkpoints  checkpoints/, with last.pt, best.pt, manifest.json and retention
    checkpoint_mirror  a copy of checkpoints/ in a bucket
    logs         logs/rank-<r>.log
    progress     the live display
    status       status.json, while the job runs
    base         what a writer is; default: the writers of a run directory
    receive_file, disk_retry, tfevents, progress_state    what they share: complete files, waiting for a full disk,
                                                          TensorBoard's format, progress in words

No torch here, and nothing that a rank sent is unpickled. The writers themselves are imported by
`default_writers` only, so that a reader of checkpoints pays for none of them.
"""
