"""The figures of `benchmarks.search`."""

from __future__ import annotations

from benchmarks import search
from benchmarks.search import Searched


def test_a_search_is_measured_by_its_steps_and_by_the_place_of_what_it_found():
    jobs = search.points()
    assert len(jobs) == len(set(jobs)) == 27
    values = {job: -float(number) for number, job in enumerate(jobs)}
    grid = Searched(100.0, 1000, jobs[0], values)
    ours = [Searched(20.0, 300, jobs[0], {})]
    ray = [Searched(30.0, 450, jobs[2], {})]
    found = {figure.name: figure for figure in search.figures(grid, ours, ray)}
    assert found["Ray Tune / ddp_hydra"].median == 1.5
    assert found["share of the grid's steps, ddp_hydra"].median == 0.3
    assert found["share of the grid's steps, Ray Tune"].median == 0.45
    assert found["place in the grid of the job that was found, ddp_hydra"].median == 1
    assert found["place in the grid of the job that was found, Ray Tune"].median == 3
    assert all(figure.met for figure in found.values())
    worse = list(search.figures(grid, [Searched(40.0, 500, jobs[1], {})], ray))
    assert sum(not figure.met for figure in worse) == 3
