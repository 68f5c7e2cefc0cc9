// Run: what ran, on what, from which data, and what was recorded of it.

import { html } from "./vendor/htm-preact.js";
import { useView } from "./data.js";

function Run({ run, graph, last }) {
  const { answer, error } = useView("run", { run: run.name }, last);
  if (error) return html`<p class="hint pad">${error}</p>`;
  if (!answer) return html`<p class="hint pad">Loading …</p>`;
  const copy = (text) => navigator.clipboard?.writeText(text);
  return html`
    <div class="facts">
      ${answer.sections.map(
        ([title, facts]) => html`<section class="card">
          <h2>${title}</h2>
          <dl>${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${String(value)}</dd>`)}</dl>
        </section>`,
      )}
    </div>
    <section class="card source">
      <h2>Graph<span class="hint">as Mermaid</span>${graph && html`<button class="more" onClick=${() => copy(graph.mermaid)}>copy</button>`}</h2>
      <pre class="scroll" tabindex="0">${graph?.mermaid ?? "No graph can be drawn from this folder."}</pre>
    </section>`;
}

export { Run };
