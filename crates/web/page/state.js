// States of disks: a shape and a word each, in the order of urgency.

import { h, say } from "./dom.js";

export const STATES = ["failed", "stalled", "degraded", "limited", "opening", "removing", "healthy"];

const SHAPES = { failed: "✕", stalled: "◆", degraded: "▲", limited: "■", opening: "◌", removing: "◌", healthy: "●" };

// The word for a disk: its health while it is served, else what becomes of it.
export function stateOf(info) {
  if (!info) return "gone";
  return info.state === "serving" ? (info.health ?? "healthy") : info.state;
}

export function urgency(state) {
  const at = STATES.indexOf(state);
  return at < 0 ? STATES.length : at;
}

export function badge(state) {
  const element = h("span.state", {}, h("span.shape", { "aria-hidden": "true" }), h("span.word"));
  setBadge(element, state);
  return element;
}

export function setBadge(element, state) {
  if (element.dataset.state === state) return;
  element.dataset.state = state;
  say(element.firstChild, SHAPES[state] ?? "○");
  say(element.lastChild, state);
}

const KINDS = [
  ["raid5:", "RAID-5"],
  ["cache:", "cache"],
  ["nbd:", "NBD"],
  ["nbd+", "NBD"],
  ["rbd:", "RBD"],
  ["file:", "file"],
  ["mem:", "memory"],
  ["delay:", "modelled"],
];

// What a disk stands on, in a word; the outermost volume names it.
export function kindOf(volume) {
  const found = KINDS.find(([prefix]) => volume.startsWith(prefix));
  return found ? found[1] : volume.split(":")[0];
}

export function isArray(info) {
  return Boolean(info?.volume?.includes("raid5:"));
}

export function isCached(info) {
  return Boolean(info?.volume?.includes("cache:"));
}
