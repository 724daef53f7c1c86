// Requests to the gateway, with the caller's token. Refusals are problem documents (RFC 9457).
import { token } from "./session.js";

/** The gateway refused. `status` 0: it did not answer. */
export class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** A path with a query; empty values are left out. */
export function address(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** Path of one resource. */
export const resource = (kind, name) => `/v1/${kind}/${encodeURIComponent(name)}`;

/** Send a request and return its open answer. Raises Refusal. */
export async function open(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { Authorization: `Bearer ${token()}`, ...headers };
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "the gateway does not answer");
  }
  if (answer.ok) return answer;
  let detail = `${answer.status} ${answer.statusText}`;
  try {
    detail = (await answer.json()).detail ?? detail;
  } catch {
    /* not a problem document */
  }
  throw new Refusal(answer.status, detail);
}

export const read = async (path, options) => (await open(path, options)).json();

/** A key that makes a repeated request do nothing again. */
export function onceKey() {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
