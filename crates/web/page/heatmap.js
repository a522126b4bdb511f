// Latencies over time: a column for each sample, a cell for each bucket, darker or lighter by requests a second.
// With `brush` a region is selected by pointer or keys.

import { h, say } from "./dom.js";
import { clock, time, whole } from "./format.js";
import { between, longest, lower, percentile, sum, total } from "./histogram.js";
import { AXIS, LEFT, RIGHT, begin, color, drawMarks, drawTimes, heat, onResize, timeOf, xOf } from "./plot.js";

// A small one for a row of a table: no axis, no brush.
export function strip(label) {
  const canvas = h("canvas.strip", { role: "img", "aria-label": label });
  return canvas;
}

export function drawStrip(canvas, axis, samples, range) {
  const place = begin(canvas);
  if (!place) return;
  const { context, width, height } = place;
  const seen = samples.filter((sample) => sample.to > axis.from && sample.from < axis.to);
  const y = scale(range, 0, height);
  const x = (at) => ((at - axis.from) / (axis.to - axis.from)) * width;
  cells(context, seen, x, y);
}

// Least and greatest time of a vertical axis: whole decades around the samples.
export function rangeOf(samples) {
  let low = Infinity;
  let high = 0;
  for (const sample of samples) {
    if (!sample.latencies.length) continue;
    low = Math.min(low, lower(sample.latencies[0][0]));
    high = Math.max(high, longest(sample.latencies));
  }
  if (!high) return [1e3, 1e6];
  const down = Math.floor(Math.log10(Math.max(low, 1)));
  const up = Math.max(Math.ceil(Math.log10(high)), down + 2);
  return [10 ** down, 10 ** up];
}

function scale([low, high], top, bottom) {
  const from = Math.log10(low);
  const length = Math.log10(high) - from;
  return (ns) => bottom - ((Math.log10(Math.max(ns, low)) - from) / length) * (bottom - top);
}

function cells(context, samples, x, y) {
  let most = 0;
  for (const sample of samples) {
    const seconds = (sample.to - sample.from) / 1000;
    for (const [, count] of sample.latencies) most = Math.max(most, count / seconds);
  }
  if (!most) return 0;
  for (const sample of samples) {
    const seconds = (sample.to - sample.from) / 1000;
    const left = Math.floor(x(sample.from));
    const right = Math.max(Math.floor(x(sample.to)), left + 1);
    for (const [bound, count] of sample.latencies) {
      const top = Math.floor(y(bound));
      const bottom = Math.max(Math.floor(y(lower(bound))), top + 1);
      // A single request among thousands must still be seen: no cell is fainter than a fifth.
      context.fillStyle = heat(0.2 + 0.8 * Math.sqrt(count / seconds / most));
      context.fillRect(left, top, right - left, bottom - top);
    }
  }
  return most;
}

const STEP_MS = 5_000;

export class HeatMap {
  // `tell(selection)`: {from, to, low, high} in ms and ns, or null.
  constructor(axis, tell) {
    this.axis = axis;
    this.tell = tell;
    this.samples = [];
    this.marks = [];
    this.name = "";
    this.selection = null;
    this.cursor = null;
    this.canvas = h("canvas.heat");
    this.spoken = h("p.quiet.selection", { role: "status" }, "Nothing is selected: all requests of the time shown.");
    this.clearButton = h("button.small", { type: "button", disabled: true, onclick: () => this.select(null) }, "Clear selection");
    this.frame = h(
      "div.heatframe",
      {
        tabindex: "0",
        role: "application",
        "aria-roledescription": "heat map",
        "aria-describedby": "heat-keys",
        onkeydown: (event) => this.key(event),
        onpointerdown: (event) => this.down(event),
        onpointermove: (event) => this.move(event),
        onpointerup: (event) => this.up(event),
        onpointercancel: () => this.cancel(),
        onpointerleave: () => this.hover(null),
      },
      this.canvas,
    );
    this.legend = h("canvas.legend", { "aria-hidden": "true" });
    this.most = h("span");
    this.element = h(
      "div.heatmap",
      {},
      this.frame,
      h("div.heatfoot", {}, this.spoken, h("span.legendbox", {}, "fewer", this.legend, this.most), this.clearButton),
      h("p.sr", { id: "heat-keys" }, "Arrow keys move the cursor by 5 seconds or half a decade, with Shift they extend the selection. Enter selects the column under the cursor. Escape clears it."),
    );
    this.forget = onResize(this.canvas, () => this.draw());
  }

