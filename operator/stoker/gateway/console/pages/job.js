// One job: what it measures, its attempts and their causes, its ranks, its use of time, and the actions on it.
import { actionButton, confirmed, notice, send } from "../actions.js";
import { address, onceKey, resource } from "../api.js";
import { el, fill, panel, sliced } from "../dom.js";
import { badge, bytes, count, duration, moment, number, users } from "../format.js";
import { JOBS, liveOne, reader } from "../live.js";
import { MISSING, figure, library } from "../plots.js";
import { continued } from "../resume.js";
import { table } from "../table.js";
import { facts, goodputBar, rankMap, timeline } from "../timeline.js";
import { jobLink } from "./jobs.js";

const ENDED = ["COMPLETED", "FAILED", "CANCELLED"];
const TRAINS = ["RUNNING", "CHECKPOINTING"];
const SERIES = [
  [
    "Loss",
    [
      { title: "loss", colour: "--series-1", pick: (p) => p.loss, least: true },
      { title: "validation loss", colour: "--series-2", pick: (p) => p.validation_loss, points: true, least: true },
    ],
  ],
  ["Learning rate", [{ title: "rate", colour: "--series-3", pick: (p) => p.learning_rate }]],
  ["Gradient norm", [{ title: "norm", colour: "--series-4", pick: (p) => p.gradient_norm }]],
  ["Tokens per second", [{ title: "tokens/s", colour: "--series-5", pick: (p) => p.tokens_per_second }]],
];

export const title = ([, name]) => `Job ${name}`;

export async function show(main, page, [place, name]) {
  const path = resource("training/jobs", name);
  const uPlot = await library();
  if (page.signal.aborted) return;
  const head = el("div", {}, el("h1", {}, name)),
    why = el("p", { class: "why-line", role: "status" }),
    buttons = el("div", { class: "buttons" });
  const summary = el("div"),
    missing = el("p", { class: "muted" });
  const figures = SERIES.map(([heading, series]) => figure(uPlot, heading, series, page.signal, `job-${name}`));
  const lines = el("div"),
    ranks = el("div"),
    time = el("div"),
    saves = checkpointTable(),
    unsaved = el("div");
  fill(
    main,
    head,
    why,
    buttons,
    summary,
    uPlot ? null : el("p", { class: "hint" }, MISSING),
    el(
      "div",
      { class: "figures" },
      figures.map((one) => one.element),
    ),
    missing,
    panel("Attempts", lines),
    el("div", { class: "columns" }, panel("Goodput", time), panel("Ranks on nodes", ranks)),
    panel("Checkpoints", unsaved, saves.element),
  );

  const points = new Map();
  let newest = 0,
    asked = 0,
    gaps = [],
    avoided = [],
    saved = [],
    pods = null;
  let sorted = [];
  const drawPlots = sliced(
    [
      () => {
        sorted = [...points.values()].sort((a, b) => a.step - b.step);
      },
      ...figures.map((one) => () => one.update(sorted)),
    ],
    page.signal,
  );
  const metrics = reader(
    `${path}/metrics`,
    () => {
      asked = newest;
      return { namespace: place, after_step: asked };
    },
    page,
    (found, error) => {
      if (!found) {
        missing.textContent = `The history of metrics cannot be read: ${error.message}`;
        return;
      }
      if (asked !== newest) return; // the run went back meanwhile; it is asked again
      gaps = gaps.filter((one) => one.after < newest); // what was asked again is answered anew
      if (found.missing) gaps.push({ after: newest, text: found.missing });
      missing.textContent = gaps.length ? `Not covered: ${gaps.map((one) => one.text).join("; ")}` : "";
      for (const point of found.points) points.set(point.step, { ...points.get(point.step), ...point });
      newest = Math.max(newest, ...found.points.slice(-1).map((point) => point.step));
      drawPlots();
    },
  );
  const unread = (what, error) => el("p", { class: "cause" }, `${what} cannot be read: ${error.message}`);
  const attempts = reader(`${path}/attempts`, { namespace: place }, page, (found, error) => {
    if (!found) return fill(lines, unread("The attempts", error));
    fill(lines, timeline(found.attempts));
    fill(time, goodputBar(found.goodput));
    avoided = found.avoided_nodes;
    return pods && fill(ranks, rankMap(pods, avoided));
  });
  const placed = reader(`${path}/pods`, { namespace: place }, page, (found, error) => {
    pods = found;
    fill(ranks, found ? rankMap(found, avoided) : unread("The pods", error));
  });
  const checkpoints = reader(`${path}/checkpoints`, { namespace: place, limit: 500 }, page, (found, error, headers) => {
    fill(unsaved, found ? olderOnes(headers, found) : unread("The checkpoints", error));
    if (!found) return;
    saved = found;
    saves.update(found);
  });

  let restarts = null,
    reached = null;
  liveOne(
    JOBS,
    name,
    place,
    page,
    (job) => {
      const { step } = job.metrics;
      const wentBack = step !== null && reached !== null && step < reached;
      if (wentBack) for (const known of [...points.keys()]) if (known > step) points.delete(known);
      const repeats = wentBack || (restarts !== null && job.metrics.restarts > restarts);
      if (repeats) newest = 0; // repeated steps have new values
      restarts = job.metrics.restarts;
      reached = step ?? reached;
      fill(head, el("h1", {}, job.job_name, " ", badge(job.phase)));
      why.textContent = job.message;
      drawButtons(buttons, job, path, () => saved);
      fill(summary, overview(job));
      if (wentBack || (step !== null && !points.has(step))) {
        points.set(step, pointOf(job.metrics));
        drawPlots();
      }
      metrics();
      attempts();
      placed();
      checkpoints();
    },
    () => {
      why.textContent = "This job was deleted.";
      fill(buttons);
    },
  );
}

