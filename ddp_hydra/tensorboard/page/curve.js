// The curve of the objective over time, with a line where an attempt failed.

import { digits, element, picture } from "./dom.js";

const [WIDTH, HEIGHT, EDGE] = [600, 120, 4];

export function curveView(found) {
  const times = found.curve.map(([at]) => at);
  const values = found.curve.map(([, , value]) => value);
  const [from, to] = [Math.min(...times), Math.max(...times)];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (at) => EDGE + ((WIDTH - 2 * EDGE) * (at - from)) / Math.max(to - from, 1e-9);
  const y = (value) => HEIGHT - EDGE - ((HEIGHT - 2 * EDGE) * (value - low)) / Math.max(high - low, 1e-12);
  const points = found.curve.map(([at, , value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const faults = found.attempts
    .map((attempt) => (attempt.started ?? NaN) + (attempt.wall_s || 0))
    .filter((at) => at > from && at < to)
    .map((at) => picture("line", { class: "fault", x1: x(at), x2: x(at), y1: 0, y2: HEIGHT }));
  const drawn = picture(
    "svg", { class: "curve", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    ...faults, picture("polyline", { points }),
  );
  drawn.setAttribute("aria-label", `from ${digits(values[0])} to ${digits(values.at(-1))}`);
  const [, firstStep] = found.curve[0];
  const [, lastStep] = found.curve.at(-1);
  const words = [`step ${digits(firstStep)}: ${digits(values[0])}`, `${digits(low)} to ${digits(high)}`, `step ${digits(lastStep)}: ${digits(values.at(-1))}`];
  return element("div", {}, drawn, element("div", { class: "axis" }, ...words.map((text) => element("span", {}, text))));
}
