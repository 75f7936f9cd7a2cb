// The tab Runs: builds the page, asks for what has changed every few seconds, and keeps its parts up to date.
// All text of runs is set as text content, never as markup.

import { get, useStrictPolicy } from "./server.js";
import { compareView } from "./compare.js";
import { runView } from "./run.js";
import { RunsTable } from "./table.js";
import { readState, writeState, onStateChange } from "./state.js";
import { sweepsView } from "./sweeps.js";
import { followTheme } from "./theme.js";
import { statusCounts } from "./bars.js";
import { button, counted, element, replace } from "./dom.js";
import { columnsFor, extraMetrics } from "./columns.js";

const PAUSE_MS = 3000;
const TYPING_MS = 250;
const HINT = "status=failed  val/accuracy>0.9  optimizer.lr=0.1  since=7d  any words";

class Page {
  constructor() {
    this.rows = new Map();
    this.known = { instance: "", version: 0 };
    this.sweeps = {};
    this.chosen = null;
    this.clockAhead = 0;
    this.state = readState();
    this.picked = new Set(this.state.diff);
    this.panelKey = "";
    this.build();
  }

  build() {
    this.filter = element("input", { type: "search", placeholder: HINT, "aria-label": "Filter", spellcheck: "false" });
    this.filter.value = this.state.filter;
    this.filter.addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.go({ filter: this.filter.value }), TYPING_MS);
    });
    this.note = element("p", { class: "note", role: "status" });
    this.counts = element("div", { class: "counts" });
    this.compare = button("compare", () => this.go({ diff: [...this.picked], run: "" }));
    this.metrics = element("details", { class: "menu" });
    this.sweepsBox = element("details", { class: "sweeps", open: "" });
    this.table = new RunsTable({
      onOpen: (id) => this.go({ run: id, diff: [] }),
      onSort: (sort) => this.go({ sort }),
      onPick: (id, isPicked) => this.pick(id, isPicked),
      isPicked: (id) => this.picked.has(id),
    });
    this.panel = element("aside", { class: "panel", hidden: "" });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.go({ run: "", diff: [] });
    });
    const bar = element("header", {}, this.filter, this.counts, this.metrics, this.compare);
    const list = element("main", {}, this.sweepsBox, this.table.box);
    document.body.append(bar, this.note, element("div", { class: "split" }, list, this.panel));
  }

  now() {
    return Date.now() / 1000 + this.clockAhead;
  }

  /** Change the state, and show it. Opening a run is a step that the browser's back button takes back. */
  go(change) {
    const before = this.state;
    this.state = { ...before, ...change };
    const opens = before.run !== this.state.run || String(before.diff) !== String(this.state.diff);
    writeState(this.state, opens);
    this.show(before);
  }

  show(before) {
    if (this.filter.value !== this.state.filter) this.filter.value = this.state.filter;
    if (before.filter !== this.state.filter) this.refresh();
    this.draw();
    this.drawPanel();
  }

  pick(id, isPicked) {
    if (isPicked) this.picked.add(id);
    else this.picked.delete(id);
    this.drawCompare();
    if (this.state.diff.length) this.go({ diff: this.picked.size > 1 ? [...this.picked] : [] });
  }

  /** Ask for what has changed. An answer to an older question than the newest one is dropped. */
  async refresh() {
    const asked = (this.asked = {});
    const { instance, version } = this.known;
    try {
      const found = await get("runs", { instance, since: version, filter: this.state.filter });
      if (asked === this.asked) this.take(found);
    } catch (error) {
      if (asked !== this.asked) return;
      this.note.textContent = error.message;
      this.hasFailed = true;
    }
  }

  take(found) {
    if (found.instance !== this.known.instance) this.rows.clear();
    this.known = { instance: found.instance, version: found.version };
    this.clockAhead = found.now - Date.now() / 1000;
    for (const id of found.removed) this.rows.delete(id);
    for (const row of found.rows) this.rows.set(row.id, row);
    const chosen = found.chosen ? found.chosen.join() : null;
    const isNew = this.hasFailed || found.rows.length || found.removed.length || chosen !== this.chosenKey;
    this.hasFailed = false;
    this.chosen = found.chosen ? new Set(found.chosen) : null;
    this.chosenKey = chosen;
    const sweeps = JSON.stringify(found.sweeps);
    if (isNew || sweeps !== this.sweepsKey) {
      this.sweepsKey = sweeps;
      this.sweeps = found.sweeps;
      this.draw();
    } else {
      this.table.draw(); // bars of runs that go on grow
    }
    const opened = this.state.run && found.rows.some((row) => row.id === this.state.run);
    this.drawPanel(opened || this.rows.get(this.state.run)?.status === "running");
  }

  draw() {
    const all = [...this.rows.values()];
    const rows = this.chosen ? all.filter((row) => this.chosen.has(row.id)) : all;
    const columns = columnsFor(rows, this.state.metrics, () => this.now());
    this.table.show(rows, columns, this.state.sort, this.state.run);
    this.drawCounts(rows, all);
    this.drawMetrics(rows);
    this.drawCompare();
    sweepsView(this.sweepsBox, this.sweeps, all, (name) => this.go({ filter: name }), (id) => this.go({ run: id, diff: [] }));
    this.note.textContent = this.known.instance && !rows.length ? (all.length ? "No run matches the filter." : "No runs.") : "";
  }

  drawCounts(rows, all) {
    const total = rows.length < all.length ? `${rows.length} of ${counted(all.length, "run")}` : counted(all.length, "run");
    const chips = statusCounts(rows).map(([status, count]) => {
      const choose = () => this.go({ filter: withStatus(this.state.filter, status) });
      return button(`${count} ${status}`, choose, { class: "status", "data-kind": status });
    });
    replace(this.counts, element("span", { class: "total" }, total), ...chips);
  }

  drawMetrics(rows) {
    if (this.metrics.open) return; // a box that is being clicked stays where it is
    const boxes = extraMetrics(rows).map((name) => {
      const box = element("input", { type: "checkbox" });
      box.checked = this.state.metrics.includes(name);
      box.addEventListener("change", () => {
        const others = this.state.metrics.filter((other) => other !== name);
        this.go({ metrics: box.checked ? [...others, name] : others });
      });
      return element("label", {}, box, name);
    });
    replace(this.metrics, element("summary", {}, "metrics"), element("div", {}, ...boxes));
  }

  drawCompare() {
    for (const id of this.picked) if (this.rows.size && !this.rows.has(id)) this.picked.delete(id);
    this.compare.disabled = this.picked.size < 2 || this.picked.size > 8;
    this.compare.textContent = this.picked.size ? `compare ${this.picked.size}` : "compare";
  }

  /** Show the run or the comparison that the state names; again only if it has changed. */
  drawPanel(again = false) {
    const { run, diff } = this.state;
    const key = diff.length > 1 ? `diff ${diff}` : run;
    if (key === this.panelKey && !again) return;
    const isOther = key !== this.panelKey;
    this.panelKey = key;
    this.panel.hidden = !key;
    document.body.classList.toggle("with-panel", Boolean(key));
    const close = () => this.go({ run: "", diff: [] });
    if (diff.length > 1) compareView(this.panel, diff, close, (id) => this.go({ run: id, diff: [] }));
    else if (run) runView(this.panel, run, isOther, close, () => this.now());
    this.table.mark(run);
    if (isOther) this.table.draw();
  }
}

/** Return a filter for runs with a status; without it if it was for these already. */
function withStatus(filter, status) {
  const others = filter.replace(/(^|\s)status=\S*/g, "").trim();
  return filter.includes(`status=${status}`) ? others : `${others} status=${status}`.trim();
}

/** TensorBoard calls this in the frame of the tab. */
export async function render() {
  useStrictPolicy();
  document.title = "Runs";
  const style = element("link", { rel: "stylesheet", href: "./page.css" });
  const loaded = new Promise((resolve) => ["load", "error"].forEach((kind) => style.addEventListener(kind, resolve)));
  document.head.append(style);
  followTheme();
  await loaded;
  const page = new Page();
  onStateChange((state) => {
    const before = page.state;
    page.state = state;
    page.picked = new Set(state.diff.length ? state.diff : page.picked);
    page.show(before);
  });
  await page.refresh();
  page.drawPanel();
  const isSeen = () => !document.hidden && document.documentElement.clientWidth > 0;
  setInterval(() => isSeen() && page.refresh(), PAUSE_MS);
}
