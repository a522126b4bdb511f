// Memory by owner over time, with squeezes as marks, on the time axis of the heat maps.

import { h, keyed, put, say } from "./dom.js";
import { bytes, clock, plural, share, whole } from "./format.js";
import { AXIS, LEFT, RIGHT, begin, color, drawMarks, drawTimes, onResize, xOf } from "./plot.js";

const SHOWN = 6;
const KINDS = { heap: "heap", private: "private", shared: "shared with peers", unallocated: "not allocated" };

// Stacked owners. `own`: only memory that is the server's own (heap and private).
export class MemoryChart {
  constructor(store, axis) {
    this.store = store;
    this.axis = axis;
    this.canvas = h("canvas.memory", { role: "img" });
    this.key = h("ul.layers", { "aria-label": "owners of memory" });
    this.element = h("div", {}, this.canvas, this.key);
    this.forget = onResize(this.canvas, () => this.draw([]));
    store.memoryWatchers += 1;
  }

  close() {
    this.forget();
    this.store.memoryWatchers -= 1;
  }

  draw(marks) {
    const samples = this.store.memoryHistory.filter((sample) => sample.to > this.axis.from && sample.from < this.axis.to);
    const owners = biggest(this.store.memory);
    this.say(samples, owners);
    const place = begin(this.canvas);
    if (!place) return;
    const { context, width, height } = place;
    const bottom = height - AXIS;
    const stacks = samples.map((sample) => stack(sample.answer, owners));
    const most = Math.max(...stacks.map((values) => values.at(-1) ?? 0), 1);
    const top = roundUp(most);
    const y = (value) => bottom - (value / top) * (bottom - 14);
    for (let at = owners.length; at >= 0; at -= 1) {
      context.fillStyle = color(`--layer-${at}`);
      samples.forEach((sample, i) => {
        const low = at ? stacks[i][at - 1] : 0;
        const left = Math.max(xOf(sample.from, this.axis, width), LEFT);
        const right = Math.min(xOf(sample.to, this.axis, width), width - RIGHT);
        if (right > left) context.fillRect(left, y(stacks[i][at]), right - left + 0.5, y(low) - y(stacks[i][at]));
      });
    }
    drawTimes(place, this.axis, bottom);
    context.textAlign = "right";
    for (const part of [0, 0.5, 1]) {
      const at = Math.round(y(top * part)) + 0.5;
      context.strokeStyle = color("--grid");
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width - RIGHT, at);
      context.stroke();
      context.fillStyle = color("--muted");
      context.fillText(bytes(top * part), LEFT - 6, Math.min(at, bottom - 5));
    }
    const squeezes = samples.filter((sample) => sample.squeezed).map((sample) => ({ at: sample.to, letter: "S", color: "--degraded" }));
    drawMarks(place, this.axis, bottom, [...marks, ...squeezes]);
  }

  say(samples, owners) {
    const now = this.store.memory;
    const squeezed = samples.reduce((before, sample) => before + sample.squeezed, 0);
    const words = now ? `The server's own memory over time: now ${bytes(now.private_bytes)}, ${plural(squeezed, "squeeze", "squeezes")} in this time.` : "Memory: not known yet.";
    this.canvas.setAttribute("aria-label", words);
    const items = [...owners, "others"];
    keyed(this.key, now ? items : [], (name) => name, (name) => h("li", {}, h("span.swatch", { "aria-hidden": "true" }), h("span", {}, name)), (item, name) => {
      item.firstChild.className = `swatch layer${items.indexOf(name)}`;
    });
  }
}

// Bytes that are the server's own, by owner. Several may have one name.
function own(memory) {
  const live = new Map();
  for (const owner of memory.owners) {
    if (owner.kind === "heap" || owner.kind === "private") live.set(owner.owner, (live.get(owner.owner) ?? 0) + owner.live_bytes);
  }
  return live;
}

function biggest(memory) {
  if (!memory) return [];
  return [...own(memory)]
    .sort(([one, a], [two, b]) => b - a || (one < two ? -1 : 1))
    .slice(0, SHOWN)
    .map(([name]) => name);
}

// Sums of the owners up to each, and of all others at the end.
function stack(memory, owners) {
  const live = own(memory);
  const all = [...live.values()].reduce((one, other) => one + other, 0);
  let before = 0;
  const sums = owners.map((name) => (before += live.get(name) ?? 0));
  return [...sums, Math.max(all, before)];
}

function roundUp(value) {
  const step = 2 ** Math.floor(Math.log2(value));
  return value <= step ? step : value <= 1.5 * step ? 1.5 * step : 2 * step;
}

