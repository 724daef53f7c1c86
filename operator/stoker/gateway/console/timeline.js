// Attempts of a run on a time line, its use of time, and its ranks on nodes. Every picture is a list with words.
import { el } from "./dom.js";
import { DASH, badge, count, duration, inParts, moment, percent, seconds } from "./format.js";

/** One bar for each attempt, on one scale of time, with the cause of its end in words. */
export function timeline(attempts) {
  if (!attempts.length) return el("p", { class: "empty" }, "No attempt has begun.");
  const starts = attempts.map((one) => Date.parse(one.started_at)).filter(Number.isFinite);
  const from = Math.min(...starts);
  const until = Math.max(...attempts.map((one) => (one.ended_at ? Date.parse(one.ended_at) : Date.now())));
  const span = Math.max(until - from, 1000);
  return [
    el(
      "ol",
      { class: "timeline" },
      attempts.map((one) => attempt(one, from, span)),
    ),
    starts.length > 0 && axis(from, until, attempts),
  ];
}

/** The ends of the time that the bars show. */
function axis(from, until, attempts) {
  const goesOn = attempts.some((one) => !one.ended_at);
  return el(
    "p",
    { class: "axis muted" },
    moment(new Date(from).toISOString()),
    el("span", {}, duration((until - from) / 1000)),
    goesOn ? "now" : moment(new Date(until).toISOString()),
  );
}

function attempt(one, from, span) {
  const start = Date.parse(one.started_at) || from;
  const end = one.ended_at ? Date.parse(one.ended_at) : Date.now();
  const left = (100 * (start - from)) / span,
    width = Math.max((100 * (end - start)) / span, 0.6);
  const tone = one.failure ? "bad" : one.ended_at ? "good" : "busy";
  const resumed = one.resumed_from && `resumed from step ${count(one.resumed_from.step)}`;
  const steps =
    one.first_step !== null && one.last_step !== null && `steps ${count(one.first_step)} to ${count(one.last_step)}`;
  const started = Object.keys(one.startup).length > 0 && `first step after ${inParts(one.startup)}`;
  const length = duration(seconds(one.started_at, one.ended_at));
  return el(
    "li",
    {},
    el(
      "div",
      { class: "attempt-words" },
      el("strong", {}, `Attempt ${one.attempt}`),
      badge(one.failure ? "Failed" : one.ended_at ? "Ended" : one.phase || "Running"),
      el("span", { class: "muted" }, [length, resumed, steps, started].filter(Boolean).join(" · ")),
    ),
    el(
      "div",
      { class: "track", "aria-hidden": "true" },
      el("div", {
        class: "bar",
        data: { tone },
        style: { left: `${left}%`, width: `${Math.min(width, 100 - left)}%` },
      }),
    ),
    one.end && el("p", { class: "muted" }, one.end),
    one.failure &&
      el(
        "p",
        { class: "cause" },
        el("strong", {}, one.failure.cause),
        " ",
        cause(one.failure),
        " ",
        moment(one.failure.at),
      ),
  );
}

function cause(failure) {
  const rank = failure.rank !== null && `rank ${failure.rank}`;
  const where = [rank, failure.node && `on ${failure.node}`, failure.step !== null && `at step ${count(failure.step)}`];
  const words = [where.filter(Boolean).join(" "), failure.detail].filter(Boolean).join(": ");
  return failure.action ? `${words} (reaction: ${failure.action})` : words;
}

const STATES = [
  ["productive", "Productive", "--good"],
  ["checkpointing", "Checkpointing", "--series-2"],
  ["starting", "Starting", "--series-5"],
  ["restarting", "Restarting", "--warn"],
  ["queued", "Queued", "--series-4"],
  ["suspended", "Suspended", "--muted"],
  ["lost", "Lost", "--bad"],
];

/** The ledger up to now: it is written when the state changes, and the time since then belongs to that state. */
function untilNow(ledger) {
  const passed = Math.max(0, (Date.now() - Date.parse(ledger.since)) / 1000);
  const runs = Number.isFinite(passed) && STATES.some(([name]) => name === ledger.state);
  return runs ? { ...ledger, [ledger.state]: ledger[ledger.state] + passed } : ledger;
}

