"""The two walks of docs/architecture.md, compared with the files that a job's values pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.medium]
ROOT = Path(__file__).parents[2]
MOST = {"optimizer.lr": 15, "train/loss": 10}
ASIDE = {
    "config/checkpoint_config.py": "the copy of the config that checkpoints keep",
    "config/hydra_compat.py": "the typed words, for TensorBoard's tab HParams",
    "config/redact.py": "the config in .hydra, without secrets",
    "config/unknown_keys.py": "the search for keys that nothing reads",
    "config/references.py": "the same, with the full names of keys",
    "writers/tensorboard.py": "TensorBoard's tab HParams",
}
"""Files that have `optimizer.lr`, but do not hand it to the optimizer."""
WORDS = (
    *("data=tiny", "model=tiny", "model._target_=tests.support.walks.model", "optimizer.lr=0.012345"),
    *("trainer.epochs=1", "trainer.log_every_steps=1", "trainer.threads=1", "cluster.n_workers=1"),
)


def documented(walk: str) -> set[str]:
    """Return the files in the table of a walk."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition(f"`{walk}`, step by step")[2].partition("\n\n")[2].partition("\n\n")[0]
    return set(re.findall(r"`ddp_hydra/([\w/]+\.py)`", table))


@pytest.fixture(scope="module")
def passed(project, tmp_path_factory, warm_server) -> dict[str, set[str]]:
    """Run a job, and return the files that each value has passed."""
    folder = tmp_path_factory.mktemp("walks")
    command = [sys.executable, "-m", "tests.support.walks", str(folder / "notes"), "--", *WORDS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DDP_HYDRA_PROJECT": str(project)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = defaultdict(set)
    for line in (folder / "notes").read_text().splitlines():
        walk, _, file = line.split()
        found[walk].add(file.removeprefix("ddp_hydra/"))
    return found


@pytest.mark.parametrize("walk", MOST)
def test_a_value_passes_the_files_that_the_page_names_and_few(walk, passed):
    aside = ASIDE.keys() if walk == "optimizer.lr" else set()
    assert passed[walk] - aside == documented(walk)
    assert len(documented(walk)) <= MOST[walk]


def test_files_that_only_look_at_a_value_are_known(passed):
    assert ASIDE.keys() <= passed["optimizer.lr"]
