// Time: the nodes of a step in lanes by place, and what a node costs over the run.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { useView } from "./data.js";
import { bytes, number, percent, seconds } from "./format.js";

function Time({ at, go, run, step, last }) {
  const { answer, error, current } = useView(step ? "time" : null, { run: run.name, step }, last);
  const [chosen, choose] = useState(null);
  useEffect(() => { choose(null); }, [step]);
  if (error) return html`<p class="hint pad">${error}</p>`;
  if (!answer) return html`<p class="hint pad">${step ? "Loading …" : "No step is done yet."}</p>`;
  const length = Math.max(answer.end - answer.begin, 1e-9);
  const one = chosen ?? answer.longest;
  const padded = answer.costs.some((cost) => cost.padding);
  return html`
    <section class="card lanes" aria-busy=${current ? "false" : "true"}>
      <h2>Step ${answer.step}<span class="hint">${seconds(length)}${answer.idle.map(([place, share]) => html`; ${place} idle ${percent(share)}`)}</span></h2>
      ${answer.lanes.length
        ? html`<div class="timeline">
            <div class="ruler"><span></span><div>${ticks(length).map((at) => html`<i style=${{ left: `${(100 * at) / length}%` }}>${seconds(at)}</i>`)}</div></div>
            ${answer.lanes.map(
              (lane) => html`<div class="lane"><span title=${lane.place}>${lane.place}</span>
                <div style=${{ height: `${lane.depth * 28}px` }}>
                  ${lane.spans.map(
                    (span) => html`<button
                      class=${`span ${span.kind}${one === span ? " chosen" : ""}`} data-role=${span.color}
                      style=${{ left: `${(100 * (span.start - answer.begin)) / length}%`, width: `${(100 * (span.end - span.start)) / length}%`, top: `${span.row * 28}px` }}
                      title=${`${span.name}, ${seconds(span.end - span.start)}`} onMouseEnter=${() => choose(span)} onFocus=${() => choose(span)} onClick=${() => go({ tab: "now", node: span.name })}
                    ><span>${span.name}</span></button>`,
                  )}
                </div></div>`,
            )}
          </div>
          <p class="hint described">${one && html`<b>${one.name}</b> ${one.kind === "node" ? "" : one.kind} ${seconds(one.end - one.start)}, ${percent((one.end - one.start) / length)} of the step${one.rows ? `, ${number(one.rows)} rows` : ""}${one.tokens ? `, ${number(one.tokens)} tokens` : ""}${one.bytes ? `, ${bytes(one.bytes)}` : ""}`}</p>`
        : html`<p class="hint">${answer.note ?? "No span of this step was recorded."}</p>`}
    </section>
    <section class="card costs">
      <h2>Costs<span class="hint">${answer.basis}</span></h2>
      <div class="scroll">
        <table>
          <thead><tr><th class="text">node</th><th class="share">share</th><th class="n">of all</th><th class="n">calls</th><th class="n">mean</th><th class="n">slowest</th><th class="n">total</th><th class="n">tokens/s</th>${padded && html`<th class="n">padding</th>`}</tr></thead>
          <tbody>
            ${answer.costs.map(
              (cost) => html`<tr>
                <td class="text"><div><span class="swatch" data-role=${cost.color}></span>${cost.name}${cost.critical && html`<span class="tag">critical path</span>`}</div></td>
                <td class="share"><svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect class="rest" width="100" height="8" /><rect data-role=${cost.color} width=${(100 * Math.min(1, cost.share)).toFixed(1)} height="8" /><rect class="wasted" x=${(100 * Math.min(1, cost.share) * (1 - (cost.padding ?? 0))).toFixed(1)} width=${(100 * Math.min(1, cost.share) * (cost.padding ?? 0)).toFixed(1)} height="8" /></svg></td>
                <td class="n">${percent(cost.share)}</td><td class="n">${number(cost.calls)}</td><td class="n">${seconds(cost.mean)}</td><td class="n">${seconds(cost.slowest)}</td><td class="n">${seconds(cost.total)}</td>
                <td class="n">${number(cost.tokens_per_second)}</td>${padded && html`<td class="n">${percent(cost.padding)}</td>`}
              </tr>`,
            )}
          </tbody>
        </table>
      </div>
    </section>`;
}

/** Four to eight round times. */
function ticks(length) {
  const power = 10 ** Math.floor(Math.log10(length));
  const step = [0.1, 0.2, 0.5, 1, 2].map((n) => n * power).find((n) => length / n <= 8);
  return Array.from({ length: Math.floor(length / step) + 1 }, (_, i) => i * step).filter((at) => at < length * 0.97);
}

export { Time };
