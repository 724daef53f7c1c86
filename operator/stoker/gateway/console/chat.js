// A chat with a deployment, through the gateway. The answer comes word by word and is shown as text.
import { address, open } from "./api.js";
import { el } from "./dom.js";
import { eventsOf } from "./events.js";

/** Make the chat. */
export function chat(path, place, signal) {
  let messages = [],
    model = "",
    running = null;
  const hint = el("p", { class: "muted", role: "status" });
  const log = el("div", { class: "chat-log", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const text = el("textarea", { rows: 2, "aria-label": "Message", placeholder: "Ask something", maxlength: 20000 });
  const send = el("button", { type: "submit", class: "primary" }, "Send");
  const stop = el("button", { type: "button", hidden: true, on: { click: () => running?.abort() } }, "Stop");
  const clear = el(
    "button",
    {
      type: "button",
      on: {
        click: () => {
          running?.abort();
          messages = [];
          log.replaceChildren();
        },
      },
    },
    "Clear",
  );
  const limit = el("input", {
    type: "number",
    min: 1,
    max: 32768,
    value: 256,
    required: true,
    "aria-label": "Longest answer in tokens",
  });
  const warm = el("input", {
    type: "number",
    min: 0,
    max: 2,
    step: "any",
    value: 0.7,
    required: true,
    "aria-label": "Temperature",
  });
  const key = el("input", {
    type: "password",
    autocomplete: "off",
    maxlength: 512,
    spellcheck: "false",
    "aria-label": "API key of the deployment",
    placeholder: "only if it asks for one",
  }); // kept in this field alone: it is gone with the page
  const form = el(
    "form",
    {
      class: "chat-form",
      on: {
        submit: (event) => {
          event.preventDefault();
          ask();
        },
      },
    },
    text,
    el(
      "div",
      { class: "buttons" },
      el("label", { class: "field" }, "Longest answer in tokens ", limit),
      el("label", { class: "field" }, "Temperature ", warm),
      el("label", { class: "field" }, "API key ", key),
      clear,
      stop,
      send,
    ),
  );
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      ask();
    }
  });
  signal.addEventListener("abort", () => running?.abort(), { once: true });

  function line(who, words) {
    const said = el("p", { class: "words" }, words);
    log.append(el("div", { class: "said", data: { who } }, el("strong", {}, who === "user" ? "You" : "Model"), said));
    log.scrollTop = log.scrollHeight;
    return said;
  }

  /** The paragraph with the model's reasoning, before its answer. */
  function thought(answer) {
    if (!answer.previousElementSibling.classList.contains("thought")) {
      answer.before(el("p", { class: "words thought muted" }));
    }
    return answer.previousElementSibling;
  }

  async function ask() {
    const words = text.value.trim();
    if (!words || running || !form.reportValidity()) return;
    text.value = "";
    const own = messages; // what is cleared meanwhile is sent no more
    own.push({ role: "user", content: words });
    line("user", words);
    const answer = line("assistant", "");
    running = new AbortController();
    [send.disabled, stop.hidden] = [true, false];
    try {
      const body = {
        model,
        messages: own,
        max_tokens: Number(limit.value),
        temperature: Number(warm.value),
        stream: true,
      };
      const headers = key.value.trim() ? { "X-Api-Key": key.value.trim() } : {};
      const asked = { method: "POST", body, headers, signal: running.signal };
      const found = await open(address(path, { namespace: place }), asked);
      for await (const { data } of eventsOf(found.body, running.signal)) {
        if (data === "[DONE]") break;
        const part = JSON.parse(data);
        if (part.error) throw new Error(part.error.message);
        const delta = part.choices?.[0]?.delta ?? {};
        if (delta.reasoning) thought(answer).textContent += delta.reasoning;
        answer.textContent += delta.content ?? "";
        log.scrollTop = log.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.dataset.tone = "bad";
        answer.append(answer.textContent ? ` [${error.message}]` : error.message);
      }
    } finally {
      if (answer.dataset.tone !== "bad" && answer.textContent)
        own.push({ role: "assistant", content: answer.textContent });
      else own.pop();
      running = null;
      [send.disabled, stop.hidden] = [false, true];
    }
  }
  return {
    element: el("div", { class: "chat" }, hint, log, form),
    /** Name the model to ask, and why an answer may not come. */
    model: (name, why) => {
      model = name;
      hint.textContent = why;
    },
  };
}
