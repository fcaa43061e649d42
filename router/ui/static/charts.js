// Charts of the last ten minutes, from the differences of the router's counters. What came before the page was opened is not shown.

import { h } from "./dom.js";
import { frame, poll } from "./frame.js";
import { bytes } from "./units.js";

const KEPT = 600;
const WINDOW = 10;
const HEIGHT = 180;

frame("charts");
const main = document.getElementById("main");
const grid = h("div", { class: "charts" });
main.append(h("p", { class: "dim" }, "Each point is the mean or percentile of the 10 s before it, since this page was opened."), grid);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ms = (v) => (v === null ? "–" : v >= 1000 ? `${(v / 1000).toFixed(1)} s` : `${v >= 10 ? Math.round(v) : v.toFixed(1)} ms`);
const share = (v) => (v === null ? "–" : `${Math.round(v)} %`);
const rate = (v) => (v === null ? "–" : `${v >= 10 ? Math.round(v) : v.toFixed(1)}/s`);

/** title, series as [label, colour], format, (later, earlier, seconds, state) -> values */
const CHARTS = [
  ["Time to first token", [["median", "--prefill"], ["95 %", "--decode"]], ms, (b, a) => [quantile(b.ttft, a.ttft, 0.5), quantile(b.ttft, a.ttft, 0.95)]],
  ["Time between tokens", [["median", "--prefill"], ["95 %", "--decode"]], ms, (b, a) => [quantile(b.itl, a.itl, 0.5), quantile(b.itl, a.itl, 0.95)]],
  ["Prompt tokens found in prefix caches", [["hits", "--prefill"]], share, (b, a) => [part(b.prefix_hits - a.prefix_hits, b.prefix_queries - a.prefix_queries)]],
  ["Attempts: relayed and local", [["relayed", "--prefill"], ["local", "--decode"]], rate,
    (b, a, seconds) => [(b.attempts.relayed - a.attempts.relayed) / seconds, (b.attempts.local - a.attempts.local) / seconds]],
  ["Requests within the objectives", [["first token", "--prefill"], ["between tokens", "--decode"]], share,
    (b, a, _, state) => [within(b.ttft, a.ttft, state.objectives.ttft_s), within(b.itl, a.itl, state.objectives.tpot_s)]],
  ["Tokens", [["prompt", "--prefill"], ["generated", "--decode"]], rate,
    (b, a, seconds) => [(b.prompt_tokens - a.prompt_tokens) / seconds, (b.generated_tokens - a.generated_tokens) / seconds]],
  ["Answers and failures", [["answered", "--good"], ["failed", "--bad"]], rate,
    (b, a, seconds) => [(b.answered - a.answered) / seconds, (b.failed - a.failed) / seconds]],
  ["KV relayed", [["bytes", "--prefill"]], (v) => (v === null ? "–" : `${bytes(v)}/s`), (b, a, seconds) => [(b.relayed_bytes - a.relayed_bytes) / seconds]],
];

const part = (some, all) => (all > 0 ? (100 * some) / all : null);

function differences(later, earlier) {
  return later.counts.map((count, at) => count - (earlier.counts[at] ?? 0));
}

/** A quantile in milliseconds, linear inside its bucket; null without values. */
function quantile(later, earlier, q) {
  const counts = differences(later, earlier);
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total <= 0) return null;
  let before = 0;
  for (const [at, count] of counts.entries()) {
    if (count && before + count >= q * total) {
      const [lo, hi] = [at ? later.bounds[at - 1] : 0, later.bounds[at] ?? later.bounds.at(-1)];
      return 1000 * (lo + ((hi - lo) * (q * total - before)) / count);
    }
    before += count;
  }
  return null;
}

/** Percent of the values up to `bound` seconds; null without a bound or values. */
function within(later, earlier, bound) {
  const counts = differences(later, earlier);
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!bound || total <= 0) return null;
  let inside = 0;
  for (const [at, count] of counts.entries()) {
    const [lo, hi] = [at ? later.bounds[at - 1] : 0, later.bounds[at] ?? Infinity];
    inside += count * Math.max(0, Math.min(1, hi === Infinity ? 0 : (bound - lo) / (hi - lo)));
  }
  return (100 * inside) / total;
}

/** Whether any number in `later` is less than in `earlier`: the router, or a node, began anew. */
function fell(later, earlier) {
  if (typeof later === "number") return later < earlier;
  return Object.keys(later).some((key) => fell(later[key], earlier?.[key]));
}

const samples = [];
const shown = CHARTS.map(([title, series, format]) => {
  const place = h("div", { class: "plot" });
  const now = h("span", { class: "dim num" });
  const panel = h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), now, place);
  grid.append(panel);
  const axis = () => ({ stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" });
  const options = () => ({
    width: Math.max(200, place.clientWidth), height: HEIGHT, legend: { show: false }, cursor: { y: false },
    scales: { y: { range: (_, __, max) => [0, max > 0 ? 1.1 * max : 1] } },
    axes: [axis(), { ...axis(), size: 62, values: (_, ticks) => ticks.map(format) }],
    series: [{}, ...series.map(([label, name], at) => ({ label, stroke: colour(name), width: 1.5, dash: at ? [5, 3] : undefined, points: { show: false } }))],
  });
  const data = [[], ...series.map(() => [])];
  let plot = new uPlot(options(), data, place);
  const rebuild = () => {
    plot.destroy();
    plot = new uPlot(options(), data, place);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
  addEventListener("resize", () => plot.setSize({ width: Math.max(200, place.clientWidth), height: HEIGHT }));
  return { data, format, now, series, update: () => plot.setData(data) };
});

function show(state) {
  const time = Date.now() / 1000;
  if (samples.length && fell(state.totals, samples.at(-1).totals)) samples.length = 0;
  samples.push({ time, totals: state.totals });
  while (samples.length > 1 && samples[1].time <= time - WINDOW) samples.shift();
  const earlier = samples[0];
  const seconds = time - earlier.time;
  if (seconds <= 0) return;
  CHARTS.forEach(([, series, format, values], at) => {
    const chart = shown[at];
    const found = values(state.totals, earlier.totals, seconds, state);
    chart.data[0].push(time);
    found.forEach((value, line) => chart.data[line + 1].push(value));
    if (chart.data[0].length > KEPT) chart.data.forEach((column) => column.shift());
    chart.update();
    const missing = series[0][0] === "first token" && !state.objectives.ttft_s && !state.objectives.tpot_s;
    chart.now.replaceChildren(...(missing ? ["No objectives are set: --slo-ttft, --slo-tpot."] : series.flatMap(([label, name], line) =>
      [h("i", { class: `key ${name.slice(2)}` }), `${label} ${format(found[line])}  `])));
  });
}

let last = null;
poll(() => "snapshot", (state) => (last = state), 1000, () => (last = null));
setInterval(() => last && !document.hidden && show(last), 1000);
