"""Make the pictures of TensorBoard's tab Runs in docs/runs.md: `python -m tests.support.runs_pictures`.

Run a job that starts again after a rank was killed, a sweep of which some jobs fail, and a job that goes on; and
photograph them in a browser.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import browser
from tests.support.tensorboard_server import serving

DOCS = Path(__file__).parents[2] / "docs"
JOB = (sys.executable, "-m", "ddp_hydra")
SHORT = ("model=mlp", "data=digits", "cluster.n_workers=2")
RESTARTED = (
    *SHORT, "trainer.epochs=40", "trainer.checkpoint_every_steps=50", "+fault='kill,rank=1,step=240'", "tags=[night]",
)  # fmt: skip
SWEEP = ("-m", *SHORT, "trainer.epochs=20", "optimizer.lr=0.3,0.03,30000", "seed=1,2")
LONG = (*SHORT, "trainer.epochs=100000", "trainer.validate_every_epochs=200")
SIZE = (1480, 640)


def main() -> None:
    """Run the jobs in a temporary folder, and write the pictures into docs/."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as name:
        folder = Path(name)
        subprocess.run([*JOB, *RESTARTED], cwd=folder, check=True)
        subprocess.run([*JOB, *SWEEP], cwd=folder, check=False)
        (folder / "profile").mkdir()
        # Folders are shown as they are given.
        with (
            going_on(folder),
            contextlib.chdir(folder),
            serving(Path(), folder / "cache") as url,
            browser.started(folder / "profile") as tab,
        ):
            tab.resize(*SIZE)
            photograph(tab, url)


@contextmanager
def going_on(folder: Path) -> Iterator[None]:
    """Let a job run during the block."""
    process = subprocess.Popen([*JOB, *LONG], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        while "samples/s" not in process.stdout.readline():
            assert process.poll() is None
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def photograph(tab: browser.Tab, url: str) -> None:
    """Write the pictures of the table, of a run in the dark, and of a comparison."""
    tab.prefer("light")
    tab.open(f"{url}#ddp_hydra")
    tab.wait("page.querySelectorAll('tr[data-id]').length === 8")
    tab.listen(3)
    tab.open(f"{url}?again#ddp_hydra")  # the tab is in its place once TensorBoard knows that there are runs
    tab.wait("!!page.querySelector('.runs .status[data-status=running]')")
    tab.listen(4)
    tab.picture(DOCS / "runs-table.png")
    rows = tab.run("[...page.querySelectorAll('tr[data-id]')].map((row) => [row.dataset.id, row.textContent])")
    ids = {text: key for key, text in rows}
    restarted = next(key for text, key in ids.items() if "night" in text)
    failed = next(key for text, key in ids.items() if "/5failed" in text)
    done = [key for text, key in ids.items() if text.partition("done")[0][-2:] in ("/0", "/2")]
    tab.prefer("dark")
    tab.resize(SIZE[0], 900)
    tab.open(f"{url}?dark#ddp_hydra&p.ddp_hydra.run={restarted}")
    tab.wait("page.querySelector('.panel .log pre').textContent.includes('attempt 1')")
    tab.listen(1)
    tab.picture(DOCS / "runs-run.png")
    tab.prefer("light")
    tab.resize(*SIZE)
    tab.open(f"{url}?light#ddp_hydra&p.ddp_hydra.diff={'%2C'.join([*done, failed])}&p.ddp_hydra.filter=seed")
    tab.wait("page.querySelectorAll('.diff tr').length > 5")
    tab.listen(1)
    tab.picture(DOCS / "runs-compare.png")


if __name__ == "__main__":
    main()
