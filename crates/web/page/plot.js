// Canvases that fit their place, with the time axis that all plots of a page share.

import { clock } from "./format.js";
import { WINDOW_MS } from "./store.js";

// Room for the labels of the vertical axis, in CSS pixels: equal in all plots, so that times stand above each other.
export const LEFT = 52;
export const RIGHT = 8;
export const AXIS = 20;

// The stretch of time that plots show. It ends now, unless it is held.
export class Axis extends EventTarget {
  constructor() {
    super();
    this.heldAt = null;
  }

  get to() {
    return this.heldAt ?? Date.now();
  }

  get from() {
    return this.to - WINDOW_MS;
  }

  get held() {
    return this.heldAt !== null;
  }

  hold(on) {
    this.heldAt = on ? Date.now() : null;
    this.dispatchEvent(new Event("held"));
  }
}

let colors = new Map();

export function forgetColors() {
  colors = new Map();
}

// The value of a custom property of the style sheet.
export function color(name) {
  let value = colors.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    colors.set(name, value);
  }
  return value;
}

function parts(hex) {
  const value = parseInt(hex.slice(1), 16);
  return [(value >> 16) & 255, (value >> 8) & 255, value & 255];
}

// Color of a share, 0 to 1, on the ramp of heat maps.
export function heat(share) {
  const key = `heat ${Math.round(share * 48)}`;
  let value = colors.get(key);
  if (value === undefined) {
    const stops = [0, 1, 2, 3, 4].map((at) => parts(color(`--heat-${at}`)));
    const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const mixed = stops[low].map((part, i) => Math.round(part + (stops[low + 1][i] - part) * (at - low)));
    value = `rgb(${mixed.join(" ")})`;
    colors.set(key, value);
  }
  return value;
}

const watched = new Map();
const resized = new ResizeObserver((entries) => {
  for (const entry of entries) watched.get(entry.target)?.();
});

export function onResize(element, draw) {
  watched.set(element, draw);
  resized.observe(element);
  return () => {
    watched.delete(element);
    resized.unobserve(element);
  };
}

// A context whose unit is a CSS pixel; null while the canvas has no place.
export function begin(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return null;
  const ratio = window.devicePixelRatio || 1;
  const wide = Math.round(width * ratio);
  const high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${color("--font")}`;
  context.textBaseline = "middle";
  return { context, width, height };
}

// Moments that get a label: round ones, as many as fit.
function ticks(axis, width) {
  const steps = [10, 20, 30, 60];
  const step = steps.find((seconds) => (seconds * 1000 * width) / WINDOW_MS > 66) ?? 90;
  const found = [];
  const offset = new Date().getTimezoneOffset() * 60_000;
  for (let at = Math.ceil((axis.from - offset) / (step * 1000)) * step * 1000 + offset; at <= axis.to; at += step * 1000) found.push(at);
  return found;
}

export function xOf(at, axis, width) {
  return LEFT + ((at - axis.from) / WINDOW_MS) * (width - LEFT - RIGHT);
}

export function timeOf(x, axis, width) {
  return axis.from + ((x - LEFT) / (width - LEFT - RIGHT)) * WINDOW_MS;
}

// Grid lines of the time axis; with labels if there is room for them below `bottom`.
export function drawTimes({ context, width, height }, axis, bottom) {
  context.fillStyle = color("--muted");
  context.strokeStyle = color("--grid");
  context.lineWidth = 1;
  context.textAlign = "center";
  for (const at of ticks(axis, width - LEFT - RIGHT)) {
    const x = Math.round(xOf(at, axis, width)) + 0.5;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, bottom);
    context.stroke();
    if (height - bottom >= AXIS - 4 && x > LEFT + 22 && x < width - 24) context.fillText(clock(at), x, bottom + AXIS / 2 + 1);
  }
}

// Dashed lines with a letter at the moments of squeezes and events.
export function drawMarks({ context, width }, axis, bottom, marks) {
  context.save();
  context.setLineDash([3, 3]);
  context.lineWidth = 1;
  context.textAlign = "center";
  // Letters that would stand in each other are left out; their lines aren't.
  let last = -Infinity;
  for (const mark of [...marks].sort((a, b) => a.at - b.at)) {
    if (mark.at < axis.from || mark.at > axis.to) continue;
    const x = Math.round(xOf(mark.at, axis, width)) + 0.5;
    context.strokeStyle = context.fillStyle = color(mark.color);
    context.beginPath();
    context.moveTo(x, 12);
    context.lineTo(x, bottom);
    context.stroke();
    if (x - last < 11) continue;
    context.fillText(mark.letter, x, 7);
    last = x;
  }
  context.restore();
}
