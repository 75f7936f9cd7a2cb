"""Runs many jobs: the implementation of our Hydra launcher.

    launcher         the class that Hydra calls
    settings         the options of hydra.launcher
    sweep            run all jobs: start, watch and stop them
    scheduler        decide which job starts next, and on which cluster
    queue            the jobs that have not started
    composing        composes the configs of jobs, and checks the first ones before the sweep starts
    planned_job      a job: its config, its folder, what it needs of a cluster
    forked_process   a forked process that sends messages and ends with this one
    job_process      run one job in such a process
    cluster_process  run a cluster for all jobs in such a process
    job_returns      how the result of a job comes from its process
    job_status       read the status and the summary of a job
    stopping         stop jobs early, and let paused ones go on: hydra.launcher.stop
    stop_rules       decide which, by what the jobs have reported
    other_apps       run the task of another Hydra app on the ranks of a gang
    rows             the table of all jobs
    summary_files    sweep.json, sweep.csv, sweep.md
    tables           the content of the last two
    defaults         fills in what a job has for the keys that only others give
    seeds            mean and spread of the jobs that differ in their seed only
    live_table       the table on the terminal
    pruning          removes the checkpoints of jobs that are not among the best
    plot             sweep.png
    pbt/             population-based training, a sweeper

Hydra imports every plugin when any app starts, so `launcher` imports little.
"""
