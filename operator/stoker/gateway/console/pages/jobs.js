// All jobs: phase, why one is not running, step, loss.
import { el, fill } from "../dom.js";
import { age, badge, count, inOrder, number, roughly, why } from "../format.js";
import { JOBS, liveList } from "../live.js";
import { table } from "../table.js";

export const title = () => "Jobs";
export const jobLink = (namespace, name) => `#/jobs/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;

export function show(main, page) {
  const rows = table({
    caption: "Training jobs",
    nouns: ["job", "jobs"],
    columns: [
      {
        title: "Job",
        width: 9,
        sort: (job) => job.job_name,
        cell: (job) =>
          el("a", { href: jobLink(job.namespace, job.job_name), data: { focus: job.job_id } }, job.job_name),
      },
      { title: "Phase", width: 7.5, sort: (job) => job.phase, cell: (job) => badge(job.phase) },
      { title: "Step", width: 11, numeric: true, sort: (job) => job.metrics.step, cell: (job) => progress(job) },
      {
        title: "Loss",
        width: 4.5,
        numeric: true,
        sort: (job) => job.metrics.loss,
        cell: (job) => number(job.metrics.loss),
      },
      {
        title: "Tokens/s",
        width: 5.5,
        numeric: true,
        sort: (job) => job.metrics.tokens_per_second,
        cell: (job) => count(job.metrics.tokens_per_second && Math.round(job.metrics.tokens_per_second)),
      },
      {
        title: "Time left",
        width: 5.5,
        numeric: true,
        sort: (job) => job.metrics.eta_seconds,
        cell: (job) => roughly(job.status === "RUNNING" ? job.metrics.eta_seconds : null),
      },
      {
        title: "Restarts",
        width: 5.5,
        numeric: true,
        sort: (job) => job.metrics.restarts,
        cell: (job) => count(job.metrics.restarts),
      },
      { title: "Why it is not running", width: 13, fold: true, cell: (job) => why(job.message) },
      { title: "Namespace", width: 6, sort: (job) => job.namespace, cell: (job) => job.namespace },
      {
        title: "Age",
        width: 5.5,
        numeric: true,
        sort: (job) => -Date.parse(job.created_at),
        cell: (job) => age(job.created_at),
      },
    ],
    key: (job) => job.job_id,
    version: (job) => job.resource_version,
    filter: (job) => `${job.job_name} ${job.phase} ${job.namespace} ${job.message}`,
    empty: "No job here.",
  });
  const tally = el("ul", { class: "tally", "aria-label": "Jobs by phase" });
  fill(main, el("h1", {}, "Jobs"), tally, rows.element);
  liveList(JOBS, page, (jobs) => {
    jobs.sort((a, b) => inOrder(b.created_at, a.created_at) || inOrder(a.job_name, b.job_name));
    rows.update(jobs);
    fill(tally, counted(jobs));
  });
}

function progress(job) {
  const { step, total_steps: total } = job.metrics;
  if (step === null) return number(null);
  const bar = total && el("progress", { max: total, value: step, "aria-label": "Steps" });
  return el("span", { class: "progress" }, bar, `${count(step)}${total ? ` / ${count(total)}` : ""}`);
}

function counted(jobs) {
  const by = new Map();
  for (const job of jobs) by.set(job.phase, (by.get(job.phase) ?? 0) + 1);
  return [...by.entries()].sort().map(([phase, number]) => el("li", {}, badge(phase), ` ${number}`));
}
