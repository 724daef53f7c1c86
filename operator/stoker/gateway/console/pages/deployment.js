// One deployment: pools, engines with their load, traffic, promotion, revisions with roll back, and a chat.
import { actionButton, confirmed, send } from "../actions.js";
import { address, resource } from "../api.js";
import { el, fill, panel } from "../dom.js";
import { DASH, badge, count, inParts, latency, meter, moment, number } from "../format.js";
import { DEPLOYMENTS, liveOne, reader } from "../live.js";
import { promoteTo } from "../promotion.js";
import { table } from "../table.js";
import { facts } from "../timeline.js";
import { between, quantile } from "../traffic.js";
import { chat } from "../chat.js";

const MEASURED_MS = 5000;
const SECOND_MS = 1000; // a rate needs two answers

export const title = ([, name]) => `Deployment ${name}`;

export function show(main, page, [place, name]) {
  const path = resource("deployments", name);
  const head = el("div", {}, el("h1", {}, name)),
    why = el("p", { class: "why-line", role: "status" }),
    buttons = el("div", { class: "buttons" }),
    summary = el("div"),
    traffic = el("div");
  const pools = poolTable(),
    engines = engineTable(),
    scaling = scalingPanel(),
    revisions = revisionTable((revision) => rollBack(path, place, name, revision));
  const talk = chat(`${path}/chat/completions`, place, page.signal);
  fill(
    main,
    head,
    why,
    buttons,
    summary,
    el("div", { class: "columns" }, panel("Traffic", traffic), panel("Pools", pools.element)),
    scaling.place,
    panel("Engines", engines.element),
    panel("Revisions", revisions.element),
    panel("Chat", talk.element),
  );

  fill(
    buttons,
    actionButton("Promote a checkpoint", () => promoteTo(place, name)),
  );

  let earlier = null;
  const measured = reader(
    `${path}/serving`,
    { namespace: place },
    page,
    (found, error) => {
      if (!found) {
        fill(traffic, el("p", { class: "empty" }, error.message));
        return;
      }
      engines.update(found.engines.map((one) => ({ ...one, version: JSON.stringify(one) })));
      fill(traffic, trafficFacts(found, between(earlier, found)));
      earlier = found;
    },
    SECOND_MS,
  );
  const timer = setInterval(() => {
    if (!document.hidden) measured();
  }, MEASURED_MS);
  setTimeout(() => !page.signal.aborted && measured(), SECOND_MS);
  page.signal.addEventListener("abort", () => clearInterval(timer), { once: true });

  liveOne(
    DEPLOYMENTS,
    name,
    place,
    page,
    (found) => {
      fill(head, el("h1", {}, found.deployment_name, " ", badge(found.phase)));
      why.textContent = found.message;
      fill(
        summary,
        facts([
          ["Ready", found.ready ?? DASH],
          [
            "Serves",
            found.checkpoint
              ? `${found.checkpoint.checkpoint_name}, step ${count(found.checkpoint.step)}`
              : (found.spec.model?.uri ?? DASH),
          ],
          ["Model names", found.models.join(", ") || DASH],
          ["Endpoint in the cluster", found.endpoint ?? DASH],
          ["Follows", follows(found.spec.model)],
          [
            "Rollout",
            found.rollout
              ? `${found.rollout.phase}: ${found.rollout.from_revision ?? "nothing"} to ${found.rollout.to_revision}`
              : "none",
          ],
        ]),
      );
      pools.update(found.pools.map((pool) => ({ ...pool, version: JSON.stringify(pool) })));
      scaling.update(found.pools);
      const newest = found.rollout?.to_revision ?? found.current_revision;
      const wanted = found.revisions.find((one) => one.name === newest)?.checkpoint?.checkpoint_name;
      revisions.update(
        found.revisions.map((one) => ({
          ...one,
          wanted,
          version: `${one.name} ${one.share} ${wanted}`,
        })),
      );
      const none = !found.ready || found.ready.startsWith("0/");
      const idle = none ? `No engine is ready${found.message ? `: ${found.message}` : ""}.` : "";
      talk.model(found.models[0] ?? found.deployment_name, idle);
      measured();
    },
    () => {
      why.textContent = "This deployment was deleted.";
      fill(buttons);
    },
  );
}

function follows(model) {
  const selector = model?.checkpointSelector;
  return selector
    ? `the ${selector.policy ?? "newest"} verified checkpoint of ${selector.jobRef?.name}`
    : `nothing: the ${model?.uri ? "address" : "checkpoint"} is fixed`;
}

