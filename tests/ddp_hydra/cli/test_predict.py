"""What the command does before it predicts; tests/integration/test_predict.py predicts."""

from __future__ import annotations

import pytest

from ddp_hydra.cli.inference import predict
from ddp_hydra.errors import CheckpointError, ConfigError
from ddp_hydra.writers.run_dir import is_locked, locked


def test_a_second_one_with_the_same_file_leaves_the_folder_to_the_first(tmp_path):
    folder = tmp_path / "out.csv.parts"
    with locked(folder):  # by the first one, which has no part yet
        with pytest.raises(ConfigError, match="give another out="):
            predict("run", tmp_path / "out.csv")
        assert is_locked(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        predict(str(tmp_path / "run"), tmp_path / "out.csv")
    assert not folder.exists()
    with pytest.raises(CheckpointError, match="does not exist"):
        predict(str(tmp_path / "run"), tmp_path / "new" / "folder" / "out.csv")
    assert list(tmp_path.iterdir()) == []
