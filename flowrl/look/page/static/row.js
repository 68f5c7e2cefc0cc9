// One row: the conversation with its tokens in color, its numbers, its group, and why it was trained on as it was.

import { html, useMemo, useState } from "./vendor/htm-preact.js";
import { live, useView } from "./data.js";
import { line, number, signed } from "./format.js";

function Row({ run, step, id, at, go }) {
  const { answer, error, current } = useView("row", { run: run.name, step, row: id });
  if (error) return html`<p class="hint pad">${error}</p>`;
  if (!answer) return html`<p class="hint pad">Loading …</p>`;
  return html`<div class="scroll" aria-busy=${current ? "false" : "true"}>
    <div class="about">
      <h2>row <code>${answer.row_id}</code></h2>
      <${Numbers} shown=${answer.numbers.filter(([name]) => MAIN.test(name))} />
      <details><summary class="hint">all numbers</summary><${Numbers} shown=${answer.numbers.filter(([name]) => !MAIN.test(name))} /></details>
    </div>
    <${Conversation} answer=${answer} color=${at.color} pick=${(color) => go({ color })} />
    ${answer.group.length > 1 && html`<${Siblings} answer=${answer} go=${go} />`}
    <${Why} run=${run} answer=${answer} />
  </div>`;
}

const MAIN = /^(score|advantage|response_tokens|kl|mismatch|fate|reward\/(?!score$).*)$/;

function Numbers({ shown }) {
  return html`<dl class="numbers">
    ${shown.map(([name, value]) => html`<div><dt>${name.replaceAll("_", " ")}</dt><dd>${typeof value === "number" ? number(value, 4) : String(value)}</dd></div>`)}
  </dl>`;
}

function Conversation({ answer, color, pick }) {
  const { tokens, messages } = answer;
  const scales = tokens ? Object.keys(tokens.columns) : [];
  const by = scales.includes(color) ? color : scales.find((name) => varies(tokens.columns[name])) ?? scales[0];
  return html`<div class="conversation">
    ${tokens &&
    html`<div class="bar">
      <label>color <select aria-label="Color of tokens" value=${by} onChange=${(e) => pick(e.target.value)}>${scales.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      <${Scale} column=${tokens.columns[by]} />
    </div>`}
    ${answer.note && html`<p class="hint">${answer.note}</p>`}
    ${messages.map(
      (message, i) => html`<article class=${`turn ${message.sampled ? "sampled" : ""}`}>
        <h3>${message.role}${message.about && html`<span class="hint">${message.about}</span>`}</h3>
        ${message.tokens && tokens
          ? html`<${Tokens} tokens=${tokens} range=${message.tokens} by=${by} key=${`${answer.row_id}-${i}`} />`
          : html`<div class="said">${message.text}</div>`}
      </article>`,
    )}
    ${answer.ground_truth !== null && html`<article class="turn truth"><h3>ground truth</h3><div class="said">${answer.ground_truth}</div></article>`}
  </div>`;
}

function varies({ values }) {
  const known = values.filter((value) => value !== null);
  return known.some((value) => value !== 0) && known.length > 0;
}

/** The largest size on either side of zero, or the ends of a scale without a middle. */
function limits({ values, scale }) {
  const known = values.filter((value) => typeof value === "number");
  const low = known.reduce((a, b) => Math.min(a, b), Infinity);
  const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  if (scale === "sides") { const most = Math.max(Math.abs(low), Math.abs(high)); return [-most, most]; }
  return [low, high];
}

function tint(value, scale, [low, high]) {
  if (typeof value !== "number") return "";
  if (scale === "sides") {
    const level = high > 0 ? Math.round((4 * value) / high) : 0;
    return level > 0 ? `up${level}` : level < 0 ? `down${-level}` : "";
  }
  return `s${high > low ? Math.round((4 * (value - low)) / (high - low)) : value ? 4 : 0}`;
}

function Scale({ column }) {
  const ends = limits(column);
  if (!Number.isFinite(ends[0])) return null;
  if (ends[0] === ends[1] || !varies(column)) return html`<span class="scale">${number(column.values.find((value) => value !== null))} everywhere</span>`;
  const steps = column.scale === "sides" ? [-4, -3, -2, -1, 0, 1, 2, 3, 4].map((n) => (n > 0 ? `up${n}` : n < 0 ? `down${-n}` : "")) : ["s0", "s1", "s2", "s3", "s4"];
  const text = column.scale === "sides" ? signed : number;
  return html`<span class="scale"><span class="n">${text(ends[0])}</span>${steps.map((name) => html`<i class=${name}></i>`)}<span class="n">${text(ends[1])}</span></span>`;
}

/** Tokens as text, colored; the one under the pointer, or chosen by arrow keys, with all its numbers. */
function Tokens({ tokens, range, by }) {
  const [chosen, choose] = useState(null);
  const column = tokens.columns[by];
  const ends = useMemo(() => limits(column), [column]);
  const [first, end] = range;
  const places = Array.from({ length: end - first }, (_, i) => first + i);
  const keys = (event) => {
    const to = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!to) return;
    event.preventDefault();
    event.stopPropagation();
    choose(Math.min(end - 1, Math.max(first, (chosen ?? first - 1) + to)));
  };
  return html`<div class="said tokens" tabindex="0" aria-label="Tokens; arrow keys go through them" onKeyDown=${keys}
      onMouseOver=${(e) => e.target.dataset.i && choose(Number(e.target.dataset.i))}>
      ${places.map((i) => html`<span data-i=${i} class=${`${tint(column?.values[i], column?.scale, ends)}${i === chosen ? " chosen" : ""}`}>${tokens.text[i]}</span>`)}
    </div>
    <p class="token hint">
      ${chosen === null
        ? `${end - first} tokens`
        : html`<code>${JSON.stringify(tokens.text[chosen])}</code> token ${chosen - first + 1} of ${end - first}${Object.entries(tokens.columns).map(([name, { values, scale }]) => html`<span>${name} <b>${scale === "sides" ? signed(values[chosen]) : number(values[chosen])}</b></span>`)}`}
    </p>`;
}

