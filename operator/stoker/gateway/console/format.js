// Numbers, times and states as people read them.
import { el } from "./dom.js";

const whole = new Intl.NumberFormat("en");
const rounded = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
export const DASH = "–";

export const count = (value) => (value === null || value === undefined ? DASH : whole.format(value));

/** Compare two texts of the same alphabet, names or times: many times faster than by the rules of a language. */
export const inOrder = (a, b) => (a < b ? -1 : Number(a > b));

/** Four significant digits; small and large numbers by powers of ten. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return rounded.format(value);
}

export const percent = (part) =>
  part === null || part === undefined ? DASH : `${(part * 100).toFixed(part < 0.1 ? 1 : 0)} %`;

export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = value,
    unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit ? size.toFixed(size < 10 ? 1 : 0) : size} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60 ? `${s % 60} s` : ""}`.trim();
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** A time and its parts that took a second at least: `18 s (pull 5 s, load 9 s)`. */
export function inParts(parts) {
  const all = Object.entries(parts);
  const shown = all.filter(([, took]) => took > 0).map(([part, took]) => `${part.replace("_", " ")} ${duration(took)}`);
  return `${duration(all.reduce((sum, [, took]) => sum + took, 0))}${shown.length ? ` (${shown.join(", ")})` : ""}`;
}

/** Milliseconds or seconds, for latencies. */
export function latency(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 0)} s`;
}

export const seconds = (from, to) => (from ? ((to ? Date.parse(to) : Date.now()) - Date.parse(from)) / 1000 : null);

/** How long ago something was, in one unit; it stays true while it is shown (`refreshAges`). */
export const age = (time) =>
  el("time", { datetime: time, title: time, data: { since: time } }, roughly(seconds(time)));

/** Write all shown ages anew. */
export function refreshAges() {
  for (const one of document.querySelectorAll("time[data-since]")) {
    const now = roughly(seconds(one.dataset.since));
    if (one.textContent !== now) one.textContent = now;
  }
}

/** A duration in its largest unit: `47 min`. */
export function roughly(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 129600) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}

/** A moment, with the whole time as its title. */
export function moment(time) {
  if (!time) return DASH;
  const date = new Date(time);
  const near = Math.abs(Date.now() - date.getTime()) < 86400000; // a clock may be days ahead
  const text = near
    ? date.toLocaleTimeString("en-GB")
    : date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  return el("time", { datetime: time, title: time }, text);
}

const TONES = {
  Running: "good",
  Training: "good",
  Completed: "good",
  Serving: "good",
  Complete: "good",
  Ready: "good",
  Succeeded: "good",
  Failed: "bad",
  Corrupt: "bad",
  Stalled: "bad",
  Failing: "bad",
  NotReady: "bad",
  Restarting: "warn",
  Degraded: "warn",
  Checkpointing: "busy",
  Saving: "busy",
  Starting: "busy",
  Updating: "busy",
  Scaling: "busy",
  Suspending: "busy",
  Cancelling: "busy",
  Loading: "busy",
  Warming: "busy",
  Draining: "warn",
  Cordoned: "warn",
};

/** A phase as a labelled badge. The word says everything; its colour repeats it. */
export const badge = (phase) => el("span", { class: "badge", data: { tone: TONES[phase] ?? "calm" } }, phase || DASH);

/** A line that says why something does not run: at most three lines in a list, whole as its title. */
export const why = (message) => (message ? el("span", { class: "why", title: message }, message) : "");

const UNITS = { Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30, Ti: 2 ** 40, k: 1e3, M: 1e6, G: 1e9, T: 1e12, m: 1e-3 };

/** The number that a Kubernetes quantity stands for (`16Gi`, `1930m`); null for none. */
export function quantity(text) {
  const found = /^([0-9.]+)([A-Za-z]*)$/.exec(text ?? "");
  const unit = found && (found[2] ? UNITS[found[2]] : 1);
  return unit ? Number(found[1]) * unit : null;
}

/** Who uses a checkpoint, of the gateway's `Kind/name`: `deployment chat`. */
export const users = (found) =>
  found.map((user) => user.replace("InferenceDeployment/", "deployment ").replace("TrainingJob/", "job "));

const FULL_IS_BAD = { low: 0.7, high: 0.9, optimum: 0 };

/** A share from 0 to 1 as a bar with its number. `limits` colour it: by default a full one is a warning. */
export function meter(share, label, limits = FULL_IS_BAD) {
  if (share === null || share === undefined) return DASH;
  const bar = el("meter", { min: 0, max: 1, ...limits, value: share, "aria-label": label });
  return el("span", { class: "meter" }, bar, percent(share));
}
