// Actions: a button, a question where something is lost, a notice with what came of it.
import { open } from "./api.js";
import { el, fill } from "./dom.js";

/** Show a line for a while; an error stays until it is dismissed. */
export function notice(text, bad = false) {
  const shown = el(
    "div",
    { class: "notice", data: { tone: bad ? "bad" : "good" } },
    el("span", {}, text),
    el(
      "button",
      { type: "button", class: "quiet", "aria-label": "Dismiss", on: { click: () => shown.remove() } },
      "×",
    ),
  );
  document.getElementById("notices").append(shown);
  if (!bad) setTimeout(() => shown.remove(), 8000);
}

/**
 * Ask before something is done; resolves to whether it was confirmed. `fields` are shown in the question: the browser
 * holds the answer back while one has a value that it does not allow. Without a `verb` there is nothing to confirm.
 */
export function confirmed(title, text, verb, fields = []) {
  return new Promise((resolve) => {
    const dialog = el("dialog", { "aria-labelledby": "dialog-title" });
    const close = (answer) => {
      dialog.close();
      dialog.remove();
      resolve(answer);
    };
    const answer = (event) => {
      event.preventDefault();
      close(true);
    };
    const yes = verb && el("button", { type: "submit", class: "primary" }, verb);
    const no = el("button", { type: "button", on: { click: () => close(false) } }, "Back");
    fill(
      dialog,
      el("h2", { id: "dialog-title" }, title),
      el("p", {}, text),
      el("form", { on: { submit: answer } }, fields, el("div", { class: "buttons" }, no, yes)),
    );
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      close(false);
    });
    document.body.append(dialog);
    dialog.showModal();
    (fields.length ? (dialog.querySelector("select, input") ?? no) : no).focus();
  });
}

/** Send a request and say what came of it. Returns the answer's document, or null after a refusal. */
export async function send(path, options, done) {
  try {
    const found = await (await open(path, options)).json();
    notice(typeof done === "function" ? done(found) : done);
    return found;
  } catch (error) {
    notice(error.status === 403 ? `Not allowed: ${error.message}` : error.message, true);
    return null;
  }
}

/** A button that is disabled while its action runs. */
export function actionButton(title, act, properties = {}) {
  const button = el(
    "button",
    {
      type: "button",
      ...properties,
      on: {
        click: async () => {
          button.disabled = true;
          try {
            await act();
          } finally {
            button.disabled = false;
          }
        },
      },
    },
    title,
  );
  return button;
}