function trafficFacts(found, rates) {
  const t = found.traffic;
  const why = Object.entries(found.unavailable).map(([what, reason]) =>
    el("p", { class: "muted" }, `${what}: ${reason}`),
  );
  if (!t) return why;
  const shown = rates ?? {};
  return [
    facts([
      ["Requests per second", number(shown.requestsPerSecond)],
      ["Errors per second", number(shown.errorsPerSecond)],
      ["First byte, half within", latency(quantile(shown.firstByte ?? [], 0.5))],
      ["First byte, 95 % within", latency(quantile(shown.firstByte ?? [], 0.95))],
      ["First token, 95 % within", latency(quantile(shown.firstToken ?? [], 0.95))],
      ["Requests under way", count(t.pending)],
      ["Waiting for an engine", count(t.held)],
      ["Answers since start", count(Object.values(t.requests).reduce((sum, value) => sum + value, 0))],
    ]),
    found.routers > 1 && el("p", { class: "muted" }, `Counters of ${found.routers} routers together.`),
    why,
  ];
}

function poolTable() {
  return table({
    caption: "Pools",
    least: 31,
    empty: "No pool yet.",
    key: (one) => one.name,
    version: (one) => one.version,
    columns: [
      { title: "Pool", cell: (one) => one.name },
      { title: "Role", cell: (one) => one.role },
      { title: "Ready", numeric: true, cell: (one) => `${one.ready} / ${one.replicas}` },
      { title: "Updated", numeric: true, cell: (one) => count(one.updated) },
      { title: "Last start", cell: (one) => (one.last_start ? inParts(one.last_start.parts) : DASH) },
      { title: "Message", cell: (one) => one.message },
    ],
  });
}

/** The autoscaler's decisions of all pools; nothing is shown where it has made none. */
function scalingPanel() {
  const place = el("div");
  const decisions = table({
    caption: "Decisions of the autoscaler",
    empty: "No decision yet.",
    key: (one) => one.key,
    version: (one) => one.key,
    columns: [
      { title: "When", cell: (one) => moment(one.time) },
      { title: "Pool", cell: (one) => one.pool },
      { title: "Replicas", cell: (one) => `${count(one.before)} → ${count(one.after)}` },
      { title: "Why", cell: (one) => [one.reason, one.message].filter(Boolean).join(": ") },
      {
        title: "Computed from",
        cell: (one) =>
          Object.entries(one.inputs)
            .map(([name, value]) => `${name} ${value}`)
            .join(", "),
      },
    ],
  });
  return {
    place,
    update(pools) {
      const all = pools.flatMap(({ name, decisions: found }) =>
        found.map((one) => ({ ...one, pool: name, key: `${name} ${one.time} ${one.before} ${one.after}` })),
      );
      if (all.length && !place.firstChild) fill(place, panel("Autoscaler", decisions.element));
      decisions.update(all.sort((a, b) => String(b.time).localeCompare(String(a.time))));
    },
  };
}

function engineTable() {
  return table({
    caption: "Engines",
    least: 48,
    empty: "No engine yet.",
    key: (one) => one.pod_name,
    version: (one) => one.version,
    columns: [
      { title: "Engine", cell: (one) => one.pod_name },
      { title: "Pool", cell: (one) => one.pool },
      { title: "Revision", cell: (one) => one.revision },
      { title: "Phase", cell: (one) => badge(one.draining ? "Draining" : one.phase) },
      { title: "Running", numeric: true, cell: (one) => count(one.load?.running) },
      { title: "Waiting", numeric: true, cell: (one) => count(one.load?.waiting) },
      { title: "KV cache", cell: (one) => meter(one.load?.kv_cache_usage, `KV cache of ${one.pod_name}`) },
      { title: "Message", cell: (one) => one.message },
    ],
  });
}

function revisionTable(back) {
  return table({
    caption: "Revisions",
    least: 31,
    empty: "No revision yet.",
    key: (one) => one.name,
    version: (one) => one.version,
    columns: [
      { title: "Revision", cell: (one) => one.name },
      { title: "Traffic", numeric: true, cell: (one) => `${one.share} %` },
      {
        title: "Checkpoint",
        cell: (one) =>
          one.checkpoint ? `${one.checkpoint.checkpoint_name}, step ${count(one.checkpoint.step)}` : DASH,
      },
      { title: "Created", cell: (one) => moment(one.created_at) },
      {
        title: "Action",
        cell: (one) =>
          one.checkpoint &&
          one.checkpoint.checkpoint_name !== one.wanted &&
          actionButton("Roll back", () => back(one), { "aria-label": `Roll back to ${one.name}` }),
      },
    ],
  });
}

async function rollBack(path, place, name, revision) {
  const text = `It then serves ${revision.checkpoint.checkpoint_name} again; the other fields of its spec stay.`;
  if (!(await confirmed(`Roll ${name} back?`, text, "Roll back"))) return;
  await send(
    address(`${path}/rollback`, { namespace: place }),
    { method: "POST", body: { revision: revision.name } },
    `${name} goes back to ${revision.checkpoint.checkpoint_name}`,
  );
}