  show(name, samples, marks) {
    this.name = name;
    this.samples = samples;
    this.marks = marks;
    // A region may reach into a second that isn't over.
    if (this.selection) this.speak();
    this.draw();
  }

  get seen() {
    return this.samples.filter((sample) => sample.to > this.axis.from && sample.from < this.axis.to);
  }

  draw() {
    this.frame.setAttribute("aria-label", `Latency of ${this.name} over time. ${this.words()}`);
    const place = begin(this.canvas);
    if (!place) return;
    const { context, width, height } = place;
    const bottom = height - AXIS;
    const seen = this.seen;
    this.range = rangeOf(seen);
    const y = scale(this.range, 14, bottom);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, bottom);
    context.clip();
    const most = cells(context, seen, (at) => xOf(at, this.axis, width), y);
    context.restore();
    drawTimes(place, this.axis, bottom);
    this.drawLevels(place, y, bottom);
    drawMarks(place, this.axis, bottom, this.marks);
    if (!seen.some((sample) => sample.latencies.length)) this.drawEmpty(place, bottom);
    this.drawSelection(place, y);
    this.drawLegend(most);
  }

  drawLevels({ context, width }, y, bottom) {
    context.textAlign = "right";
    for (let level = this.range[0]; level <= this.range[1] * 1.01; level *= 10) {
      const at = Math.round(y(level)) + 0.5;
      context.strokeStyle = color("--grid");
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width - RIGHT, at);
      context.stroke();
      context.fillStyle = color("--muted");
      context.fillText(time(level), LEFT - 6, Math.min(at, bottom - 4));
    }
  }

  drawEmpty({ context, width }, bottom) {
    context.fillStyle = color("--muted");
    context.textAlign = "center";
    context.fillText("no requests in this time", LEFT + (width - LEFT - RIGHT) / 2, bottom / 2);
  }

  drawSelection({ context, width }, y) {
    const region = this.dragging ?? this.selection;
    context.lineWidth = 2;
    context.strokeStyle = color("--accent");
    if (region) {
      const left = Math.max(xOf(region.from, this.axis, width), LEFT);
      const right = xOf(region.to, this.axis, width);
      if (right > left) {
        context.fillStyle = color("--brush");
        context.fillRect(left, y(region.high), right - left, y(region.low) - y(region.high));
        context.strokeRect(left, y(region.high), right - left, y(region.low) - y(region.high));
      }
    }
    if (this.cursor && document.activeElement === this.frame) {
      const x = xOf(this.cursor.at, this.axis, width);
      const at = y(this.cursor.ns);
      context.beginPath();
      context.arc(x, at, 5, 0, 7);
      context.moveTo(x - 9, at);
      context.lineTo(x + 9, at);
      context.moveTo(x, at - 9);
      context.lineTo(x, at + 9);
      context.stroke();
    }
  }

  drawLegend(most) {
    say(this.most, most ? `up to ${whole(most)} a second` : "more");
    const place = begin(this.legend);
    if (!place) return;
    for (let x = 0; x < place.width; x += 1) {
      place.context.fillStyle = heat(0.2 + (0.8 * x) / place.width);
      place.context.fillRect(x, 0, 1, place.height);
    }
  }

  words() {
    const all = sum(this.seen.map((sample) => sample.latencies));
    const requests = total(all);
    if (!requests) return "No requests in this time.";
    return `${whole(requests)} requests, half below ${time(percentile(all, 0.5))}, 99 % below ${time(percentile(all, 0.99))}, longest ${time(longest(all))}.`;
  }

  // Requests in the region, from the samples.
  inside(region) {
    let requests = 0;
    for (const sample of this.samples) {
      const part = Math.min(sample.to, region.to) - Math.max(sample.from, region.from);
      if (part > 0) requests += between(sample.latencies, region.low, region.high) * (part / (sample.to - sample.from));
    }
    return requests;
  }

  select(region) {
    this.selection = region;
    this.dragging = null;
    this.clearButton.disabled = !region;
    this.speak();
    this.draw();
    this.tell(region);
  }

  speak() {
    const region = this.selection;
    const words = region && `${clock(region.from)} to ${clock(region.to)}, ${time(region.low)} to ${time(region.high)}: about ${whole(this.inside(region))} requests.`;
    say(this.spoken, words ?? "Nothing is selected: all requests of the time shown.");
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const width = this.canvas.clientWidth;
    const x = Math.min(Math.max(event.clientX - box.left, LEFT), width - RIGHT);
    const bottom = this.canvas.clientHeight - AXIS;
    const y = Math.min(Math.max(event.clientY - box.top, 14), bottom);
    const [low, high] = this.range ?? [1e3, 1e6];
    const part = (bottom - y) / (bottom - 14);
    return { at: timeOf(x, this.axis, width), ns: low * (high / low) ** part };
  }

  down(event) {
    if (event.button !== 0) return;
    this.anchor = { ...this.point(event), x: event.clientX, y: event.clientY };
    this.frame.setPointerCapture(event.pointerId);
  }

  move(event) {
    const point = this.point(event);
    if (!this.anchor) return this.hover(point);
    this.dragging = region(this.anchor, point);
    this.draw();
  }

  hover(point) {
    this.frame.title = point ? `${clock(point.at)}, ${time(point.ns)}` : "";
  }

  up(event) {
    if (!this.anchor) return;
    const point = this.point(event);
    const anchor = this.anchor;
    this.anchor = null;
    const wide = Math.abs(event.clientX - anchor.x);
    const high = Math.abs(event.clientY - anchor.y);
    if (wide < 4 && high < 4) return this.select(null);
    const marked = region(anchor, point);
    if (wide < 4) {
      // A straight line up or down is a column.
      marked.from -= STEP_MS / 2;
      marked.to += STEP_MS / 2;
    }
    this.select(marked);
  }

  cancel() {
    this.anchor = null;
    this.dragging = null;
    this.draw();
  }

  key(event) {
    const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
    const upward = { ArrowUp: 1, ArrowDown: -1 }[event.key] ?? 0;
    const [low, high] = this.range ?? [1e3, 1e6];
    if (event.key === "Escape") {
      this.anchor = null;
      this.dragging = null;
      this.cursor = null;
      this.start = null;
      this.select(null);
    } else if (event.key === "Enter" || event.key === " ") {
      const at = this.cursor?.at ?? this.axis.to - STEP_MS;
      this.cursor ??= { at, ns: Math.sqrt(low * high) };
      this.select({ from: at - STEP_MS / 2, to: at + STEP_MS / 2, low, high });
    } else if (across || upward) {
      const old = this.cursor ?? { at: this.axis.to - STEP_MS, ns: Math.sqrt(low * high) };
      const at = Math.min(Math.max(old.at + across * STEP_MS, this.axis.from), this.axis.to);
      const ns = Math.min(Math.max(old.ns * Math.sqrt(10) ** upward, low), high);
      this.cursor = { at, ns };
      if (event.shiftKey) {
        this.start ??= old;
        this.select(region(this.start, this.cursor));
      } else {
        this.start = null;
        say(this.spoken, `Cursor at ${clock(at)}, ${time(ns)}.`);
        this.draw();
      }
    } else return;
    event.preventDefault();
  }

  close() {
    this.forget();
  }
}

function region(a, b) {
  return { from: Math.min(a.at, b.at), to: Math.max(a.at, b.at), low: Math.min(a.ns, b.ns), high: Math.max(a.ns, b.ns) };
}

// Rows of a table that says what a heat map shows: ten stretches of the axis.
export function tableOf(axis, samples) {
  const rows = [];
  const step = (axis.to - axis.from) / 9;
  for (let from = axis.to - step; from >= axis.from - 1; from -= step) {
    const part = sum(samples.filter((s) => s.to > from && s.to <= from + step).map((s) => s.latencies));
    rows.push([clock(from), whole(total(part)), time(percentile(part, 0.5)), time(percentile(part, 0.99)), time(longest(part))]);
  }
  return rows;
}
