// Keep what is shown in the address, so that a link shows it again.
//
// TensorBoard keeps the open tab in the hash of its address, and leaves keys of the form p.<plugin>.<key> to plugins.
// Opened by itself, the page has the same keys in its own address.

const PREFIX = "p.ddp_hydra.";
let shown = "";
const EMPTY = { filter: "", sort: "-started", run: "", diff: [], metrics: [] };

/** Return the window with the address that the user sees: TensorBoard's, where it can be reached. */
function addressed() {
  try {
    if (window.parent !== window && window.parent.location.href) return window.parent;
  } catch {
    // a frame of another origin
  }
  return window;
}

export function readState() {
  const state = { ...EMPTY };
  const found = new URLSearchParams(addressed().location.hash.slice(1));
  for (const name of Object.keys(EMPTY)) {
    const text = found.get(PREFIX + name);
    if (text !== null) state[name] = Array.isArray(EMPTY[name]) ? text.split(",").filter(Boolean) : text;
  }
  return state;
}

/** Return the hash of a state; what others keep there stays. */
function hashOf(state, target) {
  const parts = target.location.hash.slice(1).split("&").filter((part) => part && !part.startsWith(PREFIX));
  const own = Object.keys(EMPTY).filter((name) => String(state[name]) !== String(EMPTY[name]));
  for (const name of own) parts.push(`${PREFIX}${name}=${encodeURIComponent(String(state[name]))}`);
  return `#${parts.join("&")}`;
}

/** Write a state into the address; `isStep` makes it a step for the back button. */
export function writeState(state, isStep) {
  const target = addressed();
  const hash = hashOf(state, target);
  shown = JSON.stringify(state);
  if (hash === (target.location.hash || "#")) return;
  target.history[isStep ? "pushState" : "replaceState"](target.history.state, "", hash);
}

/** Return the address that shows a state. */
export function linkTo(state) {
  const target = addressed();
  const address = new URL(target.location.href);
  address.hash = hashOf({ ...readState(), ...state }, target);
  return address.href;
}

/** Call a function with the state when the address has changed, by the back button or by a link. */
export function onStateChange(call) {
  const target = addressed();
  shown = JSON.stringify(readState());
  const look = () => {
    const state = readState();
    const isOther = JSON.stringify(state) !== shown;
    shown = JSON.stringify(state);
    if (isOther) call(state);
  };
  for (const kind of ["popstate", "hashchange"]) target.addEventListener(kind, look);
}
