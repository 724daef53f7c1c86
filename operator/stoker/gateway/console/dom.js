// Elements from data. Text is always text: nothing here parses HTML.

/** Make an element. `properties` are attributes; `on` holds listeners, `class` and `data` as named. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  append(made, children);
  return made;
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** Call `draw` once before the next frame, however often it is asked for. */
export function batched(draw, signal) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    const run = () => {
      asked = false;
      if (!signal?.aborted) draw();
    };
    // A hidden page has no frames.
    if (document.hidden) setTimeout(run, 50);
    else requestAnimationFrame(run);
  };
}

/** Do `pieces` of work, one before each frame. Asked for again meanwhile, all are done once more. */
export function sliced(pieces, signal) {
  let next = pieces.length,
    again = false;
  const step = batched(() => {
    pieces[next]();
    next += 1;
    if (next === pieces.length && again) {
      again = false;
      next = 0;
    }
    if (next < pieces.length) step();
  }, signal);
  return () => {
    if (next < pieces.length) {
      again = true;
      return;
    }
    next = 0;
    step();
  };
}

/** A section with a heading that names it. */
export function panel(title, ...children) {
  const id = `panel-${++panels}`;
  return el("section", { class: "panel", "aria-labelledby": id }, el("h2", { id }, title), ...children);
}
let panels = 0;
