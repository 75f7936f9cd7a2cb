// The table of runs. Only rows that can be seen are in the document, so that thousands of runs are no burden.

import { button, element, replace } from "./dom.js";
import { linkTo } from "./state.js";

const ROW_PX = 28;
const BEYOND = 10;

export class RunsTable {
  /** `hooks`: onOpen(id), onSort(sort), onPick(id, isPicked), isPicked(id). */
  constructor(hooks) {
    this.hooks = hooks;
    this.rows = [];
    this.columns = [];
    this.head = element("thead");
    this.body = element("tbody");
    this.cols = element("colgroup");
    this.table = element("table", { class: "runs" }, this.cols, this.head, this.body);
    this.box = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, this.table);
    this.box.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  show(rows, columns, sort, opened) {
    this.columns = columns;
    this.opened = opened;
    this.sort = sort;
    this.rows = sorted(rows, columns, sort);
    this.drawHead();
    this.draw();
  }

  mark(opened) {
    this.opened = opened;
  }

  drawHead() {
    const key = JSON.stringify([this.columns.map((column) => [column.key, column.title]), this.sort]);
    if (key === this.headKey) return;
    this.headKey = key;
    const by = this.sort.replace(/^-/, "");
    const cells = this.columns.map((column) => {
      const isSorted = column.key === by;
      const direction = this.sort.startsWith("-") ? "descending" : "ascending";
      const arrow = isSorted ? (direction === "ascending" ? " ▲" : " ▼") : "";
      const sort = () => this.hooks.onSort(next(this.sort, column));
      const content = button(column.title + arrow, sort, { title: column.hint || column.title });
      const head = element("th", { "aria-sort": isSorted ? direction : "none", "data-key": column.key }, content);
      head.classList.toggle("right", Boolean(column.isNumber));
      return head;
    });
    replace(this.head, element("tr", {}, element("th", { class: "pick" }), ...cells));
    const widths = [30, ...this.columns.map((column) => column.width)].map((width) => {
      const col = element("col");
      col.style.width = `${width}px`;
      return col;
    });
    replace(this.cols, ...widths);
    this.table.style.width = `${30 + this.columns.reduce((sum, column) => sum + column.width, 0)}px`;
  }

  draw() {
    const seen = Math.ceil(this.box.clientHeight / ROW_PX) || 30;
    const most = Math.max(0, this.rows.length - seen);
    const first = Math.max(0, Math.min(Math.floor(this.box.scrollTop / ROW_PX), most) - BEYOND);
    const last = Math.min(this.rows.length, first + seen + 2 * BEYOND);
    const focused = document.activeElement?.closest?.("tr")?.dataset.id;
    const shown = this.rows.slice(first, last).map((row) => this.rowOf(row));
    replace(this.body, spacer(first), ...shown, spacer(this.rows.length - last));
    if (focused) this.body.querySelector(`tr[data-id="${CSS.escape(focused)}"] a`)?.focus({ preventScroll: true });
  }

  rowOf(row) {
    const box = element("input", { type: "checkbox", "aria-label": `pick ${row.name}` });
    box.checked = this.hooks.isPicked(row.id);
    box.addEventListener("change", () => this.hooks.onPick(row.id, box.checked));
    const cells = this.columns.map((column) => {
      const content = column.cell ? column.cell(row, this) : column.text(row);
      const cell = element("td", {}, content);
      if (typeof content === "string" && content) cell.title = content;
      cell.classList.toggle("right", Boolean(column.isNumber));
      return cell;
    });
    const made = element("tr", { "data-id": row.id }, element("td", { class: "pick" }, box), ...cells);
    made.classList.toggle("opened", row.id === this.opened);
    made.addEventListener("click", (event) => {
      if (!event.target.closest("input, a")) this.hooks.onOpen(row.id);
    });
    return made;
  }

  /** Return a link that opens a run here, or in a new tab of the browser. */
  link(row) {
    const cut = row.name.lastIndexOf("/") + 1;
    const parts = [element("span", { class: "folder" }, row.name.slice(0, cut)), element("span", {}, row.name.slice(cut))];
    const link = element("a", { class: "path", href: linkTo({ run: row.id, diff: [] }), target: "_top", title: row.name }, ...parts);
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      this.hooks.onOpen(row.id);
    });
    return link;
  }
}

function spacer(rows) {
  const made = element("tr", { class: "spacer", "aria-hidden": "true" });
  made.style.height = `${rows * ROW_PX}px`;
  return made;
}

/** Return the next order after a click on a heading: numbers begin with the largest, texts with a. */
function next(sort, column) {
  const first = column.isNumber ? `-${column.key}` : column.key;
  const second = column.isNumber ? column.key : `-${column.key}`;
  return sort === first ? second : first;
}

/** Order rows by a column; those without a value come last in both directions. */
export function sorted(rows, columns, sort) {
  const isDown = sort.startsWith("-");
  const column = columns.find((one) => one.key === sort.replace(/^-/, "")) || columns[0];
  const valued = rows.map((row) => [column.value(row), row]);
  const isNone = (value) => value === null || value === undefined || value === "";
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b));
  valued.sort(([a, first], [b, second]) => {
    if (isNone(a) || isNone(b)) return isNone(a) - isNone(b) || collator.compare(first.name, second.name);
    return (isDown ? compare(b, a) : compare(a, b)) || collator.compare(first.name, second.name);
  });
  return valued.map(([, row]) => row);
}

const collator = new Intl.Collator("en", { numeric: true });
