// How the rows of a table lie in the room that they have: as columns, with columns folded below them, or as cards.

/** The form for a room; all widths in rem. `least`: of all columns; `folded`: of those that do not fold. */
export const formIn = (room, least, folded) => (room >= least ? "wide" : room >= folded ? "folded" : "cards");

/** The least widths of a table whose columns have widths: of all of them, and of those that do not fold. */
export function leastWidths(columns) {
  const sum = (some) => some.reduce((total, column) => total + column.width, 0);
  return { least: sum(columns), folded: sum(columns.filter((column) => !column.fold)) };
}

/** Keep `data-form` of what holds a table true to its room, as that changes; nothing is known of a hidden one. */
export function keepForm(holder, { least, folded }) {
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width > 0) holder.dataset.form = formIn(contentRect.width / rem, least, folded);
  }).observe(holder);
}
