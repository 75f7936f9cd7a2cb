"""Take the pictures of the documentation anew: `python -m docs.pictures.take [name ...]`, from the checkout.

Run the jobs that they show, and photograph TensorBoard in a headless Chromium.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import browser
from tests.support.tensorboard_server import serving

HERE = Path(__file__).parent
JOB = (sys.executable, "-m", "ddp_hydra")
SHORT = ("model=mlp", "data=digits", "cluster.n_workers=2")
DEMO = ("experiment=digits", "seed=1")
SWEEP = (
    "-m", *SHORT, "dispatch.ranks=1", "trainer.epochs=4", "optimizer.lr=0.3,0.1,0.03", "data.batch_size=32,64",
    "hydra.sweep.dir=sweep",
)  # fmt: skip
RESTARTED = (
    *SHORT, "trainer.epochs=40", "trainer.checkpoint_every_steps=50", "+fault='kill,rank=1,step=240'", "tags=[night]",
)  # fmt: skip
FAILING_SWEEP = ("-m", *SHORT, "trainer.epochs=20", "optimizer.lr=0.3,0.03,30000", "seed=1,2")
LONG = (*SHORT, "trainer.epochs=100000", "trainer.validate_every_epochs=200")
WIDTH = 1480


def main() -> None:
    """Take the pictures whose names are given, or all."""
    names = sys.argv[1:] or list(PICTURES)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
            PICTURES[name](Path(folder))


def curves(folder: Path) -> None:
    """Train the demo, and photograph its curves."""
    run(folder, *DEMO)
    with photographing(folder, "outputs") as (tab, url):
        take_curves(tab, url)


def sweep(folder: Path) -> None:
    """Run a sweep, copy its picture, print its table for docs/sweeps.md, and photograph its hyperparameters."""
    run(folder, *SWEEP)
    shutil.copy(folder / "sweep/sweep.png", HERE)
    print((folder / "sweep/sweep.md").read_text())  # noqa: T201
    with photographing(folder, "sweep") as (tab, url):
        take_hparams(tab, url)


def runs(folder: Path) -> None:
    """Run a job that is killed, a sweep with failures, and a job that goes on; photograph the tab Runs."""
    run(folder, *RESTARTED)
    run(folder, *FAILING_SWEEP)
    with going_on(folder), photographing(folder, ".") as (tab, url):
        take_runs(tab, url)


PICTURES = {"curves": curves, "sweep": sweep, "runs": runs}


def run(folder: Path, *words: str) -> None:
    """Run a command of the project in a folder."""
    subprocess.run([*JOB, *words], cwd=folder, check="-m" not in words)  # jobs of a sweep may fail


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


@contextmanager
def photographing(folder: Path, logdir: str) -> Iterator[tuple[browser.Tab, str]]:
    """Show a folder below another one in TensorBoard; it prints the paths as they are given."""
    profile = folder / "profile"
    profile.mkdir()
    with (
        contextlib.chdir(folder),
        serving(Path(logdir), folder / "cache") as url,
        browser.started(profile) as tab,
    ):
        tab.prefer("light")
        yield tab, url


def take_curves(tab: browser.Tab, url: str) -> None:
    """Photograph the demo's curves."""
    tab.resize(1700, 860)
    tab.open(f"{url}?tagFilter=loss%7Caccuracy#timeseries")
    tab.wait("document.querySelectorAll('card-view').length >= 4")
    tab.listen(5)
    tab.picture(HERE / "tensorboard.png")


def take_hparams(tab: browser.Tab, url: str) -> None:
    """Photograph the table of a sweep's hyperparameters."""
    tab.resize(WIDTH, 640)
    tab.open(f"{url}#hparams")
    tab.listen(10)  # its elements are in shadow trees
    tab.picture(HERE / "hparams.png")


def take_runs(tab: browser.Tab, url: str) -> None:
    """Photograph the tab Runs: its table, a run in the dark, and a comparison."""
    tab.resize(WIDTH, 480)
    tab.open(f"{url}#ddp_hydra")
    tab.wait("page.querySelectorAll('tr[data-id]').length === 8")
    tab.listen(3)
    tab.open(f"{url}?again#ddp_hydra")  # the tab is in its place once TensorBoard knows that there are runs
    tab.wait("!!page.querySelector('.runs .status[data-kind=running]')")
    tab.listen(4)
    tab.picture(HERE / "runs-table.png")
    rows = tab.run("[...page.querySelectorAll('tr[data-id]')].map((row) => [row.dataset.id, row.textContent])")
    ids = {text: key for key, text in rows}
    restarted = next(key for text, key in ids.items() if "night" in text)
    failed = next(key for text, key in ids.items() if "/5failed" in text)
    done = [key for text, key in ids.items() if text.partition("done")[0][-2:] in ("/0", "/2")]
    tab.prefer("dark")
    tab.resize(WIDTH, 900)
    tab.open(f"{url}?dark#ddp_hydra&p.ddp_hydra.run={restarted}")
    tab.wait("page.querySelector('.panel .log pre').textContent.includes('attempt 1')")
    tab.listen(1)
    tab.picture(HERE / "runs-run.png")
    tab.prefer("light")
    tab.resize(WIDTH, 640)
    tab.open(f"{url}?light#ddp_hydra&p.ddp_hydra.diff={'%2C'.join([*done, failed])}&p.ddp_hydra.filter=seed")
    tab.wait("page.querySelectorAll('.diff tr').length > 5")
    tab.listen(1)
    tab.picture(HERE / "runs-compare.png")


if __name__ == "__main__":
    main()
