"""The tab Runs in a real browser, in TensorBoard."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest

from ddp_hydra.sweep.rows import JobRow as SweepRow
from ddp_hydra.sweep.rows import JobState, SweepObjective
from ddp_hydra.sweep.summary_files import json_text
from tests.ddp_hydra.runs.conftest import kill, write_run
from tests.support import browser
from tests.support.tensorboard_server import serving

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(browser.find() is None, reason=browser.MISSING),
]
NOT_OURS = ("Three.js", "software WebGL", "favicon")
"""Messages of TensorBoard itself, and of the browser about it."""
HOSTILE = "<img src=x onerror=top.owned=1><script>top.owned=1<\u2215script>\u202e"
MANY = 1_000
NAMES = "[...page.querySelectorAll('tr[data-id] a')].map((one) => one.textContent)"


@pytest.fixture(scope="module")
def logdir(hydra_files, tmp_path_factory) -> Path:
    """A folder with runs that are done, failed and started again, a sweep, and one of hostile texts."""
    folder = tmp_path_factory.mktemp("logdir") / "outputs"
    for name, words, given in (
        ("day/a", ("optimizer.lr=0.1",), {"loss": 0.5, "steps": 30}),
        ("day/b", ("optimizer.lr=0.2", "trainer.epochs=7"), {"loss": 0.125, "tags": ["good"]}),
        ("day/c", ("optimizer.lr=0.3",), {"loss": 2.0, "end": "failed"}),
    ):
        write_run(folder / name, hydra_files(*words), **given)
    hostile(write_run(folder / HOSTILE, hydra_files()))
    restarted(folder / "day" / "a")
    rows = [SweepRow(number, [f"x={number}"], str(number), JobState.done, number / 8) for number in range(2)]
    for row in rows:
        (folder / "sweep" / row.folder / ".hydra").mkdir(parents=True)
    rows.append(SweepRow(2, ["x=2"], "2"))
    (folder / "sweep" / "sweep.json").write_text(json_text(rows, SweepObjective("val/loss", False)))
    return folder


def change(run_dir: Path, **entries: object) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps(summary | entries))


def restarted(run_dir: Path) -> None:
    """Make it a run whose first attempt failed after half of its time."""
    began = json.loads((run_dir / "summary.json").read_text())["started"]
    failure = {"kind": "killed", "rank": 1, "host": "far", "step": 3, "message": "its memory ran out"}
    attempt = {"attempt": 0, "world_size": 2, "steps_done": 2, "started": began, "wall_s": 5.0, "failure": failure}
    data = {"wait_s": 1.0, "wait": 0.25}
    change(run_dir, attempts=[attempt], restarts=1, wall_s=10.0, train_s=4.0, data=data, exchange_s=0.5)
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / "rank-0.log").write_text("first\n--- attempt 1 ---\nsecond\n")
    (run_dir / "logs" / "rank-1.log").write_text("of rank 1\n")


def hostile(run_dir: Path) -> None:
    """Fill a run with markup wherever it has text."""
    failure = {"kind": HOSTILE, "host": HOSTILE, "message": HOSTILE, "place": HOSTILE, "traceback": HOSTILE, "rank": 0}
    change(
        run_dir, status="failed", failure=failure, attempts=[{"attempt": 0, "wall_s": 1.0, "failure": failure}],
        tags=[HOSTILE], metrics={HOSTILE: 1.0}, objective={"metric": HOSTILE, "direction": "minimize"},
        profile=HOSTILE, project=HOSTILE,
    )  # fmt: skip
    (run_dir / ".hydra" / "overrides.yaml").write_text(json.dumps([f"{HOSTILE}={HOSTILE}", HOSTILE]))
    (run_dir / ".hydra" / "config.yaml").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run_dir / "checkpoints" / "manifest.json").write_text(
        json.dumps({"checkpoints": {HOSTILE: {"step": 1, "size": 1}}})
    )
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / "rank-0.log").write_text(f"{HOSTILE}\n")


@pytest.fixture(scope="module")
def server(logdir, tmp_path_factory):
    with serving(logdir, tmp_path_factory.mktemp("tensorboard") / "cache") as url:
        yield url


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser") / "profile"
    folder.mkdir()
    with browser.started(folder) as tab:
        tab.resize(1500, 900)
        yield tab


@pytest.fixture
def tab(opened, server):
    """The tab Runs; whatever a test does, nothing of it was an error, and no request left the server."""
    opened.messages.clear()
    opened.requests.clear()
    opened.open(f"{server}#ddp_hydra")
    opened.wait(f"{NAMES}.length > 5")
    yield opened
    errors = [text for text in opened.messages if not any(word in text for word in NOT_OURS)]
    assert errors == []
    assert [url for url in opened.requests if not url.startswith((server, "about:", "data:", "blob:"))] == []


def of(tab: browser.Tab) -> list[str]:
    return [name for name in tab.run(NAMES) if "img" not in name]


def test_the_tab_shows_all_runs_and_no_text_of_them_is_markup(tab):
    assert "Runs" in tab.run("[...document.querySelectorAll('[role=tab]')].map((one) => one.textContent.trim())")
    assert set(of(tab)) == {"day/a", "day/b", "day/c", "sweep/0", "sweep/1"}
    assert tab.texts(".counts button") == ["4 done", "2 failed"]
    name = HOSTILE.replace("\u202e", "\ufffd")
    assert name in tab.run(NAMES)
    tab.run(
        f"[...page.querySelectorAll('tr[data-id] a')].find((one) => one.title.startsWith({HOSTILE[:20]!r})).click()"
    )
    tab.wait("page.querySelector('.panel .log pre')?.textContent")
    assert name in tab.run("page.querySelector('.panel h2').textContent")
    assert name in tab.run("page.querySelector('.panel pre').textContent")
    tab.run("page.querySelectorAll('tr[data-id] input').forEach((box) => box.click())")
    tab.click("header > button")
    tab.wait("page.querySelectorAll('.diff tr').length > 3")
    assert any(name in text for text in tab.texts(".diff th"))
    assert tab.run("page.querySelectorAll('img, script:not([type=module]), iframe').length") == 0
    assert tab.run("top.owned ?? page.defaultView.owned ?? 0") == 0


def test_the_cause_of_a_failure_is_there_on_a_screen_of_1200_pixels(tab):
    tab.resize(1200, 800)
    edges = "['message', 'attempts', 'wait'].map((key) => page.querySelector(`th[data-key='${key}']`)"
    right = f"Math.max(...{edges}.getBoundingClientRect().right))"
    tab.wait(right)
    assert tab.run(f"{right} <= page.documentElement.clientWidth")
    tab.resize(1500, 900)


@pytest.mark.slow
def test_a_column_sorts_and_a_second_click_turns_it(tab):
    for key, first in (("value", "day/c"), ("name", "day/a"), ("key:optimizer.lr", "day/a"), ("progress", "day/a")):
        tab.click(f"th[data-key='{key}'] button")
        tab.wait(f"page.querySelector(\"th[data-key='{key}']\").ariaSort !== 'none'")
        assert of(tab)[0] == first, key
    tab.click("th[data-key='value'] button")
    tab.click("th[data-key='value'] button")
    assert of(tab) == ["sweep/0", "day/b", "sweep/1", "day/a", "day/c"]
    assert tab.run("page.querySelector(\"th[data-key='value']\").ariaSort") == "ascending"
    tab.wait("location.hash.includes('sort=value')")


@pytest.mark.slow
def test_the_filter_is_the_servers_and_a_mistake_is_named(tab):
    def type_in(text: str) -> None:
        tab.run(
            f"(page.querySelector('header input').value = {json.dumps(text)}, "
            "page.querySelector('header input').dispatchEvent(new Event('input')), 1)"
        )

    type_in("val/loss<1 status=done")
    tab.wait(f"{NAMES}.length === 2")
    assert set(of(tab)) == {"day/a", "day/b"}
    type_in("status=dnoe")
    tab.wait("page.querySelector('.note').textContent.includes('status=dnoe: give running')")
    type_in("no such words")
    tab.wait("page.querySelector('.note').textContent === 'No run matches the filter.'")
    type_in("")
    tab.wait(f"{NAMES}.length > 5")
    tab.click(".sweep .link")
    tab.wait(f"{NAMES}.length === 2")
    assert set(of(tab)) == {"sweep/0", "sweep/1"}
    assert "3 jobs: 2 done, 1 waiting" in tab.texts(".sweep")[0]
    tab.messages[:] = [text for text in tab.messages if "400" not in text]  # the browser notes each refusal


@pytest.mark.slow
def test_a_run_shows_its_attempts_its_time_and_its_logs_and_back_closes_it(tab):
    tab.run("[...page.querySelectorAll('tr[data-id] a')].find((one) => one.textContent === 'day/a').click()")
    tab.wait("page.querySelector('.panel .log pre')?.textContent.includes('second')")
    assert tab.texts(".panel .marker") == ["--- attempt 1 ---"]
    (first, *_) = tab.texts(".attempts tbody tr")
    assert "killed, rank 1, on far, step 3: its memory ran out" in first
    assert [one[:22] for one in tab.texts(".legend li")] == [
        "waiting for data 1.0 s", "compute 2.5 s, 25 %", "waiting for gradients ", "starting, validating, ",
        "attempts that failed 5",
    ]  # fmt: skip
    assert tab.run("page.querySelector('.bar.large .fault').style.left") == "50%"
    assert tab.run("page.querySelector('.curve polyline').getAttribute('points').split(' ').length") == 30
    tab.run("(page.querySelector('.log select').value = '1', "
            "page.querySelector('.log select').dispatchEvent(new Event('change')), 1)")  # fmt: skip
    tab.wait("page.querySelector('.log pre').textContent.includes('of rank 1')")
    tab.run("history.back()")
    tab.wait("page.querySelector('.panel').hidden")
    assert "run=" not in tab.run("location.hash")


@pytest.mark.slow
def test_a_link_shows_the_same_again(tab, server):
    tab.click("th[data-key='value'] button")
    tab.run("(page.querySelector('header input').value = 'day', "
            "page.querySelector('header input').dispatchEvent(new Event('input')), 1)")  # fmt: skip
    tab.wait(f"{NAMES}.length === 3")
    tab.run("[...page.querySelectorAll('tr[data-id] a')].find((one) => one.textContent === 'day/b').click()")
    tab.wait("page.querySelector('.panel h2')?.textContent === 'day/b'")
    link, before = tab.run("location.href"), of(tab)
    assert before == ["day/c", "day/a", "day/b"]
    tab.open(link)
    tab.wait("page.querySelector('.panel h2')?.textContent === 'day/b'")
    tab.wait(f"{NAMES}.length === 3")
    assert (of(tab), tab.run("page.querySelector('header input').value")) == (before, "day")
    href = tab.run("page.querySelector('tr[data-id] a').href")
    assert href.startswith(server)
    tab.open(href)  # the link of another row, as from a new tab
    tab.wait("page.querySelector('.panel h2')?.textContent === 'day/c'")
    tab.open(f"{server}#ddp_hydra&p.ddp_hydra.diff=x&p.ddp_hydra.no=1&p.ddp_hydra.sort=no")
    tab.wait(f"{NAMES}.length > 5")


@pytest.mark.slow
def test_it_is_as_dark_as_tensorboard(tab, server):
    theme = "page.documentElement.dataset.theme"
    colors = {}
    for scheme in ("dark", "light"):
        tab.prefer(scheme)
        tab.open(f"{server}?x={scheme}#ddp_hydra")
        tab.wait(f"{NAMES}.length > 5")
        assert tab.run(theme) == scheme
        colors[scheme] = tab.run("page.defaultView.getComputedStyle(page.body).backgroundColor")
    assert colors == {"dark": "rgb(32, 33, 36)", "light": "rgb(255, 255, 255)"}
    tab.run("(document.body.classList.add('dark-mode'), 1)")  # as its own switch does
    tab.wait(f"{theme} === 'dark'")
    tab.open(f"{server}data/plugin_entry.html?name=ddp_hydra")  # by itself
    tab.prefer("dark")
    tab.wait("document.documentElement.dataset.theme === 'dark'")
    tab.prefer("light")
    tab.wait("document.documentElement.dataset.theme === 'light'")


@pytest.mark.slow
def test_a_run_that_goes_on_is_kept_up_to_date(tab, process_of, logdir):
    status = (
        "[...page.querySelectorAll('tr[data-id]')].find((one) => one.querySelector('a').textContent === 'live/run')"
        "?.querySelector('.status').textContent"
    )
    run_dir = logdir / "live" / "run"
    run_dir.mkdir(parents=True)
    process = process_of(run_dir)
    try:
        assert tab.wait(status) == "running"
        kill(process)
        tab.wait(f"({status}) === 'killed'")
    finally:
        shutil.rmtree(run_dir.parent)
    tab.wait(f"({status}) === undefined || null")


@pytest.mark.slow
def test_a_thousand_runs_are_in_the_table_but_few_in_the_document(tab, logdir):
    folder = logdir / "many"
    for number in range(MANY):
        (folder / f"{number:04}" / ".hydra").mkdir(parents=True)
    try:
        tab.wait(f"page.querySelector('.total').textContent === '{MANY + 6:,} runs'")
        tab.click("th[data-key='name'] button")
        assert tab.run("page.querySelectorAll('.runs tr').length") < 100
        tab.run("(page.querySelector('.scroll').scrollTop = 1e9, 1)")
        tab.wait(f"{NAMES}.includes('sweep/1')")
    finally:
        shutil.rmtree(folder)
    tab.wait("page.querySelector('.total').textContent === '6 runs'")


@pytest.mark.slow
def test_the_page_forbids_itself_scripts_in_markup_where_tensorboard_would_allow_them(tab, server):
    tab.open(f"{server}data/plugin_entry.html?name=ddp_hydra&x={quote(HOSTILE)}")
    tab.wait("document.querySelectorAll('tr[data-id]').length > 5")
    tab.run("(document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=top.owned=1>'), 1)")
    tab.send("Runtime.evaluate", expression="eval('top.owned = 2')", allowUnsafeEvalBlockedByCSP=False)
    tab.listen(0.5)
    assert tab.run("top.owned ?? 0") == 0
    assert any("Content Security Policy" in text for text in tab.messages)
    tab.messages.clear()