/** Where the time went: a bar, and its legend as a list with numbers. */
export function goodputBar(ledger) {
  if (!ledger) return el("p", { class: "empty" }, "Not measured yet.");
  const goodput = untilNow(ledger);
  const all = STATES.reduce((sum, [name]) => sum + goodput[name], 0);
  if (!all) return el("p", { class: "empty" }, "Not measured yet.");
  const parts = STATES.filter(([name]) => goodput[name] > 0);
  return el(
    "div",
    {},
    el(
      "p",
      { class: "figure-value" },
      percent(goodput.productive / all),
      el("span", { class: "muted" }, ` productive of ${duration(all)}`),
    ),
    el(
      "div",
      { class: "stack", "aria-hidden": "true" },
      parts.map(([name, , colour]) =>
        el("span", { style: { width: `${(100 * goodput[name]) / all}%`, background: `var(${colour})` } }),
      ),
    ),
    el(
      "ul",
      { class: "legend" },
      parts.map(([name, title, colour]) =>
        el(
          "li",
          {},
          el("span", { class: "swatch", style: { background: `var(${colour})` }, "aria-hidden": "true" }),
          `${title} ${duration(goodput[name])} (${percent(goodput[name] / all)})`,
        ),
      ),
    ),
  );
}

/** Ranks of the newest attempt as tiles in their nodes. */
export function rankMap(pods, avoided = []) {
  const newest = Math.max(-1, ...pods.map((pod) => pod.attempt));
  const shown = pods.filter((pod) => pod.attempt === newest);
  if (!shown.length) return el("p", { class: "empty" }, "No pod exists.");
  const nodes = Map.groupBy ? Map.groupBy(shown, (pod) => pod.node ?? "") : grouped(shown);
  const cards = [...nodes.entries()].sort(([a], [b]) => a.localeCompare(b)).map(([node, own]) => nodeCard(node, own));
  return el(
    "div",
    {},
    el("ul", { class: "nodes" }, cards),
    avoided.length > 0 && el("p", {}, "Avoided after failures: ", avoided.join(", ")),
  );
}

function grouped(pods) {
  const found = new Map();
  for (const pod of pods) found.set(pod.node ?? "", [...(found.get(pod.node ?? "") ?? []), pod]);
  return found;
}

function nodeCard(node, pods) {
  const unknown = pods.map((pod) => pod.unavailable.gpus).find(Boolean);
  const gpus = pods.reduce((sum, pod) => sum + (pod.gpus ?? 0), 0);
  const count = unknown ? " GPUs not known" : gpus ? ` ${gpus} GPUs` : "";
  return el(
    "li",
    { class: "node" },
    el("h3", {}, node || "Not placed", el("span", { class: "muted" }, count)),
    unknown && el("p", { class: "muted" }, unknown),
    pods.map((pod) =>
      el(
        "div",
        { class: "pod" },
        el("p", { class: "pod-name" }, pod.pod_name, " ", badge(pod.ready ? "Ready" : pod.phase)),
        el("ul", { class: "ranks", "aria-label": `Ranks of ${pod.pod_name}` }, tiles(pod)),
        pod.message && el("p", { class: "cause" }, pod.message),
      ),
    ),
  );
}

function tiles(pod) {
  const tone =
    pod.ready || pod.phase === "Succeeded"
      ? "good"
      : pod.phase === "Failed"
        ? "bad"
        : pod.phase === "Running"
          ? "busy"
          : "calm";
  return Array.from({ length: pod.last_rank - pod.first_rank + 1 }, (_, index) =>
    el("li", { class: "rank", data: { tone } }, String(pod.first_rank + index)),
  );
}

const WIDE = 24;

/** Facts as a list of terms; a long text takes the room of two. */
export function facts(pairs) {
  return el(
    "dl",
    { class: "facts" },
    pairs.map(([term, value]) =>
      el("div", { class: value?.length > WIDE ? "wide" : null }, el("dt", {}, term), el("dd", {}, value ?? DASH)),
    ),
  );
}
