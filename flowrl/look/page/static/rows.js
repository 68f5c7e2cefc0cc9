// Rows: what was sampled in a step, as groups of one prompt or row by row; beside it the row of the cursor.

import { html, useEffect, useMemo, useState } from "./vendor/htm-preact.js";
import { shade } from "./charts.js";
import { useView } from "./data.js";
import { line, number, signed } from "./format.js";
import { Row } from "./row.js";

const PAGE = 200;
const COLUMNS = [
  ["score", "score", number],
  ["advantage", "advantage", signed],
  ["response_tokens", "tokens", number],
  ["kl", "KL", number],
  ["mismatch", "mismatch", number],
];
const MINOR = new Set(["mismatch", "kl", "response_tokens"]);
const FILTERS = {
  all: () => true,
  best: (data, i, range) => data.score?.[i] === range[1],
  lowest: (data, i, range) => data.score?.[i] === range[0],
  truncated: (data, i) => data.truncated?.[i],
  "no spread": (data, i) => data.group_spread?.[i] === 0,
  dropped: (data, i) => data.fate?.[i] && data.fate[i] !== "trained",
};

function Rows({ at, go, run, step }) {
  const { answer, error, current } = useView(step ? "rows" : null, { run: run.name, step });
  const [search, setSearch] = useState("");
  const [pages, setPages] = useState(1);
  const [opened, setOpened] = useState(new Set());
  const grouped = at.flat !== "1";
  const [by, falling] = [at.by ?? "", at.down === "1"];
  const shown = useMemo(() => answer && arranged(answer, { search, grouped, by, falling, filter: at.only ?? "all" }), [answer, search, grouped, by, falling, at.only]);
  useEffect(() => { setPages(1); }, [step, search, by, falling, at.only]);
  const chosen = at.row ?? answer?.data.row_id?.[shown?.[0]?.rows[0]];
  useRowKeys(shown, answer?.data.row_id, chosen, go);
  if (error) return html`<p class="hint pad">${error}</p>`;
  if (!answer) return html`<p class="hint pad">${step ? "Loading …" : "No step is done yet."}</p>`;
  const range = extent(answer.data.score);
  const toggle = (uid) => setOpened((old) => { const next = new Set(old); next.has(uid) ? next.delete(uid) : next.add(uid); return next; });
  const columns = [...COLUMNS.filter(([key]) => key in answer.data && !(grouped && key === "advantage")), ...answer.reward.map((key) => [key, key.replace(/^reward\//, ""), number])];
  const sort = (key) => go({ by: key, down: by === key && !falling ? "1" : undefined });
  const lines = shown.flatMap((group) => [{ group }, ...(!grouped || opened.has(group.uid) ? group.rows.map((i) => ({ row: i })) : [])]).filter((one) => grouped || "row" in one);
  return html`
    <section class="card list" aria-busy=${current ? "false" : "true"}>
      <div class="bar">
        <input type="search" placeholder="Search prompts and responses" aria-label="Search rows" title=${answer.clipped ? `Searches the first ${answer.clipped} characters of a response (/)` : "Search (/)"} value=${search} onInput=${(e) => setSearch(e.target.value)} />
        <select aria-label="Filter" value=${at.only ?? "all"} onChange=${(e) => go({ only: e.target.value === "all" ? undefined : e.target.value })}>
          ${Object.keys(FILTERS).map((name) => html`<option value=${name}>${name === "all" ? "all rows" : name}</option>`)}
        </select>
        <div class="choice" role="group" aria-label="Arrangement">
          <button aria-pressed=${grouped} onClick=${() => go({ flat: undefined })}>groups</button>
          <button aria-pressed=${!grouped} onClick=${() => go({ flat: "1" })}>rows</button>
        </div>
        <span class="space"></span>
        <span class="hint">${shown.reduce((sum, group) => sum + group.rows.length, 0)} of ${answer.count} rows${answer.left_off ? `, ${answer.left_off}` : ""}</span>
      </div>
      ${answer.note && html`<p class="hint pad">${answer.note}</p>`}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th class="text"><button onClick=${() => go({ by: undefined, down: undefined })}>${grouped ? "prompt" : "response"}</button></th>
              ${grouped && html`<th class="strip">group</th>`}
              ${columns.map(([key, title]) => html`<th class=${MINOR.has(key) ? "n minor" : "n"} aria-sort=${by === key ? (falling ? "descending" : "ascending") : "none"}><button onClick=${() => sort(key)}>${title}<span class="arrow">${by === key ? (falling ? "↓" : "↑") : ""}</span></button></th>`)}
            </tr>
          </thead>
          <tbody>
            ${lines.slice(0, pages * PAGE).map((one) =>
              one.group
                ? html`<${Group} key=${`g${one.group.uid}`} ...${{ group: one.group, answer, columns, range, toggle, chosen, go }} open=${opened.has(one.group.uid)} />`
                : html`<${Line} key=${answer.data.row_id?.[one.row] ?? one.row} i=${one.row} ...${{ answer, columns, grouped, chosen, go }} />`,
            )}
          </tbody>
        </table>
        ${lines.length > pages * PAGE && html`<p class="pad"><button onClick=${() => setPages(pages + 1)}>${PAGE} more of ${lines.length - pages * PAGE}</button></p>`}
      </div>
    </section>
    <section class="card detail">
      ${chosen ? html`<${Row} run=${run} step=${step} id=${chosen} at=${at} go=${go} />` : html`<p class="hint pad">No row matches.</p>`}
    </section>`;
}

function Group({ group, answer, columns, range, open, toggle, chosen, go }) {
  const { data } = answer;
  const mean = (key) => average(group.rows.map((i) => data[key]?.[i]));
  const within = group.rows.some((i) => data.row_id?.[i] === chosen);
  return html`<tr class=${`group${within && !open ? " chosen" : ""}`} onClick=${() => toggle(group.uid)}>
    <td class="text"><button aria-expanded=${open} aria-label="Rows of the group"><span class="caret"></span></button>${line(group.prompt) || group.uid}</td>
    <td class="strip">
      ${group.rows.map((i) => html`<button
        class=${`cell ${shade(data.score?.[i], ...range)}${data.row_id?.[i] === chosen ? " chosen" : ""}`}
        title=${`score ${number(data.score?.[i])}`} aria-label=${`Row ${data.row_id?.[i]}, score ${number(data.score?.[i])}`}
        onClick=${(e) => { e.stopPropagation(); go({ row: data.row_id?.[i] }); }}></button>`)}
    </td>
    ${columns.map(([key, , text]) => html`<td class=${MINOR.has(key) ? "n minor" : "n"}>${text(mean(key))}</td>`)}
  </tr>`;
}

function Line({ i, answer, columns, grouped, chosen, go }) {
  const { data, responses } = answer;
  const id = data.row_id?.[i] ?? String(i);
  const marks = [data.truncated?.[i] && "truncated", data.fate?.[i] && data.fate[i] !== "trained" && `dropped by ${data.fate[i]}`].filter(Boolean);
  return html`<tr class=${`row${chosen === id ? " chosen" : ""}`} data-row=${id} onClick=${() => go({ row: id })}>
    <td class="text" colspan=${grouped ? 2 : 1}>
      <a href="#" onClick=${(e) => e.preventDefault()}>${responses ? line(responses[i]) || "(empty)" : id}</a>
      ${marks.map((mark) => html`<span class="tag">${mark}</span>`)}
    </td>
    ${columns.map(([key, , text]) => html`<td class=${MINOR.has(key) ? "n minor" : "n"}>${text(data[key]?.[i])}</td>`)}
  </tr>`;
}

/** The groups to show, each with the indices of its rows, sorted and filtered. */
function arranged(answer, { search, grouped, by, falling, filter }) {
  const { data, responses, groups } = answer;
  const range = extent(data.score);
  const wanted = search.toLowerCase();
  const chosen = FILTERS[filter] ?? FILTERS.all;
  const matches = (group, i) =>
    chosen(data, i, range) &&
    (!wanted || [group.prompt, responses?.[i], data.row_id?.[i], data.data_source?.[i]].some((text) => text?.toLowerCase().includes(wanted)));
  let found = groups.map((group) => ({ ...group, rows: group.rows.filter((i) => matches(group, i)) })).filter((group) => group.rows.length);
  if (!grouped) found = found.flatMap((group) => group.rows.map((i) => ({ ...group, rows: [i] })));
  if (!by) return found;
  const order = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : (falling ? -1 : 1) * (a < b ? -1 : 1));
  const value = (group) => average(group.rows.map((i) => data[by]?.[i]));
  for (const group of found) group.rows.sort((a, b) => order(data[by]?.[a] ?? null, data[by]?.[b] ?? null));
  return found.map((group) => [value(group), group]).sort(([a], [b]) => order(a, b)).map(([, group]) => group);
}

function average(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function extent(values) {
  const known = (values ?? []).filter((value) => value !== null);
  return known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

/** J and K go from row to row in the order shown. */
function useRowKeys(shown, rowIds, chosen, go) {
  useEffect(() => {
    if (!shown) return undefined;
    const pressed = (event) => {
      if (event.target.closest("input, select, textarea") || !["j", "k"].includes(event.key)) return;
      const ids = shown.flatMap((group) => group.rows.map((i) => rowIds?.[i]));
      const place = ids.indexOf(chosen);
      const to = event.key === "j" ? Math.min(place + 1, ids.length - 1) : Math.max(place - 1, 0);
      if (ids[to]) go({ row: ids[to] });
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
}

export { Rows };
