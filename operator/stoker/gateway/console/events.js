// Server-sent events over fetch, which can send a token. A lost connection is resumed behind the last event.
import { Refusal, address, open } from "./api.js";

const FIRST_WAIT_MS = 500,
  LONGEST_WAIT_MS = 15000,
  SILENCE_MS = 45000;

/** Yield `{name, data, id}` of a body. The gateway sends a comment every 15 s, so silence is a lost connection. */
export async function* eventsOf(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await inTime(reader.read(), signal);
      if (done) return;
      rest += value.replaceAll("\r", "");
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = parse(block);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function inTime(promise, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Refusal(0, "the gateway is silent")), SILENCE_MS);
    const stop = () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    };
    signal?.addEventListener("abort", stop, { once: true });
    promise
      .then(resolve, () => reject(new Refusal(0, "the connection ended")))
      .finally(() => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", stop);
      });
  });
}

function parse(block) {
  const fields = { event: "message", data: [] };
  for (const line of block.split("\n")) {
    if (!line || line.startsWith(":")) continue;
    const [name, ...value] = line.split(":");
    const text = value.join(":").replace(/^ /, "");
    if (name === "data") fields.data.push(text);
    else fields[name] = text;
  }
  return fields.data.length ? { name: fields.event, data: fields.data.join("\n"), id: fields.id } : null;
}

/**
 * Follow a kind or one resource until `signal` aborts.
 * `on.reset()` comes before everything is sent anew, `on.change(type, item)` for each change, `on.complete()` when all
 * that exists was sent, `on.state("live" | "lost", why)` when the connection changes, `on.refused(error)` at the end.
 */
export async function follow(path, query, on, signal) {
  let last,
    wait = FIRST_WAIT_MS;
  while (!signal.aborted) {
    try {
      const headers = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
      const answer = await open(address(path, query), { headers, signal });
      if (!last) on.reset();
      on.state("live", "");
      wait = FIRST_WAIT_MS;
      for await (const { name, data, id } of eventsOf(answer.body, signal)) {
        const found = JSON.parse(data);
        if (name === "ERROR") throw new Refusal(found.status ?? 0, found.detail ?? "the watch ended");
        if (id) last = id;
        if (name === "BOOKMARK") on.complete();
        else on.change(name, found);
      }
      throw new Refusal(0, "the connection ended");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 410 && last) {
        last = undefined;
        continue;
      }
      if ([401, 403, 404, 422].includes(error.status)) {
        on.refused(error);
        return;
      }
      on.state("lost", error.message);
    }
    await pause(wait, signal);
    wait = Math.min(wait * 2, LONGEST_WAIT_MS);
  }
}

/** Wait, but not beyond the moment at which the network is back. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      removeEventListener("online", done);
      resolve();
    };
    const timer = setTimeout(done, milliseconds);
    addEventListener("online", done, { once: true });
    signal?.addEventListener("abort", done, { once: true });
  });
}
