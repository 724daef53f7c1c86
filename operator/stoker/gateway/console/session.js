// The caller's token and namespace, kept in this tab alone.

const TOKEN = "stoker.token",
  NAMESPACE = "stoker.namespace";

/** Take the key from the address (`#key=...`), which `stoker local apply --ui` opens, and remove it from there. */
export function adoptKey() {
  const found = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!found) return;
  sessionStorage.setItem(TOKEN, found);
  history.replaceState(null, "", `${location.pathname}#/jobs`);
}

export const token = () => sessionStorage.getItem(TOKEN) ?? "";
export const setToken = (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN));
export const namespace = () => sessionStorage.getItem(NAMESPACE) ?? "";
export const setNamespace = (value) => sessionStorage.setItem(NAMESPACE, value);
