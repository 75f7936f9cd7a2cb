// One run: the cause of its failure, its time line, where its time went, its last metrics, and its logs.

import { addPieces, inWords, piecesOf, shareBar, timeShares } from "./bars.js";
import { bytes, cells, digits, duration, element, line, replace, titleOf, when } from "./dom.js";
import { curveView } from "./curve.js";
import { logView } from "./log.js";
import { get } from "./server.js";

const MOST_CAUSE = 160;
let asked = 0;

/** Fill the panel with a run. `isOther`: another run than before, so that nothing of it stays. */
export async function runView(panel, id, isOther, onClose, now) {
  const turn = ++asked;
  if (isOther) replace(panel, titleOf("…", "", onClose));
  let found;
  try {
    found = await get("run", { id });
  } catch (error) {
    if (turn === asked) replace(panel, titleOf("", "", onClose), element("p", { class: "note" }, error.message));
    return;
  }
  if (turn !== asked) return;
  const log = logView(found, isOther ? null : panel.querySelector(".log"));
  const top = panel.scrollTop;
  replace(
    panel,
    titleOf(found.name, found.status, onClose),
    failureOf(found),
    factsOf(found, now()),
    section("Time line", timeLine(found, now())),
    found.curve.length > 1 ? section(found.objective, curveView(found)) : null,
    section("Where time went", timeWent(found)),
    section("Last metrics", pairs(Object.entries(found.metrics).map(([name, value]) => [name, digits(value)]))),
    section("Checkpoints", pairs(checkpointsOf(found))),
    section("Logs", log),
  );
  panel.scrollTop = isOther ? 0 : top;
}

function section(title, content) {
  return content ? element("section", {}, element("h3", {}, title), content) : null;
}

/** Return a table of names and values; null without any. */
function pairs(entries) {
  const lines = entries.filter(([, value]) => value !== "" && value !== null);
  if (!lines.length) return null;
  return element("table", { class: "facts" }, element("tbody", {}, ...lines.map(([name, value]) => line(name, [value]))));
}

function failureOf(found) {
  const failure = found.failure;
  if (!failure && found.stopped_early) {
    return element("p", { class: "note" }, `stopped early: ${found.stopped_early}`);
  }
  if (!failure && !found.message) return null;
  const where = failure ? whereOf(failure) : "";
  const box = element("div", { class: "failure" }, element("strong", {}, where || "why"), element("p", {}, failure?.message || found.message));
  if (failure?.place) box.append(element("p", { class: "dim" }, failure.place));
  if (failure?.traceback) {
    box.append(element("details", {}, element("summary", {}, "traceback"), element("pre", {}, failure.traceback)));
  }
  return box;
}

function whereOf(failure) {
  const parts = [
    failure.kind,
    typeof failure.rank === "number" ? `rank ${failure.rank}` : "",
    failure.host ? `on ${failure.host}` : "",
    typeof failure.step === "number" ? `step ${failure.step}` : "",
  ];
  return parts.filter(Boolean).join(", ");
}

function factsOf(found, now) {
  const took = found.status === "running" ? now - found.started : found.wall_s;
  const better = found.maximize === null ? "" : ` (${found.maximize ? "more" : "less"} is better)`;
  const total = Object.values(found.bytes).reduce((sum, size) => sum + size, 0);
  return pairs([
    ["objective", typeof found.value === "number" ? `${found.objective} ${digits(found.value)}${better}` : ""],
    ["steps", [found.step, found.total_steps].filter((one) => typeof one === "number").map(digits).join(" of ")],
    ["started", [when(found.started), duration(took)].filter(Boolean).join(", took ")],
    ["ranks", digits(found.ranks)],
    ["speed", found.samples_per_s ? `${digits(found.samples_per_s)} samples/s` : ""],
    ["restarts", found.restarts ? `${found.restarts}, ${digits(found.steps_lost)} steps again` : ""],
    ["tags", found.tags.join(", ")],
    ["typed", found.overrides.join(" ")],
    ["code", found.code.slice(0, 16)],
    ["size", total ? bytes(total) : ""],
    ["profile", found.profile],
    ["folder", found.place],
  ]);
}

/** Return the time line: a bar with its attempts and faults, and a line for each attempt. */
function timeLine(found, now) {
  const pieces = piecesOf(found, now);
  if (!pieces.length) return null;
  const [from, to] = [pieces[0].begin, Math.max(...pieces.map((piece) => piece.end))];
  const bar = element("div", { class: "bar large" });
  addPieces(bar, pieces, from, Math.max(to - from, 1e-3));
  const axis = element("div", { class: "axis" }, element("span", {}, when(from)), element("span", {}, when(to)));
  const failed = found.attempts.map((attempt) => {
    const how = attempt.failure ? `${whereOf(attempt.failure)}: ${shortened(attempt.failure.message)}` : "failed";
    return [digits(attempt.attempt), when(attempt.started), duration(attempt.wall_s), digits(attempt.world_size), digits(attempt.steps_done), how];
  });
  const logged = found.logged.filter((one) => !found.attempts.some((attempt) => attempt.attempt === one.attempt)).map((one) => {
    const steps = `${digits(one.from_step)} to ${digits(one.to_step)}`;
    return [digits(one.attempt), when(one.first), duration(one.last - one.first), "", steps, found.status];
  });
  const head = element("thead", {}, element("tr", {}, ...cells("th", ["attempt", "began", "took", "ranks", "steps", "how it ended"])));
  const lines = [...failed, ...logged].map((texts) => element("tr", {}, ...cells("td", texts)));
  return element("div", {}, bar, axis, element("table", { class: "facts attempts" }, head, element("tbody", {}, ...lines)));
}

function shortened(text) {
  return text.length > MOST_CAUSE ? `${text.slice(0, MOST_CAUSE)}…` : text;
}

function timeWent(found) {
  const parts = inWords(timeShares(found).parts);
  if (!parts.length) return null;
  const legend = parts.map(([kind, , words]) => element("li", { "data-kind": kind }, words));
  const { rank, times } = found.slowest;
  const slow = typeof times === "number" && times >= 1.15
    ? element("p", { class: "dim" }, `Rank ${digits(rank)} took ${times.toFixed(2)} times as long as the median rank; the others waited for it.`)
    : null;
  return element("div", {}, shareBar(parts), element("ul", { class: "legend" }, ...legend), slow);
}

function checkpointsOf(found) {
  return Object.entries(found.checkpoints).map(([name, one]) => [name, `step ${digits(one.step)}, ${bytes(one.bytes)}`]);
}
