// The columns of the table: what each shows, and what it is sorted by.

import { digits, duration, statusOf, when } from "./dom.js";
import { attemptsBar, attemptTitle, endOf, spanOf, timeBar, timeShares } from "./bars.js";

const MOST_KEYS = 12;
const NOT_KEYS = /^(model|data|tags|experiment|faults?|resume|detach)$|^(cluster|dispatch|results|hydra)\b/;

const text = (key, title, width, of) => ({ key, title, width, text: of, value: of });
const number = (key, title, width, value, write = digits) => ({
  key, title, width, value, isNumber: true, text: (row) => write(value(row)),
});

/** Return the columns for some rows; one for each override in which they differ. */
export function columnsFor(rows, metrics, now) {
  const objectives = new Set(rows.map((row) => row.objective).filter(Boolean));
  const objective = objectives.size === 1 ? [...objectives][0] : "objective";
  const keys = differing(rows);
  const span = spanOf(rows, now());
  const took = (row) => (row.status === "running" ? endOf(row, now()) - row.started : row.wall_s);
  return [
    { ...text("name", "run", 230, (row) => row.name), cell: (row, table) => table.link(row) },
    { ...text("status", "status", 90, (row) => row.status), cell: (row) => statusOf(row.status) },
    number("value", objective, 40 + 7 * objective.length, (row) => row.value),
    ...metrics.filter((name) => name !== objective).map((name) => number(`metric:${name}`, name, wide(name), (row) => row.metrics[name])),
    { ...number("progress", "steps", 100, (row) => row.step), text: steps },
    number("took", "took", 76, took, duration),
    ...(rows.some(causeOf) ? [text("message", "cause", 200, causeOf)] : []),
    {
      ...number("attempts", "attempts", 110, (row) => row.attempts.length),
      cell: (row) => attemptsBar(row, now(), span),
      hint: "when each attempt ran; a mark is the end of one that failed",
    },
    {
      ...number("wait", "where time went", 116, (row) => timeShares(row).wait),
      cell: timeBar,
      hint: "waiting for data, compute, waiting for gradients, the rest, failed attempts; sorted by the share of data",
    },
    ...keys.map((key) => text(`key:${key}`, key, wide(key), (row) => overridesOf(row)[key] ?? "")),
    number("started", "started", 165, (row) => row.started, when),
    number("ranks", "ranks", 60, (row) => row.ranks),
    text("model", "model", 100, (row) => row.model),
    text("data", "data", 100, (row) => row.data),
    text("tags", "tags", 120, (row) => row.tags.join(", ")),
  ];
}

function wide(title) {
  return Math.min(190, 40 + 7 * title.length);
}

/** Return why a run failed, stopped early, or was started again. */
function causeOf(row) {
  if (row.stopped_early) return `stopped early: ${row.stopped_early}`;
  if (row.message || !row.attempts.length) return row.message;
  return row.attempts.map(attemptTitle).join("; ");
}

function steps(row) {
  if (typeof row.step !== "number") return "";
  const total = row.total_steps && row.status !== "done" ? `/${digits(row.total_steps)}` : "";
  return digits(row.step) + total;
}

const split = new WeakMap();

/** Return the overrides of a run by key. */
export function overridesOf(row) {
  let found = split.get(row);
  if (!found) {
    found = Object.create(null);
    for (const word of row.overrides) {
      const at = word.indexOf("=");
      found[(at < 0 ? word : word.slice(0, at)).replace(/^\+*/, "")] = at < 0 ? "" : word.slice(at + 1);
    }
    split.set(row, found);
  }
  return found;
}

/** Return the keys of overrides that are not the same in all rows. */
function differing(rows) {
  const seen = new Map();
  for (const row of rows) {
    for (const [key, value] of Object.entries(overridesOf(row))) {
      const known = seen.get(key) || { values: new Set(), count: 0 };
      known.values.add(value);
      known.count += 1;
      seen.set(key, known);
    }
  }
  const differ = [...seen].filter(([key, { values, count }]) => (values.size > 1 || count < rows.length) && !NOT_KEYS.test(key));
  return differ.map(([key]) => key).slice(0, MOST_KEYS);
}

/** Return the names of the metrics that can be shown in columns of their own. */
export function extraMetrics(rows) {
  const names = new Set();
  for (const row of rows) for (const name of Object.keys(row.metrics)) names.add(name);
  return [...names].sort().slice(0, 200);
}
