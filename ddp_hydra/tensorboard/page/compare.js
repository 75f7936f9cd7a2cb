// Two or more runs in columns: what differs between them.

import { button, digits, element, line, replace, statusOf, titleOf } from "./dom.js";
import { get } from "./server.js";

const PARTS = [["choices", "groups"], ["config", "config"], ["metrics", "last metrics"]];

export async function compareView(panel, ids, onClose, onOpen) {
  const body = element("div");
  replace(panel, titleOf(`${ids.length} runs compared`, "", onClose), body);
  try {
    const found = await get("diff", { id: ids });
    replace(body, tableOf(found, onOpen));
  } catch (error) {
    replace(body, element("p", { class: "note" }, error.message));
  }
}

function tableOf(found, onOpen) {
  const heads = found.names.map((name, place) => {
    return element("th", {}, button(name, () => onOpen(found.ids[place]), { class: "link" }));
  });
  const lines = [line("status", found.status.map(statusOf))];
  if (found.code) lines.push(line("code", found.code.map((code) => code.slice(0, 16))));
  for (const [part, title] of PARTS) {
    const entries = Object.entries(found[part]);
    if (!entries.length && part !== "config") continue;
    lines.push(element("tr", { class: "part" }, element("th", { colspan: String(1 + heads.length) }, title)));
    const notes = part === "config" ? [...found.problems] : [];
    if (!entries.length && !notes.length) notes.push("no differing keys");
    for (const note of notes) lines.push(element("tr", {}, element("td", { colspan: String(1 + heads.length) }, note)));
    for (const [key, values] of entries) lines.push(line(key, part === "metrics" ? shortOf(values) : values));
  }
  const head = element("thead", {}, element("tr", {}, element("th", {}, ""), ...heads));
  return element("table", { class: "facts diff" }, head, element("tbody", {}, ...lines));
}

/** Return numbers with four digits; with all where different ones would read the same. */
function shortOf(texts) {
  const short = texts.map((text) => digits(Number(text)) || text);
  return new Set(short).size === new Set(texts).size ? short : texts;
}
