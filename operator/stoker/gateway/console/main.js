// The application: which page is shown, whether the connection lives, light or dark, who is signed in.
import { el, fill } from "./dom.js";
import { refreshAges } from "./format.js";
import * as session from "./session.js";
import * as checkpoints from "./pages/checkpoints.js";
import * as cluster from "./pages/cluster.js";
import * as deployment from "./pages/deployment.js";
import * as deployments from "./pages/deployments.js";
import * as job from "./pages/job.js";
import * as jobs from "./pages/jobs.js";
import * as signIn from "./pages/sign_in.js";

const PAGES = [
  [/^#\/jobs\/([^/]+)\/([^/]+)$/, job],
  [/^#\/jobs$/, jobs],
  [/^#\/checkpoints$/, checkpoints],
  [/^#\/deployments\/([^/]+)\/([^/]+)$/, deployment],
  [/^#\/deployments$/, deployments],
  [/^#\/cluster$/, cluster],
];
const AGES_MS = 10000;
const at = (id) => document.getElementById(id);
let leave = new AbortController();

function route({ focus = false, why = "" } = {}) {
  leave.abort();
  leave = new AbortController();
  const page = { signal: leave.signal, connection, refused, anew: () => route() };
  connection("idle", "");
  const main = at("main");
  document.body.toggleAttribute("data-signed-out", !session.token());
  if (!session.token()) return open(signIn, main, page, [why], focus);
  const hash = location.hash || "#/jobs";
  for (const [pattern, found] of PAGES) {
    const match = pattern.exec(hash);
    const parameters = match && decoded(match.slice(1));
    if (parameters) return open(found, main, page, parameters, focus);
  }
  document.title = "No such page · Stoker";
  mark(() => false);
  return fill(main, el("h1", {}, "No such page"), el("p", {}, el("a", { href: "#/jobs" }, "All jobs")));
}

/** The parts of an address; null where one is no text in percent-encoding. */
function decoded(parts) {
  try {
    return parts.map(decodeURIComponent);
  } catch {
    return null;
  }
}

function open(found, main, page, parameters, focus) {
  document.title = `${found.title(parameters)} · Stoker`;
  mark((link) => location.hash === link.hash || location.hash.startsWith(`${link.hash}/`));
  fill(main);
  found.show(main, page, parameters, () => route());
  if (focus) main.focus({ preventScroll: true });
  scrollTo(0, 0);
}

/** Mark the link to this page. */
function mark(isHere) {
  for (const link of at("pages").children) {
    if (isHere(link)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** Show the state of the connection. What is on the page stays, and is marked as old. */
function connection(state, why) {
  const shown = at("connection");
  shown.dataset.state = state;
  shown.textContent = { idle: "", live: "Live", lost: "Connection lost" }[state];
  at("lost").hidden = state !== "lost";
  at("lost").textContent =
    state === "lost" ? `Connection lost: ${why}. What you see may be old; the console tries again.` : "";
  document.body.toggleAttribute("data-stale", state === "lost");
}

/** The gateway refused for good: sign in again, or say why. */
function refused(error) {
  if (error.status === 401) {
    session.setToken("");
    return route({ why: `Sign in again: ${error.message}.` });
  }
  connection("idle", "");
  const why = error.status === 403 ? `Not allowed: ${error.message}` : error.message;
  const alert = el("p", { class: "refused", role: "alert" }, why);
  if (error.status !== 404) return at("main").prepend(alert);
  leave.abort(); // nothing of this page exists
  const list = `#/${(location.hash || "#/jobs").split("/")[1]}`;
  return fill(at("main"), el("h1", {}, "Not found"), alert, el("p", {}, el("a", { href: list }, "Show all")));
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("stoker.theme", root.dataset.theme);
  dispatchEvent(new Event("stoker-theme"));
}

setInterval(() => !document.hidden && refreshAges(), AGES_MS);
session.adoptKey();
const chosen = localStorage.getItem("stoker.theme");
if (chosen) document.documentElement.dataset.theme = chosen;
at("namespace").value = session.namespace();
at("namespace").addEventListener("change", (event) => {
  event.target.value = event.target.value.trim();
  if (!event.target.reportValidity()) return;
  session.setNamespace(event.target.value);
  route();
});
at("theme").addEventListener("click", theme);
at("sign-out").addEventListener("click", () => {
  session.setToken("");
  route();
});
at("skip").addEventListener("click", () => at("main").focus());
addEventListener("hashchange", () => {
  session.adoptKey();
  route({ focus: true });
});
route();
