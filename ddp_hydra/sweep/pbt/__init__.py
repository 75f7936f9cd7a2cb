"""Population-based training (Jaderberg et al., 2017): the implementation of `hydra/sweeper=pbt`.

    sweeper     the class that Hydra calls: a batch of jobs for each generation
    space       the values that a key may have: draw one, change one
    population  the options; who goes on, who copies whom, with which values

Members of a generation wait for each other, so that everything is repeatable from the seed.
"""
