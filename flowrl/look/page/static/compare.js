// Compare: what the configurations of all runs differ in, and what came of it.

import { html, useLayoutEffect, useRef } from "./vendor/htm-preact.js";
import { parsedSvg } from "./charts.js";
import { useView } from "./data.js";
import { line, number } from "./format.js";

function Compare({ runs, last }) {
  const { answer, error } = useView(runs.length > 1 ? "compare" : null, {}, last);
  if (runs.length < 2) return html`<section class="card pad comparison"><h2>Compare</h2><p class="hint">This page shows one run. Open several: <code>flowrl look RUN RUN</code></p></section>`;
  return html`<section class="card pad comparison">
    <h2>Compare</h2>
    ${!answer && html`<p class="hint">${error ?? "Loading …"}</p>`}
    ${answer && html`
      <p class="hint">${answer.sides.map((side) => html`<span class="side"><b>${side.name}</b> ${side.runs.join(", ")}</span>`)}</p>
      <p class="hint">${answer.basis}</p>
      <div class="parts">
        ${answer.tables.map((table) => html`<section><h3>${table.title}</h3><${Table} ...${table} /></section>`)}
      </div>
      ${answer.diff && html`<section><h3>Graphs</h3><${Diff} svg=${answer.diff} /></section>`}
      ${answer.held_out && html`<${HeldOut} found=${answer.held_out} sides=${answer.sides} />`}`}
  </section>`;
}

function Table({ columns, rows, empty }) {
  if (!rows.length) return html`<p class="hint">${empty}</p>`;
  return html`<table>
    <thead><tr>${columns.map((name, i) => html`<th class=${i ? "n" : "text"}>${name}</th>`)}</tr></thead>
    <tbody>${rows.map((cells) => html`<tr>${cells.map((cell, i) => html`<td class=${!i ? "text" : typeof cell === "string" ? "n value" : "n"}>${typeof cell === "string" ? cell : number(cell, 4)}</td>`)}</tr>`)}</tbody>
  </table>`;
}

/** Both graphs in one, as flowrl.draw marks what differs. */
function Diff({ svg }) {
  const box = useRef();
  useLayoutEffect(() => { box.current.replaceChildren(parsedSvg(svg)); }, [svg]);
  return html`<div class="graph diff" ref=${box}></div>`;
}

/** The prompts that one side solves and the other does not. */
function HeldOut({ found, sides }) {
  return html`<section>
    <h3>Held-out answers</h3>
    <p class="hint">${found.text}</p>
    ${found.changed.length > 0 && html`<table class="changed">
      <thead><tr><th class="text">prompt</th><th class="n">truth</th>${sides.slice(0, 2).map((side) => html`<th class="n">${side.name}</th><th class="text">${side.name} answers</th>`)}</tr></thead>
      <tbody>
        ${found.changed.map((one) => html`<tr><td class="text" title=${one.prompt}>${line(one.prompt)}</td><td class="n">${line(one.ground_truth, 40)}</td>
          ${[0, 1].map((k) => html`<td class="n">${number(one.scores[k])}</td><td class="text" title=${one.responses[k]}>${line(one.responses[k])}</td>`)}</tr>`)}
      </tbody>
    </table>`}
    ${found.count > found.changed.length && html`<p class="hint">${found.changed.length} of ${found.count} prompts that changed sides.</p>`}
  </section>`;
}

export { Compare };