function Siblings({ answer, go }) {
  return html`<section class="siblings">
    <h3>the group, ${answer.group.length} rows</h3>
    <table>
      <thead><tr><th class="text">response</th><th class="n">score</th><th class="n">advantage</th></tr></thead>
      <tbody>
        ${answer.group.map(
          (one) => html`<tr class=${one.row_id === answer.row_id ? "chosen" : ""} onClick=${() => go({ row: one.row_id })}>
            <td class="text"><a href="#" onClick=${(e) => e.preventDefault()}>${one.response === null ? one.row_id : line(one.response) || "(empty)"}</a></td>
            <td class="n">${number(one.score)}</td><td class="n">${signed(one.advantage)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </section>`;
}

/** Where the row's advantage comes from, and what of its step replays with the same bits: on request. */
function Why({ run, answer }) {
  const [asked, ask] = useState({});
  const mine = asked.of === `${answer.step} ${answer.row_id}` ? asked.view : null;
  const parameters = { why: { address: answer.address }, replay: { step: answer.step } }[mine];
  const { answer: found, error, current } = useView(mine, { run: run.name, ...parameters });
  const button = (view, title) => html`<button aria-pressed=${mine === view} onClick=${() => ask({ of: `${answer.step} ${answer.row_id}`, view })}>${title}</button>`;
  return html`<section class="why">
    ${live && html`<div class="bar">${answer.address && button("why", "Why this advantage")}${button("replay", `Replay step ${answer.step}`)}</div>`}
    ${mine && (current ? html`<pre>${found?.text ?? error}</pre>` : html`<p class="hint">Computing …</p>`)}
    <p class="hint">${answer.commands.map((command) => html`<code>${command}</code>`)}</p>
  </section>`;
}

export { Row };
