// Bars: when the attempts of a run ran, and where its time went.

import { digits, duration, element, when } from "./dom.js";

const MOST_SPREAD = 40;

export function endOf(row, now) {
  if (typeof row.started !== "number") return null;
  return row.status === "running" ? Math.max(now, row.started) : row.started + (row.wall_s || 0);
}

/** Return the pieces of a run in time: {begin, end, kind, title}. Failed attempts come before the last one. */
export function piecesOf(row, now) {
  const end = endOf(row, now);
  if (end === null) return [];
  const pieces = [];
  let at = row.started;
  for (const attempt of row.attempts) {
    const begin = attempt.started ?? at;
    const stop = begin + (attempt.wall_s || 0);
    pieces.push({ begin, end: stop, kind: "lost", title: attemptTitle(attempt) });
    at = Math.max(at, stop);
  }
  const first = Math.min(row.started, ...pieces.map((piece) => piece.begin));
  const failed = row.attempts.length > row.restarts && row.status !== "running";
  if (end > at) {
    const kind = failed && pieces.length ? "rest" : row.status;
    pieces.push({ begin: at, end, kind, title: kind === "rest" ? "ending" : `attempt ${row.attempts.length}: ${row.status}` });
  }
  if (pieces.length && pieces[0].begin > first) {
    pieces.unshift({ begin: first, end: pieces[0].begin, kind: "rest", title: "starting" });
  }
  return pieces;
}

export function attemptTitle(attempt) {
  const where = [
    attempt.kind || "failed",
    typeof attempt.rank === "number" ? `rank ${attempt.rank}` : "",
    typeof attempt.step === "number" ? `step ${attempt.step}` : "",
    duration(attempt.wall_s),
  ];
  return `attempt ${digits(attempt.attempt)}: ${where.filter(Boolean).join(", ")}`;
}

/** Return the time that the bars of some rows share; {from: null} where they would be too short to be seen. */
export function spanOf(rows, now) {
  let [from, to, longest] = [Infinity, -Infinity, 0];
  for (const row of rows) {
    const end = endOf(row, now);
    if (end === null) continue;
    const begin = Math.min(row.started, ...row.attempts.map((one) => one.started ?? row.started));
    [from, to, longest] = [Math.min(from, begin), Math.max(to, end), Math.max(longest, end - begin)];
  }
  if (to - from <= MOST_SPREAD * longest) return { from, length: Math.max(to - from, 1e-3) };
  return { from: null, length: Math.max(longest, 1e-3) };
}

/** Return the number of rows with each status, by its name. */
export function statusCounts(rows) {
  const counts = {};
  for (const row of rows) counts[row.status] = (counts[row.status] || 0) + 1;
  return Object.entries(counts).sort();
}

/** Return the bar of a run in the table, placed in the time that all rows share, or else as long as it took. */
export function attemptsBar(row, now, span) {
  const bar = element("div", { class: "bar" });
  const pieces = piecesOf(row, now);
  if (pieces.length) addPieces(bar, pieces, span.from ?? pieces[0].begin, span.length);
  return bar;
}

/** Fill a bar with pieces, and mark where a failed attempt has ended. */
export function addPieces(bar, pieces, from, length) {
  const place = (node, begin, end) => {
    node.style.left = `${clamp((100 * (begin - from)) / length)}%`;
    if (end !== undefined) node.style.width = `${clamp((100 * (end - begin)) / length)}%`;
    bar.append(node);
  };
  for (const piece of pieces) {
    const title = `${piece.title}, ${when(piece.begin)}, ${duration(piece.end - piece.begin)}`;
    place(element("span", { "data-kind": piece.kind, title }), piece.begin, piece.end);
  }
  for (const piece of pieces) {
    if (piece.kind === "lost") place(element("span", { class: "fault", title: piece.title }), piece.end);
  }
}

function clamp(percent) {
  return Math.min(100, Math.max(0, percent)).toFixed(3);
}

/** Return where the time of a run went, in seconds, and `wait`, the share of the training that waited for data. */
export function timeShares(row) {
  const own = row.attempts.filter((one) => (one.started ?? row.started) >= row.started - 1); // not of an earlier process
  const lost = own.reduce((sum, one) => sum + (one.wall_s || 0), 0);
  if (typeof row.train_s !== "number" || typeof row.wait_s !== "number" || typeof row.wall_s !== "number") {
    return { parts: lost ? [["lost", lost]] : [], wait: row.metrics?.data_wait ?? null };
  }
  const rest = Math.max(0, row.wall_s - row.train_s - lost);
  const steps = Math.max(0, row.train_s - row.wait_s);
  const exchange = Math.min(steps, row.exchange_s ?? 0);
  const work = row.exchange_s === null ? "steps" : "compute";
  const parts = [["data", row.wait_s], [work, steps - exchange], ["exchange", exchange], ["rest", rest], ["lost", lost]];
  return { parts: parts.filter(([, seconds]) => seconds > 0), wait: row.train_s ? row.wait_s / row.train_s : null };
}

const PART_NAMES = {
  data: "waiting for data",
  compute: "compute",
  exchange: "waiting for gradients of other ranks",
  steps: "compute and exchange",
  rest: "starting, validating, saving",
  lost: "attempts that failed",
};

export function timeBar(row) {
  const { parts, wait } = timeShares(row);
  if (!parts.length) return wait === null ? "" : `data ${Math.round(100 * wait)} %`;
  return shareBar(inWords(parts));
}

/** Return parts of the time with their words: [kind, seconds, words]. */
export function inWords(parts) {
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  const share = (seconds) => `${duration(seconds)}, ${Math.round((100 * seconds) / total)} %`;
  return parts.map(([kind, seconds]) => [kind, seconds, `${PART_NAMES[kind]} ${share(seconds)}`]);
}

/** Return a bar with a piece for each of the parts: [kind, amount, title]. */
export function shareBar(parts) {
  const total = parts.reduce((sum, [, amount]) => sum + amount, 0);
  const pieces = parts.map(([kind, amount, title]) => {
    const piece = element("span", { "data-kind": kind, title });
    piece.style.width = `${clamp((100 * amount) / total)}%`;
    return piece;
  });
  return element("div", { class: "bar shares" }, ...pieces);
}
