// The frame: which run, which step, which tab; and the keys.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { Compare } from "./compare.js";
import { CurvesTab } from "./curves.js";
import { get, inside, linked, live, useCursor, useMetrics, usePoll, useView } from "./data.js";
import { Now } from "./now.js";
import { Prompts } from "./prompts.js";
import { Rows } from "./rows.js";
import { Run } from "./run.js";
import { Time } from "./time.js";

const TABS = { now: Now, curves: CurvesTab, rows: Rows, prompts: Prompts, time: Time, compare: Compare, run: Run };
const TITLES = { now: "Now", curves: "Curves", rows: "Rows", prompts: "Prompts", time: "Time", compare: "Compare", run: "Run" };

function App() {
  const [at, go] = useCursor();
  const [runs, setRuns] = useState(null);
  const [failure, setFailure] = useState(null);
  const refresh = async () => {
    const found = await get("runs").catch((error) => setFailure(error.message));
    if (!found) return;
    setFailure(null);
    setRuns((old) => (JSON.stringify(old) === JSON.stringify(found) ? old : found));
  };
  useEffect(() => { refresh(); }, []);
  usePoll(refresh, true);
  const names = runs?.map((one) => one.name) ?? [];
  const metrics = useMetrics(names, Object.fromEntries((runs ?? []).map((one) => [one.name, one.status])));
  const run = runs?.find((one) => one.name === at.run) ?? runs?.[0];
  const graph = useView(run && "graph", { run: run?.name });
  const steps = metrics[run?.name]?.training?.steps ?? [];
  const last = steps.at(-1) ?? 0;
  const step = Math.min(Number(at.step) || last, last) || last;
  const move = (to) => go({ step: to >= last ? undefined : Math.max(steps[0] ?? 1, to), row: undefined });
  useKeys({ go, move, step, steps });
  useEffect(() => { document.title = run ? `${run.name} · flowrl` : "flowrl"; }, [run?.name]);
  if (!run) return html`<main class="empty"><p>${failure ?? "Loading …"}</p></main>`;
  const tab = at.tab in TABS ? at.tab : "now";
  const shared = { at, go, run, runs, metrics, graph: graph.answer, failure: graph.error, step, steps, last, following: !at.step };
  return html`
    <${Header} ...${shared} tab=${tab} move=${move} />
    ${(failure || !live) && html`<p class="notice" role="status">${failure ? `No answer: ${failure}` : inside.note}</p>`}
    ${run.damage.map((problem) => html`<p class="notice bad" role="status">${problem}</p>`)}
    <main class=${`tab-${tab}`} data-step=${step}><${TABS[tab]} ...${shared} key=${run.name} /></main>`;
}

function Header({ at, go, run, runs, tab, step, steps, last, move }) {
  const place = steps.indexOf(step);
  return html`<header>
    <a class="brand" href=${linked({ tab: "now", run: at.run })}>flowrl</a>
    ${runs.length > 1
      ? html`<select aria-label="Run" value=${run.name} onChange=${(e) => go({ run: e.target.value, step: undefined, row: undefined })}>
          ${runs.map((one) => html`<option value=${one.name}>${one.name}</option>`)}
        </select>`
      : html`<span class="name" title=${run.path}>${run.name}</span>`}
    <span class=${`status ${run.status}`}>${run.status}</span>
    <nav aria-label="Views">
      ${Object.entries(TITLES).map(
        ([name, title]) => html`<a
          href=${linked({ ...at, tab: name, row: name === "rows" ? at.row : undefined, node: undefined, q: undefined })}
          aria-current=${name === tab ? "page" : undefined}
          >${title}</a>`,
      )}
    </nav>
    <div class="stepper" role="group" aria-label="Step">
      <button aria-label="Previous step" title="Previous step (←)" disabled=${place <= 0} onClick=${() => move(steps[place - 1])}>‹</button>
      <input
        type="range" aria-label="Step" min="0" max=${Math.max(steps.length - 1, 0)} value=${place}
        onInput=${(e) => move(steps[Number(e.target.value)])}
      />
      <button aria-label="Next step" title="Next step (→)" disabled=${place >= steps.length - 1} onClick=${() => move(steps[place + 1])}>›</button>
      <output>${step}<span class="of"> / ${run.steps ?? last}</span></output>
      <button class="latest" title="Follow the latest step (End)" aria-pressed=${!at.step} onClick=${() => move(last)}>latest</button>
    </div>
  </header>`;
}

/** Digits choose a tab, arrows a step, "/" the search; in a field, keys are text. */
function useKeys({ go, move, step, steps }) {
  useEffect(() => {
    const pressed = (event) => {
      if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      const place = steps.indexOf(step);
      const tab = Object.keys(TABS)[Number(event.key) - 1];
      if (tab) go({ tab });
      else if (event.key === "ArrowLeft" && place > 0) move(steps[place - 1]);
      else if (event.key === "ArrowRight" && place < steps.length - 1) move(steps[place + 1]);
      else if (event.key === "End") move(steps.at(-1));
      else if (event.key === "Escape") go({ node: undefined, row: undefined, prompt: undefined });
      else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
}

render(html`<${App} />`, document.body);
document.documentElement.dataset.ready = "";
