"""Adds the tab *Runs* to TensorBoard: all runs and sweeps below its log directory.

    plugin      what TensorBoard loads: the addresses and their answers
    run_list    all runs, which of them have changed, and which a filter takes; one run, the tail of a log, comparisons
    page/       the page: modules and a style sheet, as the browser gets them. index is its frame, columns and table the
                list, run the panel of one run, compare the comparison of several

Nothing is written. A request names a run by an id, never a file by its path.
"""
