// Resources that follow the cluster: a map by uid, drawn again when something changes.
import { address, open } from "./api.js";
import { follow } from "./events.js";
import { batched } from "./dom.js";
import { namespace } from "./session.js";

/**
 * Follow every resource of a kind in the chosen namespace.
 * `kind`: path and field of the uid. `draw(items)` gets all of them, at most once for each frame.
 */
export function liveList(kind, page, draw) {
  let items = new Map(),
    coming = null;
  const redraw = batched(() => draw([...items.values()]), page.signal);
  const on = {
    reset: () => {
      coming = new Map();
    },
    change: (type, item) => {
      const target = coming ?? items;
      if (type === "DELETED") target.delete(item[kind.uid]);
      else target.set(item[kind.uid], item);
      if (!coming) redraw();
    },
    complete: () => {
      if (coming) {
        items = coming;
        coming = null;
      }
      redraw();
    },
    state: page.connection,
    refused: page.refused,
  };
  follow(kind.path, { watch: "true", namespace: namespace() }, on, page.signal);
}

/**
 * Follow one resource. `draw(item)` gets its newest state; `gone()` is called when it is deleted. Another one that
 * takes its name has nothing of what the page shows: the page begins anew.
 */
export function liveOne(kind, name, place, page, draw, gone) {
  let shown = null;
  const change = (type, item) => {
    if (type === "DELETED") return gone();
    if (shown !== null && item[kind.uid] !== shown) return page.anew();
    shown = item[kind.uid];
    return draw(item);
  };
  const on = {
    reset: () => {},
    change,
    complete: () => {},
    state: page.connection,
    refused: page.refused,
  };
  follow(`${kind.path}/${encodeURIComponent(name)}`, { watch: "true", namespace: place }, on, page.signal);
}

/**
 * Read now, and again whenever `again` is called, one request at a time and at most once in `every` ms.
 * `draw(found, error, headers)` gets what was read with the headers of the answer, or null and the error.
 */
export function reader(path, query, page, draw, every = 2000) {
  let busy = false,
    asked = false;
  const again = async () => {
    if (busy) {
      asked = true;
      return;
    }
    busy = true;
    try {
      const place = address(path, typeof query === "function" ? query() : query);
      const answer = await open(place, { signal: page.signal });
      draw(await answer.json(), null, answer.headers);
    } catch (error) {
      if (page.signal.aborted) return;
      if (error.status === 401) {
        page.refused(error);
        return;
      }
      draw(null, error);
    }
    setTimeout(() => {
      busy = false;
      if (asked && !page.signal.aborted) {
        asked = false;
        again();
      }
    }, every);
  };
  again();
  return again;
}

export const JOBS = { path: "/v1/training/jobs", uid: "job_id" };
export const CHECKPOINTS = { path: "/v1/checkpoints", uid: "checkpoint_id" };
export const DEPLOYMENTS = { path: "/v1/deployments", uid: "deployment_id" };
