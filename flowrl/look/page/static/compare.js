// Compare: what differs between runs, and what came of it.

import { html } from "./vendor/htm-preact.js";
import { useView } from "./data.js";
import { number } from "./format.js";

function Compare({ at, go, run, runs, last }) {
  const others = runs.filter((one) => one !== run);
  const other = others.find((one) => one.name === at.other) ?? others[0];
  const { answer, error } = useView(other && "compare", { run: run.name, other: other?.name }, last);
  if (!other) return html`<section class="card pad comparison"><h2>Compare</h2><p class="hint">This page shows one run. Open several: <code>flowrl look RUN RUN</code></p></section>`;
  return html`<section class="card pad comparison">
    <h2>${run.name} against
      <select aria-label="Other run" value=${other.name} onChange=${(e) => go({ other: e.target.value })}>${others.map((one) => html`<option value=${one.name}>${one.name}</option>`)}</select>
    </h2>
    ${error && html`<p class="hint">${error}</p>`}
    ${answer && html`
      ${answer.basis.map((text) => html`<p class="hint">${text}</p>`)}
      ${answer.tables.map((table) => html`<section>
        <h3>${table.title}</h3>
        ${table.rows.length
          ? html`<table><thead><tr>${table.columns.map((name, i) => html`<th class=${i ? "n" : "text"}>${name}</th>`)}</tr></thead>
              <tbody>${table.rows.map((cells) => html`<tr>${cells.map((cell, i) => html`<td class=${i ? "n" : "text"}>${typeof cell === "number" ? number(cell, 4) : cell}</td>`)}</tr>`)}</tbody></table>`
          : html`<p class="hint">${table.empty}</p>`}
      </section>`)}`}
  </section>`;
}

export { Compare };
