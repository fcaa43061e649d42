// Numbers as people read them.

const SIZES = ["B", "KB", "MB", "GB", "TB"];

/** Bytes, in units of 1000. */
export function bytes(value) {
  let at = 0;
  while (value >= 999.5 && at < SIZES.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at === 0 || value >= 99.5 ? Math.round(value) : value.toPrecision(2)} ${SIZES[at]}`;
}

export const perSecond = (value) => `${bytes(value)}/s`;

/** A count: 950, 12.3 k, 4.5 M. */
export function count(value) {
  if (value < 9999.5) return String(Math.round(value));
  return value < 999_950 ? `${(value / 1e3).toFixed(1)} k` : `${(value / 1e6).toFixed(1)} M`;
}

/** A count of things: 1 block, 12.3 k blocks. */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** A duration in seconds: 0.4 ms, 23 ms, 1.25 s, 2 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 0.00995) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  return seconds < 99.5 ? `${seconds.toFixed(2)} s` : `${Math.round(seconds / 60)} min`;
}

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

/** A Unix time in the user's form: the time of day, and the date if it is not today's. */
export function moment(time) {
  const at = new Date(1000 * time);
  const today = at.toDateString() === new Date().toDateString();
  return at.toLocaleString(undefined, { dateStyle: today ? undefined : "short", timeStyle: "medium" });
}

/** How long ago a Unix time in seconds was. */
export function ago(time) {
  const seconds = Math.max(0, Date.now() / 1000 - time);
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  return seconds < 3600 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}
