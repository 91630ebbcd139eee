// A line plot: SVG of our own, with a grid, a legend and the values under the pointer.
import { h, svg } from "/page/dom.js";
import { number, seconds, t } from "/page/texts.js";
import { KEEP } from "/page/figures.js";

const [W, H] = [520, 190];
const [LEFT, RIGHT, TOP, BOTTOM] = [54, 10, 10, 22];

const SPANS = [60, 120, 300]; // seconds a plot may show: the shortest that holds all

const UNITS = {
  rate: (value) => number(value, value < 10 && value > 0 ? 1 : 0),
  count: (value) => number(value, value % 1 ? 1 : 0),
  share: (value) => `${number(value * 100, value < 0.1 && value > 0 ? 1 : 0)} %`,
  time: (value) => (value ? seconds(value) : "0"),
};

const LEAST = { rate: 10, count: 4, share: 0.04, time: 0.004 }; // that an axis reaches

/** A round number at or above `value`, with how many steps lead there. */
function scale(value, unit) {
  if (unit === "share" && value > 0.5) return [1, 4];
  const size = Math.max(value * 1.05, LEAST[unit]);
  const power = 10 ** Math.floor(Math.log10(size));
  for (const [factor, steps] of [[1, 4], [2, 4], [4, 4], [6, 3], [8, 4], [10, 5]]) if (factor * power >= size * 0.9999) return [factor * power, steps];
  return [10 * power, 5];
}

export class Plot {
  /** `lines`: [name of the value, class, text name]. */
  constructor(title, unit, lines) {
    this.title = title;
    this.unit = UNITS[unit];
    this.kind = unit;
    this.lines = lines;
    this.picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", tabindex: "0" });
    this.legend = h("div", { className: "legend" });
    this.heading = h("h2");
    this.node = h("figure", { className: "plot" }, h("figcaption", {}, this.heading, this.legend), this.picture);
    this.points = [];
    this.at = null; // index of the point looked at
    this.picture.addEventListener("pointermove", (event) => this.look(event));
    this.picture.addEventListener("pointerleave", () => this.leave());
    this.picture.addEventListener("blur", () => this.leave());
    this.picture.addEventListener("keydown", (event) => this.step(event));
  }

  draw(points, now) {
    this.points = points;
    this.now = now;
    const age = points.length ? now - points[0].at : 0;
    this.span = SPANS.find((span) => age <= span) ?? KEEP;
    this.x = (at) => LEFT + ((at - now + this.span) / this.span) * (W - LEFT - RIGHT);
    const values = points.flatMap((point) => this.lines.map(([name]) => point[name])).filter((value) => value != null);
    const [top, steps] = scale(Math.max(0, ...values), this.kind);
    this.y = (value) => H - BOTTOM - (Math.min(value, top) / top) * (H - TOP - BOTTOM);
    const grid = [];
    for (let i = 0; i <= steps; i++) {
      const y = this.y((top * i) / steps);
      grid.push(svg("line", { x1: LEFT, x2: W - RIGHT, y1: y, y2: y, class: i ? "grid" : "axis" }));
      grid.push(svg("text", { x: LEFT - 8, y: y + 3.5, class: "tick end" }, this.unit((top * i) / steps)));
    }
    const step = this.span > 60 ? 60 : 15;
    for (let back = 0; back <= this.span; back += step) {
      const word = !back ? t("now") : step === 60 ? t("minutes", { m: `−${back / 60}` }) : `−${back} s`;
      grid.push(svg("text", { x: this.x(now - back), y: H - 6, class: `tick ${back ? "middle" : "end"}` }, word));
    }
    const nothing = values.length ? [] : [svg("text", { x: (W + LEFT) / 2, y: H / 2, class: "tick middle" }, t("noData"))];
    this.cursor = svg("g");
    this.picture.replaceChildren(...grid, ...this.lines.flatMap((line) => this.path(line)), ...nothing, this.cursor);
    this.heading.textContent = t(this.title);
    this.picture.setAttribute("aria-label", `${t(this.title)}: ${this.describe(points.length - 1)}`);
    this.mark();
  }

  path([name, kind]) {
    const runs = [];
    let run = null;
    for (const point of this.points) {
      if (point[name] == null) run = null;
      else (run ??= (runs.push([]), runs.at(-1))).push(`${this.x(point.at).toFixed(1)} ${this.y(point[name]).toFixed(1)}`);
    }
    return runs.filter((one) => one.length > 1).map((one) => svg("path", { d: `M${one.join("L")}`, class: `line ${kind}` }));
  }

  look(event) {
    const box = this.picture.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * W - LEFT) / (W - LEFT - RIGHT);
    const at = this.now - this.span + share * this.span;
    let best = null;
    this.points.forEach((point, i) => {
      if (best === null || Math.abs(point.at - at) < Math.abs(this.points[best].at - at)) best = i;
    });
    this.seen = best === null ? null : this.points[best];
    this.mark();
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.points.length) return;
    event.preventDefault();
    const from = this.seen ? this.points.indexOf(this.seen) : this.points.length;
    this.seen = this.points[Math.max(0, Math.min(this.points.length - 1, from + by))];
    this.mark();
  }

  leave() {
    this.seen = null;
    this.mark();
  }

  /** The legend with the values looked at, or the newest. */
  mark() {
    const index = this.seen ? this.points.indexOf(this.seen) : this.points.length - 1;
    const point = this.points[index];
    this.legend.replaceChildren(...this.lines.map(([name, kind, text]) => {
      const value = point?.[name];
      return h("span", { className: kind }, h("i"), text.startsWith("p") && text !== "prompted" ? text : t(text), h("b", {}, value == null ? "–" : this.unit(value)));
    }));
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    if (!this.seen || index < 0) return;
    const x = this.x(point.at);
    this.cursor.append(svg("line", { x1: x, x2: x, y1: TOP, y2: H - BOTTOM, class: "cursor" }));
    this.cursor.append(svg("text", { x: Math.min(x + 6, W - 70), y: TOP + 8, class: "tick" }, t("ago", { s: number(this.now - point.at) })));
    for (const [name, kind] of this.lines) {
      if (point[name] != null) this.cursor.append(svg("circle", { cx: x, cy: this.y(point[name]), r: 3.2, class: `dot ${kind}` }));
    }
  }

  describe(index) {
    const point = this.points[index];
    return point ? this.lines.map(([name, , text]) => `${text} ${point[name] == null ? "–" : this.unit(point[name])}`).join(", ") : t("noData");
  }
}