const pointOf = ({ step, loss, learning_rate, gradient_norm, tokens_per_second }) => ({
  step,
  loss,
  learning_rate,
  gradient_norm,
  tokens_per_second,
  validation_loss: null,
});

function overview(job) {
  const m = job.metrics;
  return facts([
    ["Step", `${count(m.step)}${m.total_steps ? ` of ${count(m.total_steps)}` : ""}`],
    ["Loss", number(m.loss)],
    ["Validation loss", number(m.validation_loss)],
    ["Tokens", count(m.consumed_tokens)],
    ["Tokens per second", count(m.tokens_per_second && Math.round(m.tokens_per_second))],
    ["Time left", duration(job.status === "RUNNING" ? m.eta_seconds : null)],
    ["Ranks", count(job.world_size)],
    ["Restarts", count(m.restarts)],
    ["Lost steps", count(m.lost_steps)],
    [
      "Newest verified checkpoint",
      job.newest_verified_checkpoint ? `step ${count(job.newest_verified_checkpoint.step)}` : "none",
    ],
    ["Namespace", job.namespace],
    ["Started", moment(job.started_at)],
    ...(job.finished_at ? [["Finished", moment(job.finished_at)]] : []),
  ]);
}

function drawButtons(place, job, path, saved) {
  const state = `${job.status}${job.spec.run?.suspend ?? false}${job.spec.run?.cancel ?? false}`;
  if (place.dataset.state === state) return;
  place.dataset.state = state;
  const query = { namespace: job.namespace };
  const ended = ENDED.includes(job.status),
    stopped = ended || job.spec.run?.suspend;
  const post = (verb, done, headers = {}, body = {}) =>
    send(address(`${path}/${verb}`, query), { method: "POST", body, headers }, done);
  fill(
    place,
    TRAINS.includes(job.status) &&
      !job.spec.run?.suspend &&
      actionButton(
        "Save now",
        () =>
          post("checkpoint", (found) => `Save asked for: ${found.checkpoint_name}`, { "Idempotency-Key": onceKey() }),
        { class: "primary" },
      ),
    !stopped &&
      actionButton("Suspend", async () => {
        const sure = await confirmed(
          `Suspend ${job.job_name}?`,
          "It saves, gives its nodes back, and goes on from there when it is resumed.",
          "Suspend",
        );
        if (sure) await post("suspend", `${job.job_name} is being suspended`);
      }),
    (ended || (stopped && !job.spec.run?.cancel)) &&
      actionButton(ended ? "Continue as a new job" : "Resume", async () => {
        const body = ended ? await continued(job, saved()) : await resumed(job);
        if (!body) return;
        const done = ended ? (made) => `${made.job_name} goes on from it` : `${job.job_name} is being resumed`;
        const found = await post("resume", done, { "Idempotency-Key": onceKey() }, body);
        if (found && found.job_name !== job.job_name) location.hash = jobLink(found.namespace, found.job_name);
      }),
    !ended &&
      !job.spec.run?.cancel &&
      actionButton(
        "Cancel",
        async () => {
          const sure = await confirmed(
            `Cancel ${job.job_name}?`,
            "It saves once more and then ends for good.",
            "Cancel the job",
          );
          if (sure && (await send(address(path, query), { method: "DELETE" }, `${job.job_name} is being cancelled`)))
            notice("Its checkpoints stay.");
        },
        { class: "danger" },
      ),
  );
}

async function resumed(job) {
  const text = "It goes on from its newest verified checkpoint.";
  return (await confirmed(`Resume ${job.job_name}?`, text, "Resume")) ? {} : null;
}

/** How many checkpoints the first page leaves out. */
function olderOnes(headers, shown) {
  const rest = Number(headers.get("X-Total-Count")) - shown.length;
  if (!(rest > 0)) return null;
  const all = el("a", { href: "#/checkpoints" }, "all checkpoints");
  const text = `${count(rest)} older ${rest === 1 ? "one is" : "ones are"} not shown here; see `;
  return el("p", { class: "muted" }, text, all);
}

function checkpointTable() {
  return table({
    caption: "Checkpoints of this job",
    columns: [
      { title: "Checkpoint", cell: (one) => one.checkpoint_name },
      { title: "Step", numeric: true, sort: (one) => one.step, cell: (one) => count(one.step) },
      { title: "State", cell: (one) => [badge(one.phase), one.verified ? " verified" : " not verified"] },
      { title: "Loss", numeric: true, sort: (one) => one.metadata.loss, cell: (one) => number(one.metadata.loss) },
      { title: "Size", numeric: true, sort: (one) => one.size_bytes, cell: (one) => bytes(one.size_bytes) },
      { title: "Used by", cell: (one) => users(one.in_use_by).join(", ") },
      { title: "Saved", sort: (one) => one.timestamp, cell: (one) => moment(one.timestamp) },
    ],
    key: (one) => one.checkpoint_id,
    version: (one) => one.resource_version,
    empty: "No checkpoint yet.",
  });
}
