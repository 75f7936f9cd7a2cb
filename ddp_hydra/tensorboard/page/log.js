// The end of a rank's log, with a rule where an attempt begins.

import { bytes, element, replace } from "./dom.js";
import { get } from "./server.js";

const MARKER = /^--- attempt \d+ ---$/;

/** Return the box of the logs of a run. `before`: the box as it is; its rank stays chosen. */
export function logView(found, before) {
  if (!found.logs.length) return null;
  const chosen = Number(before?.dataset.rank ?? found.failure?.rank ?? found.logs[0].rank);
  const rank = found.logs.some((log) => log.rank === chosen) ? chosen : found.logs[0].rank;
  const old = before?.querySelector("pre");
  const kept = old && old.scrollTop + old.clientHeight < old.scrollHeight - 4 ? old.scrollTop : null; // null: at the end
  const pre = element("pre", { tabindex: "0" });
  pre.append(...(old?.childNodes ?? []));
  const choice = element("select", { "aria-label": "rank" });
  for (const log of found.logs) {
    choice.append(element("option", { value: String(log.rank) }, `rank ${log.rank}, ${bytes(log.bytes)}`));
  }
  choice.value = String(rank);
  const box = element("div", { class: "log", "data-rank": String(rank) }, choice, pre);
  choice.addEventListener("change", () => {
    box.dataset.rank = choice.value;
    load(found.id, choice.value, pre, null);
  });
  load(found.id, rank, pre, kept);
  return box;
}

/** Fill in the log; `top`: where to scroll to, null for the end. */
async function load(id, rank, pre, top) {
  try {
    const log = await get("log", { id, rank });
    replace(pre, ...linesOf(log));
    pre.scrollTop = top ?? pre.scrollHeight;
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
