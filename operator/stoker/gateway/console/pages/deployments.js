// All deployments: phase, ready engines, checkpoint, why one does not serve.
import { el, fill } from "../dom.js";
import { age, badge, count, why } from "../format.js";
import { DEPLOYMENTS, liveList } from "../live.js";
import { table } from "../table.js";

export const title = () => "Deployments";

export function show(main, page) {
  const rows = table({
    caption: "Deployments",
    nouns: ["deployment", "deployments"],
    columns: [
      {
        title: "Deployment",
        width: 9,
        sort: (one) => one.deployment_name,
        cell: (one) =>
          el(
            "a",
            {
              href: `#/deployments/${encodeURIComponent(one.namespace)}/${encodeURIComponent(one.deployment_name)}`,
              data: { focus: one.deployment_id },
            },
            one.deployment_name,
          ),
      },
      { title: "Phase", width: 7, sort: (one) => one.phase, cell: (one) => badge(one.phase) },
      { title: "Ready", width: 4.5, cell: (one) => one.ready },
      {
        title: "Checkpoint",
        width: 12,
        cell: (one) => one.checkpoint && `${one.checkpoint.checkpoint_name} (step ${count(one.checkpoint.step)})`,
      },
      {
        title: "Pools",
        width: 9,
        cell: (one) => one.pools.map((pool) => `${pool.name} ${pool.ready}/${pool.replicas}`).join(", "),
      },
      { title: "Why it does not serve", width: 13, fold: true, cell: (one) => why(one.message) },
      { title: "Namespace", width: 6.5, sort: (one) => one.namespace, cell: (one) => one.namespace },
      {
        title: "Age",
        width: 5.5,
        numeric: true,
        sort: (one) => -Date.parse(one.created_at),
        cell: (one) => age(one.created_at),
      },
    ],
    key: (one) => one.deployment_id,
    version: (one) => one.resource_version,
    filter: (one) => `${one.deployment_name} ${one.phase} ${one.namespace} ${one.message}`,
    empty: "No deployment here.",
  });
  fill(main, el("h1", {}, "Deployments"), rows.element);
  liveList(DEPLOYMENTS, page, (found) =>
    rows.update(found.sort((a, b) => a.deployment_name.localeCompare(b.deployment_name))),
  );
}
