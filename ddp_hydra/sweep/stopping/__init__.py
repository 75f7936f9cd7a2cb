"""Stops the jobs of a sweep early: `hydra.launcher.stop`.

    settings     read `hydra.launcher.stop`
    reports      read the values of the objective that a job has reported
    rungs        asha and hyperband: which paused jobs go on
    decisions    after which report a job is stopped
    rules        median, patient, threshold, and asha for jobs that can't pause
    pruner       a pruner of Optuna as such a rule
    base         what a sweep tells of its jobs, and the row and the result of one that is stopped
    pausing      apply rungs to the jobs of a sweep
    interrupting apply decisions to them

A decision depends only on the numbers of the jobs and the values they report: not on the time, the number of workers,
restarts or faults. `rungs`, `decisions` and `rules` hold that: they do no I/O.
"""
