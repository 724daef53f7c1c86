// Promotion: the question which deployment serves a checkpoint, or which checkpoint a deployment serves.
import { confirmed, notice, send } from "./actions.js";
import { address, read, resource } from "./api.js";
import { el } from "./dom.js";
import { count, inOrder, number } from "./format.js";

const PAGE = 500;

export const promotable = (one) => one.verified && one.status === "COMPLETE";

/** Ask which deployment is to serve a checkpoint, and promote it. */
export async function promote(checkpoint) {
  const found = await listed("/v1/deployments", checkpoint.namespace);
  if (!found) return;
  const options = found.map((one) => [
    one.deployment_name,
    `${one.deployment_name} (${one.checkpoint?.checkpoint_name ?? "no checkpoint"})`,
  ]);
  const none = `No deployment in namespace ${checkpoint.namespace}`;
  const chosen = await asked("Promote", says(checkpoint.checkpoint_name), "Deployment ", options, none);
  if (chosen) await move(checkpoint.namespace, chosen, checkpoint.checkpoint_id, checkpoint.checkpoint_name);
}

/** Ask which verified checkpoint a deployment is to serve, newest first, and promote it. */
export async function promoteTo(namespace, name) {
  const found = await listed("/v1/checkpoints", namespace);
  if (!found) return;
  const usable = found.filter(promotable).sort((a, b) => inOrder(b.timestamp, a.timestamp));
  const options = usable.map((one) => [one.checkpoint_id, described(one)]);
  const none = `No verified checkpoint in namespace ${namespace}`;
  const chosen = await asked(`Promote to ${name}`, says("the checkpoint"), "Checkpoint ", options, none);
  const checkpoint = usable.find((one) => one.checkpoint_id === chosen);
  if (checkpoint) await move(namespace, name, chosen, checkpoint.checkpoint_name);
}

const says = (what) => `It then serves ${what} instead of the model of its spec, by its rollout rules.`;

function described(one) {
  const loss = one.metadata.loss === null ? "" : `, loss ${number(one.metadata.loss)}`;
  return `${one.checkpoint_name} (step ${count(one.step)}${loss})`;
}

/** All items of a list, page by page; null after an error, which is shown. */
async function listed(path, namespace) {
  const items = [];
  let after = null;
  try {
    do {
      const page = await read(address(path, { namespace, limit: PAGE, ...(after ? { continue: after } : {}) }));
      items.push(...page.items);
      after = page.continue;
    } while (after);
    return items;
  } catch (error) {
    notice(error.message, true);
    return null;
  }
}

/** Ask for one of the `[value, text]` options; null where none is chosen, or there is none. */
async function asked(title, text, label, options, none) {
  if (!options.length) {
    notice(none, true);
    return null;
  }
  const chosen = el(
    "select",
    {},
    options.map(([value, words]) => el("option", { value }, words)),
  );
  const sure = await confirmed(title, text, "Promote", [el("label", { class: "field" }, label, chosen)]);
  return sure ? chosen.value : null;
}

const move = (namespace, deployment, id, name) =>
  send(
    address(`${resource("deployments", deployment)}/promote`, { namespace }),
    { method: "POST", body: { checkpoint_id: id } },
    `${deployment} moves to ${name}`,
  );
