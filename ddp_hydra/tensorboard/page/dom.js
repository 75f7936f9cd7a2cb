// Make elements, and write numbers and times. Nothing here reads markup.

/** Return a new element. Children are elements or texts; a text never becomes markup. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Return a new element of an SVG picture. */
export function picture(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  replace(made, ...children);
  return made;
}

export function button(text, onClick, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", onClick);
  return made;
}

export function statusOf(status) {
  return element("span", { class: "status", "data-kind": status }, status);
}

/** Return a line of a table, with a heading in front of the texts. */
export function line(heading, texts) {
  return element("tr", {}, element("th", {}, heading), ...cells("td", texts));
}

export function cells(name, texts) {
  return texts.map((text) => element(name, {}, text));
}

/** Return the title of the panel. */
export function titleOf(name, status, onClose) {
  const close = button("✕", onClose, { class: "close", "aria-label": "close" });
  return element("div", { class: "title" }, element("h2", {}, name), status ? statusOf(status) : null, close);
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined).map(childOf));
}

function childOf(child) {
  return child instanceof Node ? child : document.createTextNode(visible(child));
}

/** Return a text in which characters that turn the direction of writing, or control a terminal, can be seen. */
export function visible(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** Return a number with four digits, a whole one with all. */
export function digits(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  if (Math.abs(value) < 1e-4) return value.toExponential(3);
  return String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (typeof seconds !== "number" || seconds < 0) return "";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return hours ? `${hours}:${two(minutes)}:${two(rest)} h` : `${minutes}:${two(rest)} min`;
}

/** Return a time in seconds since 1970 as the local date and time. */
export function when(seconds) {
  if (typeof seconds !== "number") return "";
  const date = new Date(seconds * 1000 - new Date(seconds * 1000).getTimezoneOffset() * 60000);
  return Number.isNaN(date.getTime()) ? "" : date.toISOString().slice(0, 19).replace("T", " ");
}

export function bytes(count) {
  if (typeof count !== "number") return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 1000 && unit < units.length - 1; unit++) count /= 1000;
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}
