"""Runs many jobs: the implementation of our Hydra launcher, and of the sweeper `hydra/sweeper=pbt`.

    launcher         the class that Hydra calls
    settings         the options of hydra.launcher
    sweep            run all jobs: start, watch and stop them
    scheduler        decide which job starts next, and on which cluster, which runs in a process of its own; fork
                     such processes
    queue            the jobs that have not started; compose their configs, and check the first ones at once
    planned_job      a job: its config, its folder, what it needs of a cluster, how it runs, and its result
    other_apps       run the task of another Hydra app on the ranks of a gang
    stopping         stop jobs early, and let paused ones go on: hydra.launcher.stop
    stop_rules       decide which are stopped, by what the jobs have reported, and which go on: asha and hyperband
    rows             the jobs of a sweep with their states and results, and their order
    summary_files    fill a row from the files and the config of its job; write sweep.json, sweep.csv, sweep.md
    tables           the content of the last two, and the table on the terminal
    plot             sweep.png
    pruning          remove the checkpoints of jobs that are not among the best
    pbt              population-based training (Jaderberg et al., 2017): a batch of jobs for each generation; the values
                     of its members, and which are copied

Hydra imports every plugin when any app starts, so `launcher` and `pbt` import little.
"""
