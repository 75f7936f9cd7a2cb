// The end of a rank's log, with a rule where an attempt begins.

import { bytes, element, replace } from "./dom.js";
import { get } from "./server.js";

const MARKER = /^--- attempt \d+ ---$/;

/** Return the box of the logs of a run. `before`: the box as it is; its rank stays chosen. */
export function logView(found, before) {
  if (!found.logs.length) return null;
  const chosen = Number(before?.dataset.rank ?? found.failure?.rank ?? found.logs[0].rank);
  const rank = found.logs.some((log) => log.rank === chosen) ? chosen : found.logs[0].rank;
  const pre = element("pre", { tabindex: "0" });
  pre.append(...(before?.querySelector("pre")?.childNodes ?? []));
  const choice = element("select", { "aria-label": "rank" });
  for (const log of found.logs) {
    choice.append(element("option", { value: String(log.rank) }, `rank ${log.rank}, ${bytes(log.bytes)}`));
  }
  choice.value = String(rank);
  const box = element("div", { class: "log", "data-rank": String(rank) }, choice, pre);
  choice.addEventListener("change", () => {
    box.dataset.rank = choice.value;
    load(found.id, choice.value, pre);
  });
  load(found.id, rank, pre);
  return box;
}

async function load(id, rank, pre) {
  try {
    const log = await get("log", { id, rank });
    const isAtEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4;
    const top = pre.scrollTop;
    replace(pre, ...linesOf(log));
    pre.scrollTop = isAtEnd ? pre.scrollHeight : top;
  } catch (error) {
    replace(pre, error.message);
  }
}

function linesOf(log) {
  const parts = log.is_cut ? [element("span", { class: "dim" }, "… the beginning is left out\n")] : [];
  let text = "";
  for (const line of log.text.split("\n")) {
    if (MARKER.test(line)) {
      parts.push(text, element("span", { class: "marker" }, line), "\n");
      text = "";
    } else {
      text += `${line}\n`;
    }
  }
  parts.push(text || "");
  return parts.some((part) => part) ? parts : ["(nothing)"];
}
