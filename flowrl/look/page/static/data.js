// The answers that the page shows, from its server or from the data inside the file, and the cursor in the address.

import { useEffect, useRef, useState } from "./vendor/htm-preact.js";

const inside = await embedded();
const live = inside === null;

async function embedded() {
  const element = document.getElementById("data");
  if (!element) return null;
  const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const found = await new Response(stream).json();
  found.answers = new Map(found.answers.map(([view, asked, answer]) => [address(view, asked), answer]));
  return found;
}

/** The address of an answer: the view and its parameters, without those that are empty, in order. */
function address(view, asked) {
  const given = Object.entries(asked).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
  query.sort();
  return `${view}?${query}`;
}

async function get(view, asked = {}) {
  const at = address(view, asked);
  if (!live) {
    if (!inside.answers.has(at)) throw new Error("This file does not include it. Open the run's folder: flowrl look RUN.");
    return inside.answers.get(at);
  }
  const response = await fetch(`api/${at}`);
  const answer = await response.json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}

/** The answer to a view, the previous one until it is here, when `current` is true; `again` (a number that changes) asks
 * once more. */
function useView(view, asked, again = 0) {
  const [state, set] = useState({});
  const at = view ? address(view, asked) : null;
  useEffect(() => {
    if (!at) return undefined;
    let wanted = true;
    get(view, asked).then(
      (answer) => wanted && set({ answer, at }),
      (error) => wanted && set({ error: error.message, at }),
    );
    return () => { wanted = false; };
  }, [at, again]);
  return { ...state, current: !at || state.at === at };
}

/** Call `poll` every second while the page is visible. */
function usePoll(poll, active) {
  const latest = useRef(poll);
  latest.current = poll;
  useEffect(() => {
    if (!live || !active) return undefined;
    const timer = setInterval(() => document.hidden || latest.current(), 1000);
    return () => clearInterval(timer);
  }, [active]);
}

/** The metrics of a run; while it runs, the lines that it adds are read by their byte offset. */
function useMetrics(runs, status) {
  const [found, set] = useState({});
  const names = runs.join("\n");
  const known = useRef(found);
  const more = async (name) => {
    const old = known.current[name];
    const asked = live && old ? { run: name, after: old.after, start: old.start } : { run: name };
    const answer = await get("metrics", asked).catch((error) => ({ error: error.message }));
    if (old && answer.again && !answer.count) return;
    known.current = { ...known.current, [name]: old && answer.again ? joined(old, answer) : answer };
    set(known.current);
  };
  useEffect(() => { runs.forEach((name) => known.current[name] || more(name)); }, [names]);
  usePoll(() => runs.filter((name) => status[name] === "running").forEach(more), runs.some((n) => status[n] === "running"));
  return found;
}

function joined(old, more) {
  const part = (name) => {
    const [before, after] = [old[name], more[name]];
    const [m, n] = [before.steps.length, after.steps.length];
    const columns = {};
    for (const key of new Set([...Object.keys(before.columns), ...Object.keys(after.columns)])) {
      const fill = (column, length) => column ?? Array(length).fill(null);
      columns[key] = [...fill(before.columns[key], m), ...fill(after.columns[key], n)];
    }
    return { steps: [...before.steps, ...after.steps], columns };
  };
  return { ...more, training: part("training"), validation: part("validation") };
}

function parsed() {
  const [tab, query] = location.hash.slice(1).split("?");
  return { tab: tab || "now", ...Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function linked({ tab, ...rest }) {
  const given = Object.entries(rest).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
  return `#${tab}${given.length ? `?${query}` : ""}`;
}

/** The cursor (tab, run, step, row and what a tab adds), and the function that changes a part of it. */
function useCursor() {
  const [at, set] = useState(parsed);
  useEffect(() => {
    const changed = () => set(parsed());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const go = (changes) => { location.hash = linked({ ...parsed(), ...changes }); };
  return [at, go];
}

export { get, inside, linked, live, useCursor, useMetrics, usePoll, useView };
