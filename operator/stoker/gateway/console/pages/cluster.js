// The cluster: GPUs in total and by node.
import { el, fill, panel } from "../dom.js";
import { DASH, badge, bytes, count, meter, number, percent, quantity } from "../format.js";
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
    nouns: ["node", "nodes"],
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
      { title: "GPU use", width: 6, numeric: true, sort: load, cell: (one) => percent(load(one)) },
      { title: "GPU memory used", width: 9, numeric: true, sort: held, cell: (one) => bytes(held(one)) },
      { title: "CPUs", width: 5, numeric: true, cell: (one) => number(quantity(one.cpu)) },
      { title: "Memory", width: 8, numeric: true, cell: (one) => bytes(quantity(one.memory)) },
    ],
  });
  const gpus = gpuTable(),
    kinds = el("ul", { class: "muted gpu-kinds", hidden: true }),
    unmeasured = el("ul", { class: "muted", hidden: true }),
    devices = panel("GPUs", gpus.element, unmeasured);
  devices.hidden = true;
  fill(main, el("h1", {}, "Cluster"), summary, why, panel("Nodes", rows.element, kinds), devices);
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
        ...measuredBy(found),
      ]),
    );
  });
  const nodes = reader("/v1/cluster/nodes", {}, page, (found, error) => {
    if (!found) return refused(error);
    rows.update(found);
    const named = found.map(kindsOf).filter(Boolean);
    kinds.hidden = named.length === 0;
    fill(kinds, named);
    const measured = found.flatMap((node) => node.gpu_devices.map((gpu) => ({ ...gpu, node })));
    devices.hidden = measured.length === 0;
    gpus.update(measured);
    const partly = found.filter((node) => node.unavailable.gpu_devices);
    unmeasured.hidden = partly.length === 0;
    return fill(
      unmeasured,
      partly.map((node) => el("li", {}, `${node.node_id}: ${node.unavailable.gpu_devices}`)),
    );
  });
  const timer = setInterval(() => {
    if (!document.hidden) {
      status();
      nodes();
    }
  }, AGAIN_MS);
  page.signal.addEventListener("abort", () => clearInterval(timer), { once: true });
}

/** What the GPUs of a node are: MIG devices, and those of drivers; nothing where all are whole `nvidia.com/gpu`. */
function kindsOf(node) {
  if (node.gpu_resources.every((one) => one.name === "nvidia.com/gpu")) return null;
  const kinds = node.gpu_resources.map((one) => `${count(one.available)} of ${count(one.total)} ${one.name} available`);
  return el("li", {}, `${node.node_id}: ${kinds.join(", ")}`);
}

/** The mean use of a node's GPUs, 0 to 1; null where it is not measured. */
function load(node) {
  const found = node.gpu_devices.map((gpu) => gpu.utilization).filter((value) => value !== null);
  return found.length ? sum(found) / found.length : null;
}

/** The memory that a node's GPUs hold, in bytes; null where it is not measured. */
const held = (node) => (node.gpu_memory_used ? sum(node.gpu_memory_used) : null);

const sum = (values) => values.reduce((all, value) => all + value, 0);

const SOURCES = { dcgm: "DCGM", agents: "agents" };

/** Each GPU that is measured, with its use and its memory. */
function gpuTable() {
  const part = (gpu) =>
    gpu.memory_used === null || !gpu.memory_total ? null : gpu.memory_used / gpu.memory_total;
  return table({
    caption: "GPUs",
    nouns: ["GPU", "GPUs"],
    empty: "No GPU is measured.",
    key: (gpu) => `${gpu.node.node_id} ${gpu.gpu}`,
    version: (gpu) => JSON.stringify(gpu),
    filter: (gpu) => `${gpu.node.node_id} ${gpu.gpu}`,
    columns: [
      { title: "GPU", width: 20.5, sort: (gpu) => gpu.gpu, cell: (gpu) => gpu.gpu },
      { title: "Node", width: 9, sort: (gpu) => gpu.node.node_id, cell: (gpu) => gpu.node.node_id },
      { title: "Use", width: 10, sort: (gpu) => gpu.utilization, cell: (gpu) => meter(gpu.utilization, "Use", {}) },
      { title: "Memory", width: 10, sort: part, cell: (gpu) => meter(part(gpu), "Memory", {}) },
      {
        title: "Memory used",
        width: 10.5,
        numeric: true,
        sort: (gpu) => gpu.memory_used,
        cell: (gpu) =>
          gpu.memory_used === null ? DASH : `${bytes(gpu.memory_used)} of ${bytes(gpu.memory_total)}`,
      },
      { title: "Measured by", width: 7.5, cell: (gpu) => SOURCES[gpu.node.gpu_source] },
    ],
  });
}

const WORDS = { gpu_utilization: "GPU use", memory_utilization: "GPU memory use", total_gpus: "GPUs" };

/** Each reason once, with all that it explains. */
function reasons(unavailable) {
  const by = new Map();
  for (const [what, reason] of Object.entries(unavailable))
    by.set(reason, [...(by.get(reason) ?? []), WORDS[what] ?? what]);
  return [...by.entries()].map(([reason, all]) => `${all.join(" and ")}: ${reason}`).join(". ");
}

/** The fact of how many GPUs have figures, and from where; none where nothing measures them. */
function measuredBy(found) {
  if (!found.gpu_source) return [];
  return [["GPUs measured", `${count(found.gpus_measured)} by ${SOURCES[found.gpu_source]}`]];
}
