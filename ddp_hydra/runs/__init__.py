"""Finds the runs below folders and URLs, and reads what they have left.

    run_files   the files of a run, in a folder or in a store
    find        the runs below folders and URLs; what a sweep knows of its jobs
    status      whether a run goes on, and how it has ended
    describe    one row for each run
    index       a cache of the rows of a folder
    select      filters and orders rows
    details     all that is known of one run, and the differences between runs
    disk        the size of runs, and their removal
    tags        the tags of a run
    reproduce   the words that run it again

All text of a run is untrusted: files are read up to a limit, never unpickled, and links are not followed.
"""
