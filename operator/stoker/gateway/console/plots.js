// Plots by uPlot, which `make setup` puts into vendor/. Without it every plot is a table, and says what is missing.
import { el, fill, panel } from "./dom.js";
import { count, number } from "./format.js";

const TABLE_ROWS = 200;
let loading;

/** The plotting library, or null where it is not installed. */
export function library() {
  loading ??= (async () => {
    try {
      const found = await import("./vendor/uPlot.esm.js");
      await styled("vendor/uPlot.min.css");
      return found.default;
    } catch {
      return null;
    }
  })();
  return loading;
}

function styled(address) {
  return new Promise((resolve, reject) => {
    document.head.append(el("link", { rel: "stylesheet", href: address, on: { load: resolve, error: reject } }));
  });
}

export const MISSING =
  "Plots need uPlot, which is not installed here: run `make setup` with npm and a network. " +
  "Until then the values are tables.";

/**
 * A figure of one or two series by step. `series`: `{title, colour, pick(point), points?, least?}`: `points` are not
 * joined by a line, and of a series whose `least` value matters that one is told, of others the span of all values.
 * `update(points)` takes all points, in the order of their steps. Without a value no picture is drawn.
 */
export function figure(uPlot, title, series, signal, group) {
  const picture = el("div", { class: "plot", role: "img", "aria-label": `${title}: no value yet` });
  const summary = el("ul", { class: "legend muted" });
  const body = el("tbody");
  const held = el(
    "div",
    { class: "scroll", hidden: Boolean(uPlot), tabindex: 0, role: "region", "aria-label": `${title} as a table` },
    el(
      "table",
      {},
      el("caption", { class: "unseen" }, title),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "Step"),
          series.map((one) => el("th", { scope: "col", class: "number" }, one.title)),
        ),
      ),
      body,
    ),
  );
  const toggle = el(
    "button",
    {
      type: "button",
      class: "quiet",
      "aria-expanded": String(!uPlot),
      on: {
        click: () => {
          held.hidden = !held.hidden;
          toggle.setAttribute("aria-expanded", String(!held.hidden));
          if (!held.hidden) tabulate();
        },
      },
    },
    "Table",
  );
  const element = panel(title, uPlot && picture, summary, uPlot && toggle, held);
  element.classList.add("figure");
  let points = [],
    plot = null;

  const columns = () => [points.map((point) => point.step), ...series.map((one) => points.map(one.pick))];

  function build() {
    plot?.destroy();
    plot = new uPlot(options(series, picture.clientWidth || 400, group), columns(), picture);
  }

  function tabulate() {
    const last = points.slice(-TABLE_ROWS).reverse();
    fill(
      body,
      last.map((point) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, count(point.step)),
          series.map((one) => el("td", { class: "number" }, number(one.pick(point)))),
        ),
      ),
    );
  }

  function update(found) {
    points = found;
    const shown = series.map((one) => [one, told(one, points)]).filter(([, text]) => text);
    const words = shown.map(([one, text]) => el("li", {}, series.length > 1 && swatch(one), text));
    fill(summary, words.length ? words : el("li", {}, "No value yet."));
    const text = shown.map(([, one]) => one).join("; ");
    picture.setAttribute("aria-label", `${title}: ${text || "no value yet"}`);
    if (!held.hidden) tabulate();
    if (!uPlot || !picture.isConnected) return;
    if (plot) plot.setData(columns());
    else if (shown.length) build();
  }

  if (uPlot) {
    const size = new ResizeObserver(() => plot?.setSize({ width: picture.clientWidth, height: HEIGHT }));
    size.observe(picture);
    const theme = () => plot && build();
    addEventListener("stoker-theme", theme);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", theme);
    signal.addEventListener(
      "abort",
      () => {
        size.disconnect();
        plot?.destroy();
        removeEventListener("stoker-theme", theme);
        dark.removeEventListener("change", theme);
      },
      { once: true },
    );
  }
  return { element, update };
}

/** The colour of a series, round where it is drawn as points. */
const swatch = ({ colour, points }) =>
  el("span", {
    class: points ? "swatch round" : "swatch",
    style: { background: `var(${colour})` },
    "aria-hidden": "true",
  });

/** A series in words: its newest value, and its lowest or the span of all. */
function told(one, points) {
  let last = null,
    least = null,
    most = null,
    values = 0;
  for (const point of points) {
    const value = one.pick(point);
    if (value === null || value === undefined) continue;
    values += 1;
    last = { step: point.step, value };
    if (!least || value < least.value) least = last;
    if (!most || value > most.value) most = last;
  }
  if (!last) return "";
  const newest = `${one.title} ${number(last.value)} at step ${count(last.step)}`;
  if (values === 1) return `${newest}, 1 value`;
  const lowest = `lowest ${number(least.value)} at step ${count(least.step)}`;
  const span = one.least ? lowest : `from ${number(least.value)} to ${number(most.value)}`;
  return `${newest}, ${span} (${count(values)} values)`;
}

const HEIGHT = 200;
/** Distances of the lines of the grid: a step has no parts. */
const WHOLE_STEPS = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();

/** Whether a series has no two values, so that no line can be seen. */
function isOnePoint(values) {
  let found = 0;
  for (const value of values) {
    if (value !== null && value !== undefined) found += 1;
    if (found > 1) return false;
  }
  return true;
}

function options(series, width, group) {
  const colours = getComputedStyle(document.documentElement);
  const probe = (name) => resolved(colours.getPropertyValue(name).trim());
  const axis = {
    stroke: probe("--muted"),
    grid: { stroke: probe("--line"), width: 1 },
    ticks: { stroke: probe("--line"), width: 1 },
    font: "11px system-ui, sans-serif",
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: group }, points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: false } },
    axes: [
      {
        ...axis,
        label: "Step",
        labelSize: 16,
        labelFont: axis.font,
        size: 32,
        incrs: WHOLE_STEPS,
        values: (_, splits) => splits.map((step) => count(step)),
      },
      { ...axis, size: 64, values: (_, splits) => splits.map((value) => number(value)) },
    ],
    series: [
      {},
      ...series.map((one) => ({
        label: one.title,
        stroke: probe(one.colour),
        width: one.points ? 0 : 1.5,
        spanGaps: true,
        points: {
          show: (plot, index) => one.points || isOnePoint(plot.data[index]),
          size: 6,
          fill: probe(one.colour),
        },
      })),
    ],
  };
}

/** A colour that a canvas takes: `light-dark()` is resolved by the browser. */
function resolved(colour) {
  const probe = el("span", { style: { color: colour, display: "none" } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
