// Now: the graph with the numbers of a step, what runs, alarms, the time left and the newest rows.

import { html, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { Spark, parsedSvg } from "./charts.js";
import { linked, usePoll, useView } from "./data.js";
import { bytes, line, number, percent, seconds, short } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

function Now({ at, go, run, metrics, graph, failure, step, steps, last, following }) {
  const [tick, setTick] = useState(0);
  usePoll(() => setTick((n) => n + 1), run.status === "running" && following);
  const { answer: now, current } = useView(last || run.status === "running" ? "now" : null, { run: run.name, step: following ? undefined : step }, tick + last);
  const mine = metrics[run.name];
  const node = graph?.nodes.find((one) => one.name === at.node);
  return html`
    <section class="card drawing" aria-busy=${current ? "false" : "true"}>
      ${graph?.svg
        ? html`<${Drawing} graph=${graph} now=${now} chosen=${at.node} onPick=${(name) => go({ node: name === at.node ? undefined : name })} />`
        : failure && html`<${NodeTable} failure=${failure} nodes=${now?.nodes ?? {}} />`}
    </section>
    <aside aria-busy=${current ? "false" : "true"}>
      ${node
        ? html`<${NodeCard} node=${node} now=${now} graph=${graph} mine=${mine} place=${steps.indexOf(step)} close=${() => go({ node: undefined })} />`
        : html`<${Progress} run=${run} now=${now} /><${Headlines} run=${run} mine=${mine} place=${steps.indexOf(step)} />`}
      <${Alarms} run=${run} now=${now} />
      <${Newest} run=${run} now=${now} at=${at} />
    </aside>`;
}

/** The picture as flowrl.draw makes it; the page fills in each box's share of the step and its numbers. */
function Drawing({ graph, now, chosen, onPick }) {
  const box = useRef();
  const picked = useRef();
  picked.current = onPick;
  useLayoutEffect(() => {
    const svg = parsedSvg(graph.svg);
    for (const group of svg.querySelectorAll("g[data-node]")) prepare(svg, group);
    box.current.replaceChildren(svg);
    for (const group of box.current.querySelectorAll("g[data-node]")) {
      group.addEventListener("click", () => picked.current(group.dataset.node));
      group.addEventListener("keydown", (e) => (e.key === "Enter" || e.key === " ") && (e.preventDefault(), picked.current(group.dataset.node)));
    }
  }, [graph.svg]);
  useLayoutEffect(() => {
    for (const group of box.current.querySelectorAll("g[data-node]")) {
      const found = now?.nodes[group.dataset.node];
      group.classList.toggle("open", Boolean(found?.open));
      group.classList.toggle("chosen", group.dataset.node === chosen);
      const texts = group.querySelectorAll("text");
      const share = group.querySelector("rect.share");
      share.setAttribute("width", (Number(share.dataset.width) * Math.min(1, found?.share ?? 0)).toFixed(1));
      if (texts.length > 1) texts[1].textContent = found?.key ? `${short(found.key)} ${number(found.value)}` : found?.rows ? `${number(found.rows)} rows` : "";
      if (texts.length > 2) texts[2].textContent = found?.open && !found.seconds ? "running" : found?.seconds ? `${seconds(found.seconds)} · ${percent(found.share)}` : "";
    }
    for (const group of box.current.querySelectorAll("g[data-node]")) center(group);
    for (const path of box.current.querySelectorAll("path[data-from]")) {
      path.classList.toggle("near", path.dataset.from === chosen || path.dataset.to === chosen);
    }
  }, [graph.svg, now, chosen]);
  return html`<div class="graph" ref=${box}></div>`;
}

/** Put the lines that have text in the middle of their box. */
function center(group) {
  const texts = [...group.querySelectorAll("text")];
  const empty = texts.filter((text) => !text.textContent).length;
  const shown = texts.filter((text) => text.textContent);
  shown.forEach((text, i) => {
    const first = Number((texts[0].dataset.y ??= texts[0].getAttribute("y")));
    text.setAttribute("y", (first + 16 * (i + empty / 2)).toFixed(1));
  });
}

/** Add the bar of a box's share, cut to the box's shape, below its texts. */
function prepare(svg, group) {
  const [shape] = group.children;
  const frame = outline(shape);
  const id = `cut-${[...svg.querySelectorAll("g[data-node]")].indexOf(group)}`;
  const cut = document.createElementNS(SVG, "clipPath");
  cut.setAttribute("id", id);
  cut.append(shape.cloneNode());
  const share = document.createElementNS(SVG, "rect");
  const given = { class: "share", x: frame.x, y: frame.y, height: frame.height, width: 0, fill: shape.getAttribute("stroke"), "clip-path": `url(#${id})` };
  Object.entries(given).forEach(([name, value]) => share.setAttribute(name, value));
  share.dataset.width = frame.width;
  shape.after(cut, share);
  group.setAttribute("tabindex", "0");
  group.setAttribute("role", "button");
  group.setAttribute("aria-label", `Node ${group.dataset.node}`);
}

function outline(shape) {
  const value = (name) => Number(shape.getAttribute(name));
  if (shape.tagName === "rect") return { x: value("x"), y: value("y"), width: value("width"), height: value("height") };
  const points = shape.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [x, y] = [Math.min(...xs), Math.min(...ys)];
  return { x, y, width: Math.max(...xs) - x, height: Math.max(...ys) - y };
}

/** The numbers of the nodes where the graph cannot be drawn. */
function NodeTable({ failure, nodes }) {
  return html`<div class="scroll">
    <p class="hint pad">${failure}</p>
    <table>
      <thead><tr><th class="text">node</th><th class="n">rows</th><th class="n">seconds</th><th class="n">share</th><th class="n">number</th></tr></thead>
      <tbody>
        ${Object.entries(nodes).map(([name, node]) => html`<tr><td class="text">${name}</td><td class="n">${number(node.rows)}</td><td class="n">${seconds(node.seconds)}</td><td class="n">${percent(node.share)}</td><td class="n">${node.key ? `${short(node.key)} ${number(node.value)}` : ""}</td></tr>`)}
      </tbody>
    </table>
  </div>`;
}

function Progress({ run, now }) {
  const share = now?.planned ? now.done / now.planned : 0;
  return html`<section class="card">
    <div class="figures">
      <${Figure} label="step" value=${html`${now?.done ?? "–"}<small> / ${now?.planned ?? "?"}</small>`} />
      <${Figure} label=${run.status === "running" ? "left" : "took"} value=${seconds(run.status === "running" ? now?.left : now?.elapsed)} />
      <${Figure} label="a step" value=${seconds(now?.step_seconds)} />
    </div>
    <progress max="1" value=${share} aria-label="Steps done"></progress>
    ${now?.open?.length ? html`<p class="hint">running: ${now.open.join(", ")}</p>` : run.error && html`<p class="bad">${run.error}</p>`}
  </section>`;
}

function Figure({ label, value }) {
  return html`<div class="figure"><strong>${value}</strong><span>${label}</span></div>`;
}

/** The few curves that tell how a run goes; a click opens them all. */
function Headlines({ run, mine, place }) {
  const shown = useMemo(() => headlines(mine), [mine]);
  if (!shown.length) return null;
  return html`<section class="card headlines">
    ${shown.map(
      ({ key, values, at }) => html`<a href=${linked({ tab: "curves", run: run.name, q: key })} title=${key}>
        <span class="key">${key}</span>
        <${Spark} values=${values} at=${at ? undefined : place} label=${`${key} over steps`} />
        <strong>${number(at ? values.at(-1) : values[place] ?? values.at(-1))}</strong>
      </a>`,
    )}
  </section>`;
}

/** The metrics that tell most, of training and held out (`at`). */
function headlines(mine) {
  if (!mine?.training) return [];
  const held = Object.keys(mine.validation.columns).filter((key) => /reward\/mean$|\/loss$/.test(key)).slice(0, 1);
  const wanted = ["reward/mean", "kl/ref", "actor/entropy", "response_length/mean", "actor/grad_norm"];
  const known = Object.keys(mine.training.columns);
  const losses = known.filter((key) => /\/loss$|_loss$/.test(key) && !key.includes("kl"));
  const trained = [...wanted.filter((key) => known.includes(key)), ...losses].slice(0, 5);
  const shown = (key) => ({ key, values: mine.training.columns[key] });
  return [...trained.slice(0, 1).map(shown), ...held.map((key) => ({ key, values: mine.validation.columns[key], at: true })), ...trained.slice(1).map(shown)];
}

function Alarms({ run, now }) {
  const alarms = now?.alarms ?? [];
  return html`<section class="card alarms">
    <h2>Alarms<span class="count">${alarms.length}</span></h2>
    ${alarms.length
      ? html`<ul>
          ${alarms.slice(0, 6).map(
            (alarm) => html`<li>
              <a href=${linked({ tab: alarm.rows?.length ? "rows" : "curves", run: run.name, step: alarm.step, row: alarm.rows?.[0] })}>
                <span class="when">step ${alarm.step}</span><span>${alarm.message}</span>
              </a>
              ${alarm.command && html`<code>${alarm.command}</code>`}
            </li>`,
          )}
        </ul>`
      : html`<p class="hint">${now?.alarms_recorded === false ? "This run recorded no alarms." : "None."}</p>`}
  </section>`;
}

function Newest({ run, now, at }) {
  const rows = now?.newest ?? [];
  return html`<section class="card newest">
    <h2>Rows of step ${now?.step ?? "–"}<a class="more" href=${linked({ tab: "rows", run: run.name, step: at.step })}>all</a></h2>
    ${rows.length
      ? html`<table>
          <tbody>
            ${rows.map(
              (row) => html`<tr>
                <td class="text"><a href=${linked({ tab: "rows", run: run.name, step: now.step, row: row.row_id })}><span class="ask">${line(row.prompt)}</span> <span>${line(row.response)}</span></a></td>
                <td class="n">${number(row.score)}</td>
              </tr>`,
            )}
          </tbody>
        </table>`
      : html`<p class="hint">${now?.no_rows ?? "No rows yet."}</p>`}
  </section>`;
}

/** One node: its parameters, numbers over time, and rows in and out. */
function NodeCard({ node, now, graph, mine, place, close }) {
  const found = now?.nodes[node.name];
  const columns = mine?.training?.columns ?? {};
  const keys = [...node.metrics, `timing/${node.name}`].filter((key) => key in columns);
  const into = graph.edges.filter((edge) => edge.to === node.name);
  const out = graph.edges.filter((edge) => edge.from === node.name);
  const carried = (edge) => {
    const from = now?.nodes[edge.from];
    return [edge.rows && from?.rows && `${number(from.rows)} rows`, from?.bytes && bytes(from.bytes)].filter(Boolean).join(", ");
  };
  return html`<section class="card node">
    <h2><span class="swatch" data-role=${node.color}></span>${node.name}<button class="close" aria-label="Close" title="Close (Esc)" onClick=${close}>×</button></h2>
    <p class="hint">${node.operator}${node.role && html`, role ${node.role}`}${found?.seconds && html`; ${seconds(found.seconds)}, ${percent(found.share)} of the step`}</p>
    ${node.parameters.length > 0 && html`<dl>${node.parameters.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`}
    <div class="headlines">
      ${keys.map((key) => html`<a href=${linked({ tab: "curves", q: key })}><span class="key">${key}</span><${Spark} values=${columns[key]} at=${place} label=${key} /><strong>${number(columns[key][place] ?? null)}</strong></a>`)}
    </div>
    ${into.length > 0 && html`<h3>reads</h3><ul class="edges">${into.map((edge) => html`<li><span>${edge.from}</span><code>${edge.label}</code><span class="n">${carried(edge)}</span></li>`)}</ul>`}
    ${out.length > 0 && html`<h3>is read by</h3><ul class="edges">${out.map((edge) => html`<li><span>${edge.to}</span><code>${edge.label}</code><span class="n">${carried(edge)}</span></li>`)}</ul>`}
  </section>`;
}

export { Now, headlines };
