// Ask the plugin, which answers where this module comes from.

/** Return the JSON of an answer. Throws an error with a sentence if there is none. */
export async function get(route, query) {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) for (const one of [value].flat()) words.append(key, one);
  let response;
  try {
    response = await fetch(new URL(`./${route}?${words}`, import.meta.url), { credentials: "same-origin" });
  } catch {
    throw new Error("TensorBoard does not answer. This page asks again.");
  }
  const found = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(found.error || `TensorBoard answered ${response.status}.`);
  return found;
}

/** Have the browser refuse scripts, styles and requests but this server's, also where TensorBoard allows them. */
export function useStrictPolicy() {
  const meta = document.createElement("meta");
  meta.httpEquiv = "Content-Security-Policy";
  meta.content = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'none'";
  document.head.append(meta);
}
