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
    if (!entries.length) lines.push(element("tr", {}, element("td", { colspan: String(1 + heads.length) }, "no differing keys")));
    const write = part === "metrics" ? (text) => digits(Number(text)) || text : String;
    for (const [key, values] of entries) lines.push(line(key, values.map(write)));
  }
  const head = element("thead", {}, element("tr", {}, element("th", {}, ""), ...heads));
  return element("table", { class: "facts diff" }, head, element("tbody", {}, ...lines));
}
