"""How a job's end travels to the sweep's process."""

from __future__ import annotations

import pickle

import distributed  # noqa: F401 (teaches pickle the exceptions that there are; not those that follow)
import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from ddp_hydra.errors import ConfigError, Failure, RankFailed
from ddp_hydra.sweep.planned_job import describe_error, portable, with_trace


def result(value, status=JobStatus.COMPLETED):
    found = JobReturn(status=status)
    found._return_value = value
    return found


class Awkward(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_a_failed_gang_arrives_with_its_cause():
    failure = Failure("raised", 1, "h", "ValueError: bad")
    error = pickle.loads(pickle.dumps(RankFailed("rank 1 failed", failure, (failure,))))
    assert (str(error), error.failure, error.symptoms) == ("rank 1 failed", failure, (failure,))


def test_an_error_that_cannot_travel_arrives_in_words():
    found = portable(result(Awkward(1, 2), JobStatus.FAILED))
    with pytest.raises(RuntimeError, match="Awkward: 1 and 2"):
        raise pickle.loads(pickle.dumps(found))._return_value


def test_a_value_that_cannot_travel_is_a_failure_that_says_so():
    found = portable(result(lambda: None))
    assert found.status == JobStatus.FAILED
    with pytest.raises(TypeError, match="the task returned a function, which cannot be sent"):
        _ = found.return_value


def test_a_result_keeps_its_configs_in_little_space():
    cfg = OmegaConf.create({"layers": [{"width": 8, "name": "a"}] * 200})
    given = JobReturn(["a=1"], cfg, OmegaConf.create({"hydra": 1}), "folder", "task", JobStatus.COMPLETED)
    given._return_value = 0.5
    found = pickle.loads(pickle.dumps(portable(given)))
    assert isinstance(found, JobReturn)
    for name in ("overrides", "cfg", "hydra_cfg", "working_dir", "task_name", "status", "return_value"):
        assert getattr(found, name) == getattr(given, name)
    assert len(pickle.dumps(found)) < len(pickle.dumps(given)) / 5
    found.cfg = None
    assert found.cfg is None


def test_an_error_shows_where_it_was_raised():
    found = with_trace(result(ValueError("no"), JobStatus.FAILED), "Traceback: line 7")._return_value
    assert "in the job's process:\nTraceback: line 7" in str(found.__cause__)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("first\nsecond"), "first"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (
            InstantiationException("Error in call to target 'a.Model':\nValueError('no such layer')\nfull_key: model"),
            "InstantiationException: Error in call to target 'a.Model': ValueError('no such layer')",
        ),
        (ConfigError("the data set:"), "the data set:"),
    ],
)
def test_an_error_is_one_line_in_the_overview(error, line):
    assert describe_error(error) == line
