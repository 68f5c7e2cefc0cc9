// Charts: curves by uPlot, sparklines and strips as SVG.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { number } from "./format.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SERIES = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];

/** A number that changes with the color scheme. */
function useScheme() {
  const [count, set] = useState(0);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => set((n) => n + 1);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return count;
}

function axis(extra) {
  const grid = { stroke: style("--line-faint"), width: 1 };
  return { stroke: style("--muted"), font: `11px ${style("--sans")}`, grid, ticks: { show: false }, ...extra };
}

/** The ends of a vertical axis; constant values are in its middle. */
function room(low, high) {
  if (low === null) return [0, 1];
  if (low === high) return [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
  return uPlot.rangeNum(low, high, 0.08, true);
}

/** The numbers of an axis, with as many decimals as their distance needs. */
function ticks(_, values, axis, space, distance) {
  const most = Math.max(...values.map(Math.abs));
  if (most >= 1e5 || (most && most < 1e-3)) return values.map((value) => number(value, 2));
  const decimals = [0, 1, 2, 3, 4, 5, 6].find((n) => Math.abs(distance * 10 ** n - Math.round(distance * 10 ** n)) < 1e-6) ?? 6;
  return values.map((value) => value.toFixed(decimals).replace("-", "−"));
}

/**
 * Curves over a shared x. `lines` are {label, values, color, dots}; `marks` are vertical lines {x, kind}.
 * A click calls `onPick` with the nearest x.
 */
function Curves({ x, lines, marks = [], height = 132, sync = "curves", onPick, onHover }) {
  const box = useRef();
  const plot = useRef();
  const now = useRef();
  now.current = { marks, onPick, onHover, x };
  const scheme = useScheme();
  const shape = lines.map((one) => `${one.label}${one.dots}${one.color}`).join();
  const data = [x, ...lines.map((one) => one.values)];
  useLayoutEffect(() => {
    const made = new uPlot(
      {
        width: box.current.clientWidth || 300,
        height,
        legend: { show: false },
        padding: [6, 8, 0, 0],
        cursor: { sync: { key: sync }, points: { size: 6 }, drag: { x: false, y: false }, y: false },
        scales: { x: { time: false }, y: { range: (_, low, high) => room(low, high) } },
        axes: [
          axis({ size: 24, gap: 4, space: 56, values: ticks }),
          axis({ size: 50, gap: 6, space: 26, values: ticks }),
        ],
        series: [
          {},
          ...lines.map((one, i) => ({
            stroke: style(one.color ?? SERIES[i % SERIES.length]),
            width: 1.5,
            spanGaps: true,
            points: one.dots ? { show: true, size: 5, fill: style(one.color ?? SERIES[i % SERIES.length]) } : { show: false },
          })),
        ],
        hooks: {
          draw: [(u) => now.current.marks.forEach((mark) => drawMark(u, mark))],
          setCursor: [(u) => now.current.onHover?.(u.cursor.idx)],
        },
      },
      data,
      box.current,
    );
    const click = () => made.cursor.idx != null && now.current.onPick?.(now.current.x[made.cursor.idx], made.cursor.idx);
    made.over.addEventListener("click", click);
    const resized = new ResizeObserver(() => made.setSize({ width: box.current.clientWidth, height }));
    resized.observe(box.current);
    plot.current = made;
    return () => { resized.disconnect(); made.destroy(); plot.current = null; };
  }, [shape, scheme, height]);
  useEffect(() => { plot.current?.setData(data); }, [x, ...lines.map((one) => one.values)]);
  useEffect(() => { plot.current?.redraw(false); }, [JSON.stringify(marks)]);
  return html`<div class="plot" ref=${box}></div>`;
}

function drawMark(u, { x, kind }) {
  const at = Math.round(u.valToPos(x, "x", true)) + 0.5;
  if (at < u.bbox.left || at > u.bbox.left + u.bbox.width + 1) return;
  const { ctx } = u;
  ctx.save();
  ctx.strokeStyle = style({ cursor: "--accent", alarm: "--bad" }[kind] ?? "--muted");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash(kind === "resume" ? [4, 4] : []);
  ctx.globalAlpha = kind === "resume" ? 0.6 : 0.75;
  ctx.beginPath();
  ctx.moveTo(at, u.bbox.top);
  ctx.lineTo(at, u.bbox.top + u.bbox.height);
  ctx.stroke();
  ctx.restore();
}

/** A small curve without axes; `at` marks one value. */
function Spark({ values, at, label }) {
  const known = (values ?? []).filter((value) => value !== null);
  if (known.length < 2) return html`<svg class="spark" viewBox="0 0 120 28" aria-hidden="true"></svg>`;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const place = (value, i) => [2 + (116 * i) / (values.length - 1), 25 - (22 * (value - low)) / (high - low || 1)];
  const points = values.map((value, i) => value !== null && place(value, i)).filter(Boolean);
  const dot = at !== undefined && values[at] !== null && values[at] !== undefined ? place(values[at], at) : points.at(-1);
  return html`<svg class="spark" viewBox="0 0 120 28" preserveAspectRatio="none" role="img" aria-label=${label}>
    <polyline points=${points.map((point) => point.map((n) => n.toFixed(1)).join(",")).join(" ")} />
    <circle cx=${dot[0]} cy=${dot[1]} r="2.2" />
  </svg>`;
}

/** Cells of the scale 0 to 4, from the lowest to the highest score. */
function shade(value, low, high) {
  if (value === null || value === undefined) return "none";
  const share = high > low ? (value - low) / (high - low) : value > 0 ? 1 : 0;
  return `s${Math.min(4, Math.max(0, Math.round(4 * share)))}`;
}

/** A drawing of flowrl.draw as an element that fills its place. */
function parsedSvg(text) {
  const svg = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  svg.removeAttribute("width");
  svg.removeAttribute("height");
  return document.importNode(svg, true);
}

export { Curves, SERIES, Spark, parsedSvg, shade };
