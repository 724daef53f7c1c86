// A table that keeps its rows: sorted by a column, filtered by a text, changed where an item changed.
import { el, fill } from "./dom.js";

/**
 * Make a table. A column: `{title, cell(item) -> text or node, sort(item)?, numeric?}`.
 * `key(item)` is the item's identity, `version(item)` changes with what its row shows.
 */
export function table({ caption, columns, key, version, empty, filter, sort = null }) {
  const rows = new Map();
  let items = [],
    order = sort ?? { column: -1, down: false },
    wanted = "";
  const body = el("tbody");
  const none = el("p", { class: "empty", hidden: true }, empty);
  const heads = columns.map((column, index) => head(column, index));
  const count = el("span", { class: "muted", role: "status" });
  const scroll = el(
    "div",
    { class: "scroll" },
    el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, el("tr", {}, heads)), body),
  );
  const search =
    filter &&
    el(
      "label",
      { class: "field" },
      "Filter ",
      el("input", {
        type: "search",
        spellcheck: "false",
        on: {
          input: (event) => {
            wanted = event.target.value.trim().toLowerCase();
            draw();
          },
        },
      }),
    );
  const element = el(
    "div",
    { class: "table" },
    search && el("div", { class: "table-tools" }, search, count),
    scroll,
    none,
  );

  function head(column, index) {
    const sortable = Boolean(column.sort);
    const button =
      sortable && el("button", { type: "button", class: "sort", on: { click: () => turn(index) } }, column.title);
    return el("th", { scope: "col", class: column.numeric ? "number" : null }, button || column.title);
  }

  function turn(index) {
    order = { column: index, down: order.column === index ? !order.down : Boolean(columns[index].numeric) };
    draw();
  }

  function row(item) {
    const known = rows.get(key(item));
    const now = version(item);
    if (known?.version === now) return known.element;
    const cells = columns.map((column, index) =>
      el(
        index === 0 ? "th" : "td",
        { scope: index === 0 ? "row" : null, class: column.numeric ? "number" : null },
        column.cell(item),
      ),
    );
    const made = known?.element ?? el("tr");
    const active = made.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    fill(made, cells);
    if (active) made.querySelector(`[data-focus="${CSS.escape(active)}"]`)?.focus();
    rows.set(key(item), { element: made, version: now });
    return made;
  }

  function draw() {
    const shown = items.filter((item) => !wanted || filter(item).toLowerCase().includes(wanted));
    if (order.column >= 0) shown.sort(comparing(columns[order.column].sort, order.down));
    heads.forEach((cell, index) => {
      if (index === order.column) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    const wantedRows = shown.map(row);
    wantedRows.forEach((made, index) => {
      if (body.children[index] !== made) body.insertBefore(made, body.children[index] ?? null);
    });
    while (body.children.length > wantedRows.length) body.lastChild.remove();
    none.hidden = shown.length > 0;
    scroll.hidden = shown.length === 0;
    count.textContent = wanted ? `${shown.length} of ${items.length}` : `${items.length}`;
  }

  function update(found) {
    items = found;
    const known = new Set(found.map(key));
    for (const one of rows.keys()) if (!known.has(one)) rows.delete(one);
    draw();
  }
  draw();
  none.hidden = true; // nothing is known yet
  return { element, update };
}

/** Compare by a value; what has none comes last. */
function comparing(value, down) {
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * (down ? -1 : 1);
  };
}
