"""Finds the runs below folders and URLs, and reads what they have left.

    run_files   the files of a run, in a folder or in a store; its tags
    find        the runs below folders and URLs, a cache of their rows; what a sweep knows of its jobs
    describe    one row for each run; whether it goes on, and how it has ended
    details     all that is known of one run, the differences between runs, and the words that run one again
    disk        the size of runs, and their removal

All text of a run is untrusted: files are read up to a limit, never unpickled, and links are not followed.
"""
