"""What a command prints of an error."""

from __future__ import annotations

import pytest

from ddp_hydra.data.images.batch_loader import TooManyBadSamplesError
from ddp_hydra.errors import ConfigError
from ddp_hydra.job.summary import explain


def raised_by(source: str, file: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(compile(source, file, "exec"), {})
    return caught.value


def test_an_error_of_the_users_file_is_a_line_and_the_users_own_frames(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = raised_by("import json\ndef load():\n    json.loads('{')\nload()", str(tmp_path / "mine.py"))
    first, _, second, *rest = explain(error).splitlines()
    assert first.startswith("JSONDecodeError: Expecting property name")
    assert first.endswith("(mine.py, line 3, in load)")
    assert second == "Traceback (most recent call last):"
    assert [line.split('"')[1] for line in rest if line.startswith("  File ")][1:3] == ["mine.py", "mine.py"]
    assert rest[-1].endswith("frames of libraries are left out: HYDRA_FULL_ERROR=1 shows them)")


def test_the_starter_is_told_from_the_users_files():
    error = raised_by("1 / 0", "/usr/lib/python3/site-packages/ddp_hydra/starter/models/mlp.py")
    assert explain(error).startswith(
        "ZeroDivisionError: division by zero (ddp_hydra/starter/models/mlp.py, line 1, in "
    )


@pytest.mark.parametrize("error", [ConfigError("give a number"), TooManyBadSamplesError("3 samples are bad")])
def test_a_mistake_is_a_sentence(error):
    assert explain(error) == str(error)
