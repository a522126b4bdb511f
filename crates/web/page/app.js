// Start: the store, the views by the address' fragment, and keys that work everywhere.

import { askToken, mayChange, onToken } from "./changes.js";
import { DiskView } from "./disk.js";
import { Disks } from "./disks.js";
import { say } from "./dom.js";
import { Events } from "./events.js";
import { Memory } from "./memory.js";
import { Axis } from "./plot.js";
import { Store } from "./store.js";
import { startTheme } from "./theme.js";

const store = new Store();
const axis = new Axis();
const place = document.getElementById("view");
let view = null;
let shown = null;

function viewOf(address) {
  const [, what, ...rest] = address.split("/");
  if (what === "disk" && rest.length) {
    let name = rest.join("/");
    try {
      name = decodeURIComponent(name);
    } catch {
      // A fragment that somebody typed: taken as it is.
    }
    return { tab: "disks", title: name, make: () => new DiskView(store, axis, name) };
  }
  if (what === "memory") return { tab: "memory", title: "Memory", make: () => new Memory(store, axis) };
  if (what === "events") return { tab: "events", title: "Events", make: () => new Events(store) };
  return { tab: "disks", title: "Disks", make: () => new Disks(store) };
}

function go() {
  const address = location.hash.slice(1) || "/";
  if (address === shown) return;
  const first = shown === null;
  shown = address;
  const next = viewOf(address);
  view?.close();
  view = next.make();
  place.replaceChildren(view.element);
  document.title = `${next.title} – pvblk`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.tab === next.tab) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  view.open();
  if (first) return;
  window.scrollTo(0, 0);
  place.focus({ preventScroll: true });
}

function drawConnection() {
  const element = document.getElementById("connection");
  element.dataset.state = store.connection;
  say(element.lastElementChild, store.connectionText);
  say(document.getElementById("version"), store.version ?? "");
}

function typing(target) {
  return target.closest("input, select, textarea, dialog") !== null;
}

const GO = { d: "#/", m: "#/memory", e: "#/events" };

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
  if (event.key === "/") {
    const field = place.querySelector("input[type=search]");
    if (!field) return;
    event.preventDefault();
    field.focus();
  } else if (event.key === "?") document.getElementById("help").showModal();
  else if (GO[event.key]) location.hash = GO[event.key];
});

// The fragment is the view's address, so the link only moves the focus.
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  place.focus();
});
document.getElementById("help-open").addEventListener("click", () => document.getElementById("help").showModal());
const tokenButton = document.getElementById("token-open");
tokenButton.addEventListener("click", askToken);
onToken(() => say(tokenButton, mayChange() ? "Changes: on" : "Read-only"));
startTheme(document.getElementById("colours"), () => view?.draw?.());
store.addEventListener("connection", drawConnection);
store.addEventListener("disks", () => performance.getEntriesByName("disks").length || requestAnimationFrame(() => setTimeout(() => performance.mark("disks"))));
window.addEventListener("hashchange", go);
store.start();
go();
