// The sweeps above the table: how many jobs are in which state, and which is the best.

import { shareBar, statusCounts } from "./bars.js";
import { button, counted, digits, element, replace, statusOf, when } from "./dom.js";

const MOST = 200;

/** Fill the box of the sweeps. `onFilter(name)` shows the jobs of one, `onOpen(id)` a run. */
export function sweepsView(box, sweeps, rows, onFilter, onOpen) {
  const jobs = new Map(Object.keys(sweeps).map((name) => [name, []]));
  for (const row of rows) jobs.get(row.sweep)?.push(row);
  box.hidden = !jobs.size;
  const begun = (name) => Math.max(0, ...jobs.get(name).map((row) => row.started || 0));
  const names = [...jobs.keys()].sort((a, b) => begun(b) - begun(a)).slice(0, MOST);
  const lines = names.map((name) => line(name, sweeps[name], jobs.get(name), onFilter, onOpen));
  const list = element("div", { class: "sweep-list" }, ...lines);
  replace(box, element("summary", {}, counted(jobs.size, "sweep")), list);
}

function line(name, sweep, rows, onFilter, onOpen) {
  const link = button(name, () => onFilter(filterOf(name)), { class: "link", title: "show its jobs" });
  const best = bestOf(rows);
  const shown = best ? button(`best ${best.objective} ${digits(best.value)}`, () => onOpen(best.id), { class: "link" }) : "";
  const started = when(Math.min(...rows.map((row) => row.started ?? Infinity)));
  const state = sweep.running ? statusOf("running") : "";
  return element("div", { class: "sweep" }, link, state, stateBar(sweep, rows), shown, element("span", { class: "dim" }, started));
}

/** Return the filter for the jobs of a sweep; a name with blanks or quotes is quoted as for a shell. */
function filterOf(name) {
  return /^[\w./:@%+-]*$/.test(name) ? `sweep=${name}` : `"sweep=${name.replace(/["\\]/g, "\\$&")}"`;
}

/** Return a bar with a piece for each status of the jobs; those without a folder wait. */
function stateBar(sweep, rows) {
  const counts = statusCounts(rows);
  if (sweep.jobs > rows.length) counts.push(["waiting", sweep.jobs - rows.length]);
  const parts = counts.map(([status, count]) => [status, count, `${count} ${status}`]);
  const words = parts.map(([, , text]) => text).join(", ");
  return element("span", { class: "states" }, shareBar(parts), `${counted(Math.max(sweep.jobs, rows.length), "job")}: ${words}`);
}

/** Return the best job; null if they go by different metrics, or it is not known whether more is better. */
function bestOf(rows) {
  const ended = rows.filter((row) => typeof row.value === "number" && row.status !== "failed");
  const [first] = ended;
  if (!first || first.maximize === null || ended.some((row) => row.objective !== first.objective)) return null;
  const isBetter = (a, b) => (first.maximize ? a.value > b.value : a.value < b.value);
  return ended.reduce((best, row) => (isBetter(row, best) ? row : best));
}
