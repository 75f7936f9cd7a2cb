"""Many jobs: what our Hydra launcher does for a sweep.

    launcher     what Hydra calls: plan, run, return
    settings     what it is told by hydra.launcher
    plan         a job: composed, with its need and its folder, and what is known of it from before
    queue        those that have not begun
    rows         what is known of each job
    loop         starts jobs as they fit, watches them, stops them
    child        a forked process that says what comes of its work, and dies with us
    coordinator  one job in such a process
    returns      what Hydra gets of it
    host         a cluster in such a process, for all jobs
    foreign      the task of somebody else's app, on each rank of a gang
    reports      what a job says of itself
    overview     sweep.json, sweep.csv, sweep.md, always up to date
    tables       the last two of them
    display      the live table
    picture      sweep.png

Hydra imports every plugin at the start of every app: only `launcher` is imported for that, and it is light.
"""
