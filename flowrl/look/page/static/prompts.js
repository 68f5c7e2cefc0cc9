// Prompts: every prompt over steps as a strip, by whether it was ever solved; two of its answers side by side.

import { html, useMemo, useState } from "./vendor/htm-preact.js";
import { shade } from "./charts.js";
import { linked, useView } from "./data.js";
import { line, number } from "./format.js";

const KINDS = { never: "never solved", unlearned: "unlearned", learned: "learned", always: "always solved" };
const PAGE = 200;

function Prompts({ at, go, run, last, step }) {
  const [search, setSearch] = useState("");
  const [pages, setPages] = useState(1);
  const { answer, error, current } = useView("prompts", { run: run.name, of: at.of }, last);
  const shown = useMemo(() => {
    const wanted = search.toLowerCase();
    return (answer?.prompts ?? []).filter((one) => (!at.kind || one.kind === at.kind) && (!wanted || `${one.prompt} ${one.text}`.toLowerCase().includes(wanted)));
  }, [answer, search, at.kind]);
  if (error) return html`<p class="hint pad">${error}</p>`;
  if (!answer) return html`<p class="hint pad">Loading …</p>`;
  const chosen = answer.prompts.find((one) => String(one.prompt) === at.prompt) ?? shown[0];
  return html`
    <section class="card list" aria-busy=${current ? "false" : "true"}>
      <div class="bar">
        <input type="search" placeholder="Search prompts" aria-label="Search prompts" title="Search (/)" value=${search} onInput=${(e) => setSearch(e.target.value)} />
        ${answer.sources.length > 1 && html`<label>of <select aria-label="Source" value=${answer.of} onChange=${(e) => go({ of: e.target.value, prompt: undefined })}>${answer.sources.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>`}
        <div class="choice" role="group" aria-label="Which prompts">
          <button aria-pressed=${!at.kind} onClick=${() => go({ kind: undefined })}>all ${answer.prompts.length}</button>
          ${Object.entries(KINDS).map(([kind, title]) => html`<button aria-pressed=${at.kind === kind} onClick=${() => go({ kind })}>${title} ${answer.counts[kind] ?? 0}</button>`)}
        </div>
      </div>
      <div class="scroll">
        <table>
          <thead><tr><th class="text">prompt</th><th class="strip">${answer.unit} ${answer.first} to ${answer.last}</th><th class="n">attempts</th><th class="n">first solved</th><th class="n">latest</th></tr></thead>
          <tbody>
            ${shown.slice(0, pages * PAGE).map(
              (one) => html`<tr key=${one.prompt} class=${one === chosen ? "chosen" : ""} onClick=${() => go({ prompt: one.prompt })}>
                <td class="text"><a href="#" onClick=${(e) => e.preventDefault()}>${line(one.text) || `prompt ${one.prompt}`}</a></td>
                <td class="strip"><${Strip} one=${one} answer=${answer} step=${step} /></td>
                <td class="n">${one.attempts}</td><td class="n">${number(one.first)}</td><td class="n">${number(one.latest)}</td>
              </tr>`,
            )}
          </tbody>
        </table>
        ${shown.length > pages * PAGE && html`<p class="pad"><button onClick=${() => setPages(pages + 1)}>${PAGE} more of ${shown.length - pages * PAGE}</button></p>`}
        ${!shown.length && html`<p class="hint pad">No prompt matches.</p>`}
      </div>
      <p class="hint basis">${answer.basis}</p>
    </section>
    <section class="card detail">${chosen && html`<${Answers} run=${run} chosen=${chosen} of=${answer.of} key=${chosen.prompt} />`}</section>`;
}

/** The mean scores of a prompt where it was sampled, from the first step on the left to the last. */
function Strip({ one, answer, step }) {
  const span = Math.max(1, answer.last - answer.first + 1);
  const wide = Math.max(answer.every ?? 1, span / 60);
  const place = (at) => Math.min(span - wide, Math.max(0, at - answer.first - (wide - 1) / 2));
  return html`<svg class="strips" viewBox=${`0 0 ${span + (answer.every ?? 1) - 1} 10`} preserveAspectRatio="none" role="img" aria-label=${one.steps.map((at, i) => `${at}: ${number(one.scores[i])}`).join(", ").slice(0, 300)}>
    ${one.steps.map((at, i) => html`<rect class=${shade(one.scores[i], answer.low, answer.high)} x=${answer.every ? at - answer.first : place(at)} y="0" width=${wide * 0.94} height="10"><title>${`${answer.unit} ${at}: ${number(one.scores[i])}`}</title></rect>`)}
  </svg>`;
}

function Answers({ run, chosen, of }) {
  const { answer, error, current } = useView("prompt", { run: run.name, prompt: chosen.prompt, of });
  const [sides, setSides] = useState([0, -1]);
  if (error) return html`<p class="hint pad">${error}</p>`;
  if (!answer) return html`<p class="hint pad">Loading …</p>`;
  const { answers } = answer;
  const place = (k) => (sides[k] < 0 ? answers.length + sides[k] : sides[k]);
  return html`<div class="scroll" aria-busy=${current ? "false" : "true"}>
    <div class="about"><h2>prompt ${String(chosen.prompt)}</h2></div>
    <div class="conversation">
      ${answer.messages.map((message) => html`<article class="turn"><h3>${message.role}</h3><div class="said">${message.text}</div></article>`)}
      ${answer.ground_truth !== null && html`<article class="turn truth"><h3>ground truth</h3><div class="said">${answer.ground_truth}</div></article>`}
    </div>
    ${answer.note && html`<p class="hint pad">${answer.note}</p>`}
    ${answers.length > 0 &&
    html`<div class="sides">
      ${[0, 1].map((k) => {
        const one = answers[place(k)];
        return html`<article class="turn sampled">
          <h3><select aria-label=${`Answer ${k ? "B" : "A"}`} value=${place(k)} onChange=${(e) => setSides(sides.map((old, j) => (j === k ? Number(e.target.value) : old)))}>
            ${answers.map((other, i) => html`<option value=${i}>step ${other.step}, score ${number(other.score)}</option>`)}
          </select>${of === "training" && html`<a class="more" href=${linked({ tab: "rows", run: run.name, step: one.step, row: one.row_id })}>row</a>`}</h3>
          <div class="said">${one.response ?? "Its text was not recorded."}</div>
        </article>`;
      })}
    </div>`}
  </div>`;
}

export { Prompts };