export class Memory {
  constructor(store, axis) {
    this.store = store;
    this.axis = axis;
    this.chart = new MemoryChart(store, axis);
    this.totals = h("dl.totals");
    this.owners = h("tbody");
    this.pools = h("tbody");
    this.sources = h("ul.sources");
    this.settings = h("p.quiet");
    this.squeezes = h("p.quiet");
    // Not there before the first answer: what comes later would move.
    this.rest = h(
      "div",
      { hidden: true },
      this.totals,
      h("section.panel", { "aria-labelledby": "memory-time" }, h("h2", { id: "memory-time" }, "Own memory by owner"), this.chart.element, this.squeezes),
      h("section.panel", { "aria-labelledby": "bill" }, h("h2", { id: "bill" }, "Memory bill"), table("the memory bill", [["owner"], ["kind"], ["now", 1], ["at most", 1], ["of its bound"]], this.owners)),
      h(
        "div.pair",
        {},
        h("section.panel", { "aria-labelledby": "pools" }, h("h2", { id: "pools" }, "Buffers of NBD connections"), table("buffers of each disk", [["disk"], ["now", 1], ["in use", 1], ["peak", 1], ["squeezed", 1], ["stalls", 1]], this.pools)),
        h("section.panel", { "aria-labelledby": "pressure" }, h("h2", { id: "pressure" }, "Sources of memory pressure"), this.sources, this.settings),
      ),
    );
    this.element = h("div", {}, h("h1", {}, "Memory"), this.rest);
    this.listen = () => this.draw();
    store.addEventListener("memory", this.listen);
  }

  open() {
    this.draw();
  }

  close() {
    this.store.removeEventListener("memory", this.listen);
    this.chart.close();
  }

  draw() {
    const now = this.store.memory;
    if (!now) return;
    this.rest.hidden = false;
    this.chart.draw([]);
    const put1 = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    put(this.totals, put1("private", bytes(now.private_bytes)), put1("shared", bytes(now.shared_bytes)), put1("at most", bytes(now.cap_bytes)), put1("squeezes", whole(now.squeezes)));
    const owners = [...now.owners].sort((a, b) => b.live_bytes - a.live_bytes || (a.owner < b.owner ? -1 : 1)).slice(0, 200);
    keyed(this.owners, owners, (owner) => owners.indexOf(owner), ownerRow, updateOwner);
    const pools = [...now.disks].sort((a, b) => b.pool_pages - a.pool_pages || b.peak_pages - a.peak_pages).slice(0, 50);
    keyed(this.pools, pools, (pool) => pool.disk, poolRow, updatePool);
    keyed(this.sources, now.sources, (source) => source.name, (source) => h("li", {}, h("span.shape", { "aria-hidden": "true" }), h("span.wrap")), (item, source) => {
      say(item.firstChild, source.missing === null ? "●" : "○");
      say(item.lastChild, source.missing === null ? `${source.name}: watched` : `${source.name}: not there (${source.missing})`);
    });
    const set = now.settings;
    say(this.settings, `Each connection keeps at most ${plural(set.max_buffer_pages, "free page", "free pages")}; after a squeeze none for ${set.buffer_squeeze_duration_ms} ms but ${set.buffer_floor_pages} of all workers together.`);
    const last = this.store.memoryHistory.findLast((sample) => sample.squeezed);
    say(this.squeezes, `${now.squeezing ? "Buffers are squeezed now. " : ""}${last ? `The last squeeze since this page is open was at ${clock(last.to)}` : "No squeeze since this page is open"}; a squeeze is marked S.`);
  }
}

function table(name, heads, body) {
  const head = h("tr", {}, heads.map(([text, number]) => h(number ? "th.number" : "th", { scope: "col" }, text)));
  return h("div.scroll", { tabindex: "0", role: "region", "aria-label": name }, h("table.plain", {}, h("thead", {}, head), body));
}

function ownerRow() {
  return h("tr", {}, h("th.wrap", { scope: "row" }), h("td"), h("td.number"), h("td.number"), h("td.gauge", {}, h("span.track", { "aria-hidden": "true" }, h("span.bar")), h("span.number")));
}

function updateOwner(row, owner) {
  const [name, kind, live, cap, gauge] = row.children;
  say(name, owner.owner);
  say(kind, KINDS[owner.kind] ?? owner.kind);
  say(live, bytes(owner.live_bytes));
  say(cap, bytes(owner.cap_bytes));
  const part = owner.cap_bytes ? Math.min(owner.live_bytes / owner.cap_bytes, 1) : 0;
  gauge.firstChild.firstChild.style.width = `${part * 100}%`;
  say(gauge.lastChild, share(owner.live_bytes, owner.cap_bytes));
}

function poolRow(pool) {
  return h("tr", {}, h("th", { scope: "row" }, h("a", { href: `#/disk/${encodeURIComponent(pool.disk)}` }, pool.disk)), [1, 2, 3, 4, 5].map(() => h("td.number")));
}

function updatePool(row, pool) {
  const [, now, used, peak, squeezed, stalls] = row.children;
  say(now, bytes(pool.pool_pages * 4096));
  say(used, bytes(pool.in_use_pages * 4096));
  say(peak, bytes(pool.peak_pages * 4096));
  say(squeezed, bytes(pool.squeezed_pages * 4096));
  say(stalls, whole(pool.allocation_stalls));
}
