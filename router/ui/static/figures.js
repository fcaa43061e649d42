// Figures from the differences of the router's counters.

export const part = (some, all) => (all > 0 ? (100 * some) / all : null);

function differences(later, earlier) {
  return later.counts.map((count, at) => count - (earlier.counts[at] ?? 0));
}

/** A quantile in milliseconds, linear inside its bucket; null without values. */
export function quantile(later, earlier, q) {
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
export function within(later, earlier, bound) {
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
export function fell(later, earlier) {
  if (typeof later === "number") return later < earlier;
  return Object.keys(later).some((key) => fell(later[key], earlier?.[key]));
}

export const ms = (v) => (v === null ? "–" : v >= 1000 ? `${(v / 1000).toFixed(1)} s` : `${v >= 10 ? Math.round(v) : v.toFixed(v >= 1 ? 1 : 2)} ms`);
export const share = (v) => (v === null ? "–" : `${v > 0 && v < 10 ? v.toFixed(1) : Math.round(v)} %`);
export const rate = (v) => (v === null ? "–" : `${v >= 10 ? Math.round(v) : v.toFixed(v >= 1 || v === 0 ? 1 : 2)}/s`);
