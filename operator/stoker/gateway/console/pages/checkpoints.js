// Checkpoints: which run and attempt wrote each, what goes on from it, who uses it; promotion to a deployment.
import { actionButton } from "../actions.js";
import { el, fill, panel } from "../dom.js";
import { badge, bytes, count, inOrder, moment, number, users } from "../format.js";
import { CHECKPOINTS, JOBS, liveList } from "../live.js";
import { promotable, promote } from "../promotion.js";
import { table } from "../table.js";
import { jobLink } from "./jobs.js";

export const title = () => "Checkpoints";

export function show(main, page) {
  let checkpoints = [],
    jobs = [];
  const lineage = el("div");
  const rows = table({
    caption: "Checkpoints",
    nouns: ["checkpoint", "checkpoints"],
    columns: [
      { title: "Checkpoint", width: 9, sort: (one) => one.checkpoint_name, cell: (one) => one.checkpoint_name },
      {
        title: "Job",
        width: 7,
        sort: (one) => one.job_name,
        cell: (one) =>
          one.job_name
            ? el(
                "a",
                { href: jobLink(one.namespace, one.job_name), data: { focus: one.checkpoint_id } },
                one.job_name,
              )
            : "imported",
      },
      { title: "Step", width: 4.5, numeric: true, sort: (one) => one.step, cell: (one) => count(one.step) },
      {
        title: "State",
        width: 11.5,
        sort: (one) => one.phase,
        cell: (one) => [badge(one.phase), one.verified ? " verified" : " not verified", one.pinned ? ", pinned" : ""],
      },
      {
        title: "Loss",
        width: 4.5,
        numeric: true,
        sort: (one) => one.metadata.loss,
        cell: (one) => number(one.metadata.loss),
      },
      {
        title: "Validation",
        width: 6,
        numeric: true,
        sort: (one) => one.metadata.validation_loss,
        cell: (one) => number(one.metadata.validation_loss),
      },
      { title: "Size", width: 5.5, numeric: true, sort: (one) => one.size_bytes, cell: (one) => bytes(one.size_bytes) },
      { title: "Used by", width: 9, fold: true, cell: (one) => users(one.in_use_by).join(", ") },
      { title: "Saved", width: 6.5, sort: (one) => one.timestamp, cell: (one) => moment(one.timestamp) },
      {
        title: "Action",
        width: 7,
        cell: (one) =>
          promotable(one) &&
          actionButton("Promote", () => promote(one), { "aria-label": `Promote ${one.checkpoint_name}` }),
      },
    ],
    key: (one) => one.checkpoint_id,
    version: (one) => one.resource_version,
    filter: (one) => `${one.checkpoint_name} ${one.job_name ?? "imported"} ${one.phase} ${one.in_use_by.join(" ")}`,
    empty: "No checkpoint here.",
  });
  fill(main, el("h1", {}, "Checkpoints"), panel("Lineage", lineage), panel("All", rows.element));
  const draw = () => fill(lineage, families(checkpoints, jobs));
  liveList(CHECKPOINTS, page, (found) => {
    checkpoints = found.sort(
      (a, b) => inOrder(b.timestamp, a.timestamp) || inOrder(a.checkpoint_name, b.checkpoint_name),
    );
    rows.update(checkpoints);
    draw();
  });
  liveList(JOBS, page, (found) => {
    jobs = found;
    draw();
  });
}

/** For each run its attempts, and in each attempt its saves in the order of their steps. */
function families(checkpoints, jobs) {
  const known = new Map();
  for (const one of checkpoints) {
    const key = `${one.namespace}/${one.job_name ?? ""}`;
    known.set(key, [...(known.get(key) ?? []), one]);
  }
  if (!known.size) return el("p", { class: "empty" }, "No checkpoint here.");
  const origins = jobs.map((job) => ({ job, from: job.spec.modelFrom?.checkpoint?.name })).filter((one) => one.from);
  return el(
    "ul",
    { class: "families" },
    [...known.values()].map((own) => family(own, origins)),
  );
}

function family(own, origins) {
  const { namespace, job_name: job } = own[0];
  const origin = origins.find((one) => one.job.job_name === job && one.job.namespace === namespace);
  const attempts = new Map();
  for (const one of [...own].sort((a, b) => (a.step ?? 0) - (b.step ?? 0)))
    attempts.set(one.attempt ?? 0, [...(attempts.get(one.attempt ?? 0) ?? []), one]);
  return el(
    "li",
    {},
    el(
      "h3",
      {},
      job ? el("a", { href: jobLink(namespace, job) }, job) : "Imported",
      origin && el("span", { class: "muted" }, ` began at ${origin.from}`),
    ),
    [...attempts.entries()]
      .sort(([a], [b]) => a - b)
      .map(([number, saves]) =>
        el(
          "div",
          { class: "chain" },
          el("span", { class: "muted" }, job ? `attempt ${number}` : ""),
          el(
            "ol",
            {},
            saves.map((one) =>
              save(
                one,
                origins.filter((found) => found.from === one.checkpoint_name && found.job.namespace === namespace),
              ),
            ),
          ),
        ),
      ),
  );
}

function save(one, children) {
  const tone = one.phase === "Corrupt" || one.phase === "Failed" ? "bad" : one.verified ? "good" : "busy";
  const using = [...users(one.in_use_by), ...children.map(({ job }) => `continued by ${job.job_name}`)];
  return el(
    "li",
    { class: "save", data: { tone }, title: `${one.checkpoint_name}: ${one.phase}` },
    el("span", {}, one.step === null ? one.checkpoint_name : `step ${count(one.step)}`),
    el("span", { class: "unseen" }, one.verified ? ", verified" : `, ${one.phase}, not verified`),
    using.length > 0 && el("span", { class: "users" }, using.join(", ")),
  );
}
