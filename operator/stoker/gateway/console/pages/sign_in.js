// Sign in with a token of the cluster, or with the key of the embedded gateway.
import { read } from "../api.js";
import { el, fill } from "../dom.js";
import { setToken } from "../session.js";

export const title = () => "Sign in";

export function show(main, page, [why], done) {
  const key = el("input", {
    type: "password",
    id: "token",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
  });
  const wrong = el("p", { class: "cause", role: "alert" }, why);
  const form = el(
    "form",
    {
      class: "sign-in",
      on: {
        submit: async (event) => {
          event.preventDefault();
          setToken(key.value.trim());
          try {
            await read("/v1/training/jobs?limit=1", { signal: page.signal });
          } catch (error) {
            if (error.status === 401 || error.status === 0) {
              setToken("");
              wrong.textContent = error.message;
              key.select();
              return;
            }
          }
          done();
        },
      },
    },
    el("h1", {}, "Sign in"),
    wrong,
    el("label", { for: "token" }, "Token"),
    key,
    el(
      "p",
      { class: "muted" },
      "On Kubernetes: ",
      el("code", {}, "kubectl create token NAME"),
      ". On this machine: the key in ",
      el("code", {}, "gateway.key"),
      " of the state folder, or open the console with ",
      el("code", {}, "stoker local apply --ui"),
      ".",
    ),
    el("div", { class: "buttons" }, el("button", { type: "submit", class: "primary" }, "Sign in")),
  );
  fill(main, form);
  key.focus();
}
