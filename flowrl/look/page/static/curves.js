// Curves: every metric as a small chart, by the node that reports it, with one cursor for all.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { Curves, SERIES } from "./charts.js";
import { number } from "./format.js";
import { headlines } from "./now.js";

const AXES = { steps: null, rows: "total/rows", tokens: "total/tokens", seconds: "total/seconds" };

function CurvesTab({ at, go, run, runs, metrics, graph, step }) {
  const x = at.x in AXES ? at.x : "steps";
  const several = runs.length > 1 && at.all !== "0";
  const shown = several ? [run, ...runs.filter((one) => one !== run)].slice(0, SERIES.length) : [run];
  const groups = useMemo(() => grouped(run, metrics[run.name], graph, at.q ?? ""), [run, metrics, graph, at.q]);
  const count = groups.reduce((sum, [, keys]) => sum + keys.length, 0);
  return html`
    <div class="bar">
      <input type="search" placeholder="Search metrics" aria-label="Search metrics" title="Search (/)" value=${at.q ?? ""} onInput=${(e) => go({ q: e.target.value })} />
      <span class="hint">${count} of ${run.metrics_count ?? count} metrics</span>
      <span class="space"></span>
      ${runs.length > 1 && html`<label><input type="checkbox" checked=${several} onChange=${(e) => go({ all: e.target.checked ? undefined : "0" })} /> all runs</label>`}
      <div class="choice" role="group" aria-label="Horizontal axis">
        ${Object.keys(AXES).map((name) => html`<button aria-pressed=${name === x} onClick=${() => go({ x: name === "steps" ? undefined : name })}>${name}</button>`)}
      </div>
    </div>
    ${several && html`<ul class="legend">${shown.map((one, i) => html`<li><span class="stroke" data-series=${i + 1}></span>${one.name}</li>`)}${runs.length > shown.length && html`<li class="hint">${shown.length} of ${runs.length} runs</li>`}</ul>`}
    <div class="scroll">
      ${groups.map(
        ([title, keys]) => html`<section class="multiples" key=${title}>
          <h2>${title}</h2>
          <div class="grid">
            ${keys.map(({ key, node, color }) => html`<${Small} key=${key} name=${key} node=${node} color=${color} shown=${shown} metrics=${metrics} x=${AXES[x]} step=${step} onPick=${(to) => go({ step: to, row: undefined })} />`)}
          </div>
        </section>`,
      )}
      ${!count && html`<p class="hint">No metric matches.</p>`}
    </div>`;
}

/** Keys in sections, in the order of the graph's nodes; with the node that reports each, and its color. */
function grouped(run, mine, graph, search) {
  if (!mine?.training) return [];
  const wanted = search.toLowerCase();
  const nodes = new Map((graph?.nodes ?? []).map((node, i) => [node.name, { ...node, i }]));
  const owners = new Map([...nodes.values()].flatMap((node) => node.metrics.map((key) => [key, node.name])));
  const sections = { Main: [], "Held out": [], Training: [], Seconds: [] };
  const main = headlines(mine).map(({ key }) => key);
  const add = (title, key, node) => key.toLowerCase().includes(wanted) && sections[main.includes(key) ? "Main" : title].push({ key, node, color: nodes.get(node)?.color });
  Object.keys(mine.validation.columns).forEach((key) => add("Held out", key));
  for (const key of Object.keys(mine.training.columns)) {
    if (key.startsWith("timing/")) add("Seconds", key, key.slice(7));
    else if (!key.startsWith("total/")) add("Training", key, owners.get(key));
  }
  const order = ({ node }) => nodes.get(node)?.i ?? nodes.size;
  Object.values(sections).forEach((keys) => keys.sort((a, b) => order(a) - order(b)));
  sections.Main.sort((a, b) => main.indexOf(a.key) - main.indexOf(b.key));
  return Object.entries(sections).filter(([, keys]) => keys.length);
}

/** One metric; drawn once it is near the window. */
function Small({ name, node, color, shown, metrics, x, step, onPick }) {
  const box = useRef();
  const [near, setNear] = useState(false);
  const [hovered, setHovered] = useState(null);
  useEffect(() => {
    const seen = new IntersectionObserver(([entry]) => entry.isIntersecting && setNear(true), { rootMargin: "400px" });
    seen.observe(box.current);
    return () => seen.disconnect();
  }, []);
  const { axis, lines, marks, dots } = useMemo(() => series(name, shown, metrics, x, step), [name, shown, metrics, x, step]);
  const place = hovered ?? lastOf(lines[0]?.values);
  return html`<figure class="card small" ref=${box} data-metric=${name}>
    <figcaption title=${node ? `${name}, reported by ${node}` : name}><span class="swatch" data-role=${color}></span><span>${name}</span><strong>${number(lines[0]?.values[place] ?? null)}</strong></figcaption>
    ${near && axis.length > 0 ? html`<${Curves} x=${axis} lines=${lines} marks=${marks} onHover=${setHovered} onPick=${(_, i) => onPick(dots[i])} />` : html`<div class="plot"></div>`}
  </figure>`;
}

function lastOf(values) {
  return values ? values.findLastIndex((value) => value !== null) : -1;
}

/** The curves of a metric over one axis that all runs share. */
function series(name, shown, metrics, x, step) {
  const parts = shown.map((run) => {
    const mine = metrics[run.name];
    const held = mine?.validation && name in mine.validation.columns;
    const part = held ? mine.validation : mine?.training;
    const values = part?.columns[name] ?? [];
    return { run, held, steps: values.length ? part.steps : [], values, at: places(mine, part, x) };
  });
  const axis = [...new Set(parts.flatMap((part) => (part.steps.length ? part.at : [])))].sort((a, b) => a - b);
  const index = new Map(axis.map((value, i) => [value, i]));
  const dots = Array(axis.length).fill(null);
  const lines = parts.map((part, i) => {
    const values = Array(axis.length).fill(null);
    part.steps.forEach((one, k) => { values[index.get(part.at[k])] = part.values[k]; if (i === 0) dots[index.get(part.at[k])] = one; });
    return { label: part.run.name, values, dots: part.held, color: SERIES[i] };
  });
  const [first] = parts;
  const mine = metrics[first.run.name];
  const toX = (one) => { const k = mine?.training?.steps.indexOf(one) ?? -1; return x && k >= 0 ? mine.training.columns[x]?.[k] : one; };
  const marks = (first.run.starts ?? []).filter((one) => one > 0).map((one) => ({ x: toX(one), kind: "resume" }));
  const alarms = (first.run.alarms ?? []).filter(([, metric]) => metric === name).map(([one]) => ({ x: toX(one), kind: "alarm" }));
  return { axis, lines, dots, marks: [...marks, ...alarms, { x: toX(step), kind: "cursor" }] };
}

/** Where the steps of a part are on the axis: validations at the step that they follow. */
function places(mine, part, x) {
  if (!x || !part) return part?.steps ?? [];
  const known = new Map(mine.training.steps.map((one, k) => [one, mine.training.columns[x]?.[k] ?? one]));
  return part.steps.map((one) => known.get(one) ?? 0);
}

export { CurvesTab };
