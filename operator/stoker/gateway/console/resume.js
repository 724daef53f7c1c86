// The question before a finished job goes on as a new one: from which checkpoint, and to which step.
import { confirmed } from "./actions.js";
import { el } from "./dom.js";
import { count } from "./format.js";
import { promotable } from "./promotion.js";

/** Ask; resolves to the body of the request, or to null. `checkpoints` are those of the job, newest first. */
export async function continued(job, checkpoints) {
  const usable = checkpoints.filter(promotable);
  const from = el(
    "select",
    {},
    usable.map((one) =>
      el("option", { value: one.checkpoint_id }, `${one.checkpoint_name} (step ${count(one.step)})`),
    ),
  );
  const steps = el("input", { type: "number", min: 1, step: 1, value: length(job, usable) });
  const text = usable.length
    ? "A new job begins at the checkpoint, with its optimizer, schedule and place in the data."
    : "This job has no verified checkpoint, so that no job can go on from it.";
  const fields = usable.length
    ? [el("label", { class: "field" }, "From ", from), el("label", { class: "field" }, "Steps in total ", steps)]
    : [];
  if (!(await confirmed(`Continue ${job.job_name}?`, text, usable.length ? "Continue" : null, fields))) return null;
  return { checkpoint_id: from.value, ...(steps.value ? { total_steps: Number(steps.value) } : {}) };
}

/** The length to offer: the job's own, or where its newest checkpoint is at the end, as much again. */
function length(job, [newest]) {
  const total = job.metrics.total_steps;
  return total && newest?.step >= total ? total * 2 : total;
}
