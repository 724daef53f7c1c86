// A table that keeps its rows: sorted by a column, filtered by a text, changed where an item changed.
import { batched, el, fill } from "./dom.js";
import { DASH } from "./format.js";
import { keepForm, leastWidths } from "./room.js";

/** Rows that are made or moved before one frame; as many are near what is in sight. */
const SLICE = 100;

/**
 * Make a table. A column: `{title, cell(item) -> text or node, sort(item)?, numeric?, width?, fold?}`.
 * `nouns` name one item and several.
 * `key(item)` is the item's identity, `version(item)` changes with what its row shows.
 *
 * A table that may become long gives each column a `width`: its least width in rem, and its share of what is left.
 * Its rows are then laid out each by itself, and only those in sight: the time of a frame does not grow with the rows.
 * All rows stay in the document, for the keyboard, the browser's search and screen readers: hence for each row a name,
 * what its first column sorts by. A browser may leave the cells of a row out of its accessibility tree until it comes
 * into sight.
 *
 * Where the columns do not fit, those that `fold` go below their row, and where the others do not fit either, a row is
 * a card, whose cells carry the titles of their columns: nothing scrolls sideways. A table without widths is cards in
 * less than `least` rem. The style sheet lays a table out otherwise than as one, which takes its roles away: they are
 * written.
 */
export function table({
  caption,
  nouns = ["row", "rows"],
  columns,
  key,
  version,
  empty,
  filter,
  sort = null,
  least = 44,
}) {
  const long = columns.every((column) => column.width > 0);
  const rows = new Map();
  let items = [],
    order = sort ?? { column: -1, down: false },
    wanted = "";
  const body = el("tbody", { role: "rowgroup" });
  const none = el("p", { class: "empty", hidden: true }, empty);
  const heads = columns.map((column, index) => head(column, index));
  const count = el("span", { class: "muted", role: "status" });
  const scroll = el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: long ? "long" : null, role: "table", "aria-label": caption, style: long ? layout(columns) : {} },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, heads)),
      body,
    ),
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

  keepForm(scroll, long ? leastWidths(columns) : { least, folded: least });
  const place = placing(body, row);

  function head(column, index) {
    const sortable = Boolean(column.sort);
    const button =
      sortable && el("button", { type: "button", class: "sort", on: { click: () => turn(index) } }, column.title);
    const kinds = [column.numeric && "number", column.fold && "fold"].filter(Boolean);
    const properties = { scope: "col", role: "columnheader", class: kinds.join(" ") || null };
    return el("th", properties, button || column.title);
  }

  function turn(index) {
    order = { column: index, down: order.column === index ? !order.down : Boolean(columns[index].numeric) };
    draw();
  }

  function row(item) {
    const known = rows.get(key(item));
    const now = version(item);
    if (known?.version === now) return { element: known.element, changed: false };
    const cells = columns.map((column, index) => cell(column, index === 0, column.cell(item)));
    const made = known?.element ?? el("tr", { role: "row", "aria-label": long ? columns[0].sort(item) : null });
    const active = made.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    fill(made, cells);
    if (active) made.querySelector(`[data-focus="${CSS.escape(active)}"]`)?.focus();
    rows.set(key(item), { element: made, version: now });
    return { element: made, changed: true };
  }

  function cell(column, first, shown) {
    const nothing = !shown || shown === DASH;
    const kinds = [column.numeric && "number", column.fold && "fold", nothing && "none"].filter(Boolean);
    return el(
      first ? "th" : "td",
      {
        scope: first ? "row" : null,
        role: first ? "rowheader" : "cell",
        class: kinds.join(" ") || null,
        data: { title: column.title },
      },
      shown,
    );
  }

  function draw() {
    const shown = items.filter((item) => !wanted || filter(item).toLowerCase().includes(wanted));
    if (order.column >= 0) shown.sort(comparing(columns[order.column].sort, order.down));
    heads.forEach((cell, index) => {
      if (index === order.column) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    const staying = new Set(shown.map(key));
    for (const [name, one] of rows) if (!staying.has(name)) one.element.remove();
    place(shown);
    none.hidden = shown.length > 0;
    scroll.hidden = shown.length === 0;
    const all = `${items.length} ${nouns[Number(items.length !== 1)]}`;
    count.textContent = wanted ? `${shown.length} of ${all}` : all;
  }

  function update(found) {
    items = found;
    const known = new Set(found.map(key));
    for (const [name, one] of rows) {
      if (known.has(name)) continue;
      one.element.remove();
      rows.delete(name);
    }
    draw();
  }
  draw();
  none.hidden = true; // nothing is known yet
  return { element, update };
}

/**
 * Make what puts rows into `body` in the order of their items; `row(item)` is `{element, changed}`. The first ones come
 * at once and the others before the next frames, so that no frame waits for a long table. A row that moves keeps its
 * focus; one that is wanted no more has been taken out before.
 */
function placing(body, row) {
  let items = [],
    at = 0,
    next = null;

  function put(element) {
    if (element === next?.nextElementSibling) body.append(next); // a row that went down; its place comes later
    else if (element !== next) {
      body.insertBefore(element, next);
      return true;
    }
    next = element.nextElementSibling;
    return false;
  }

  function slice() {
    for (let changes = 0; at < items.length && changes < SLICE; at += 1) {
      const { element, changed } = row(items[at]);
      const active = body.contains(document.activeElement) ? document.activeElement : null;
      changes += Number(put(element) || changed);
      if (active && document.activeElement !== active) active.focus({ preventScroll: true });
    }
    if (at < items.length) later();
  }
  const later = batched(slice);
  return (found) => {
    [items, at, next] = [found, 0, body.firstElementChild];
    slice();
  };
}

/** The columns of a long table for its style sheet: all of them, and those that do not fold. */
function layout(columns) {
  const tracks = (some) => some.map(({ width }) => `minmax(${width}rem, ${width}fr)`).join(" ");
  return { "--columns": tracks(columns), "--unfolded": tracks(columns.filter((column) => !column.fold)) };
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
