// The cluster: GPUs in total and by node.
import { el, fill, panel } from "../dom.js";
import { badge, bytes, count, number, percent, quantity } from "../format.js";
import { reader } from "../live.js";
import { table } from "../table.js";
import { facts } from "../timeline.js";

const AGAIN_MS = 10000;

export const title = () => "Cluster";

export function show(main, page) {
  const summary = el("div"),
    why = el("p", { class: "muted" });
  const rows = table({
    caption: "Nodes",
    empty: "No node.",
    key: (one) => one.node_id,
    version: (one) => JSON.stringify(one),
    filter: (one) => `${one.node_id} ${one.status}`,
    columns: [
      { title: "Node", width: 12, sort: (one) => one.node_id, cell: (one) => one.node_id },
      { title: "State", width: 7, sort: (one) => one.status, cell: (one) => badge(one.status) },
      { title: "GPUs", width: 5, numeric: true, sort: (one) => one.gpus, cell: (one) => count(one.gpus) },
      {
        title: "Available",
        width: 6,
        numeric: true,
        sort: (one) => one.available_gpus,
        cell: (one) => count(one.available_gpus),
      },
      {
        title: "GPU memory used",
        width: 9,
        numeric: true,
        cell: (one) => bytes(one.gpu_memory_used?.reduce((sum, value) => sum + value, 0)),
      },
      { title: "CPUs", width: 5, numeric: true, cell: (one) => number(quantity(one.cpu)) },
      { title: "Memory", width: 8, numeric: true, cell: (one) => bytes(quantity(one.memory)) },
    ],
  });
  fill(main, el("h1", {}, "Cluster"), summary, why, panel("Nodes", rows.element));
  const refused = (error) => {
    page.connection(error.status ? "live" : "lost", error.message);
    why.textContent = error.message;
  };
  const status = reader("/v1/cluster/status", {}, page, (found, error) => {
    if (!found) return refused(error);
    page.connection("live", "");
    why.textContent = reasons(found.unavailable);
    return fill(
      summary,
      facts([
        ["GPUs", count(found.total_gpus)],
        ["Available", count(found.available_gpus)],
        ["Active jobs", count(found.active_jobs)],
        ["Nodes ready", `${count(found.ready_nodes)} of ${count(found.nodes)}`],
        ["GPU use", percent(found.gpu_utilization)],
        ["GPU memory use", percent(found.memory_utilization)],
      ]),
    );
  });
  const nodes = reader("/v1/cluster/nodes", {}, page, (found, error) =>
    found ? rows.update(found) : refused(error),
  );
  const timer = setInterval(() => {
    if (!document.hidden) {
      status();
      nodes();
    }
  }, AGAIN_MS);
  page.signal.addEventListener("abort", () => clearInterval(timer), { once: true });
}

const WORDS = { gpu_utilization: "GPU use", memory_utilization: "GPU memory use" };

/** Each reason once, with all that it explains. */
function reasons(unavailable) {
  const by = new Map();
  for (const [what, reason] of Object.entries(unavailable))
    by.set(reason, [...(by.get(reason) ?? []), WORDS[what] ?? what]);
  return [...by.entries()].map(([reason, all]) => `${all.join(" and ")}: ${reason}`).join(". ");
}
