// One disk: its figures, the way of its requests, latencies over time, the slowest requests, members, memory, limits, users and events.

import { askLimit, askRemove, askToken, mayChange, onToken } from "./changes.js";
import { figure } from "./disks.js";
import { h, keyed, put, say } from "./dom.js";
import { eventLine } from "./events.js";
import { Flow, blame } from "./flow.js";
import { bytes, count, plural, share, span, time } from "./format.js";
import { HeatMap, tableOf } from "./heatmap.js";
import { Hops } from "./hops.js";
import { MemoryChart } from "./memory.js";
import { CacheFigures, Members } from "./members.js";
import { badge, isArray, isCached, setBadge, stateOf } from "./state.js";
import { Waterfall } from "./waterfall.js";

const RECENT_MS = 10_000;
const EVENTS = 30;

// One request in how many is followed, so that some hundred a second are.
export function everyFor(requests) {
  if (requests < 2_000) return 1;
  return requests < 20_000 ? 8 : 64;
}

export class DiskView {
  constructor(store, axis, name) {
    this.store = store;
    this.axis = axis;
    this.name = name;
    this.selection = null;
    this.hop = null;
    store.open(name);
    this.hops = new Hops(name, everyFor(store.disks.get(name)?.rates?.requests ?? 0));
    this.flow = new Flow(this.hops, axis, (hop) => this.chooseHop(hop));
    this.heat = new HeatMap(axis, (selection) => this.chooseRegion(selection));
    this.waterfall = new Waterfall(this.hops);
    this.chart = new MemoryChart(store, axis);
    this.members = new Members(name);
    this.cache = new CacheFigures(name);
    this.build();
    this.listeners = [
      [store, "disks", () => this.drawFacts()],
      [store, "counts", () => this.draw()],
      [store, "memory", () => this.drawMemory()],
      [store, "events", () => this.drawEvents()],
      [axis, "held", () => this.draw()],
      [this.hops, "change", () => this.drawWay()],
    ];
    for (const [target, what, listener] of this.listeners) target.addEventListener(what, listener);
    this.forgetToken = onToken(() => this.drawFacts());
  }

  build() {
    this.state = badge("healthy");
    this.reason = h("p.warn");
    this.answer = h("p.answer");
    this.figures = h("dl.totals");
    this.hold = h("button.small", { type: "button", "aria-pressed": "false", onclick: () => this.toggleHold() }, "Hold the time axis");
    const rates = [["0", "by load"], ["1", "every request"], ["8", "one in 8"], ["64", "one in 64"], ["1024", "one in 1024"]];
    this.every = h("select", { id: "every", onchange: () => this.changeEvery() }, rates.map(([value, text]) => h("option", { value }, text)));
    this.heatTitle = h("h2", { id: "heat-title" });
    this.whole = h("button.small", { type: "button", onclick: () => this.flow.toggle(this.hop) }, "Whole requests");
    this.tableBody = h("tbody");
    this.table = h(
      "details.table",
      { ontoggle: () => this.drawTable() },
      h("summary", {}, "As a table"),
      h("table.plain", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "from"), ["requests", "half below", "99 % below", "longest"].map((text) => h("th.number", { scope: "col" }, text)))), this.tableBody),
    );
    this.facts = h("dl.facts");
    this.users = h("ul.users");
    this.events = h("ol.events", { "aria-label": "events of this disk, the newest first" });
    this.wayTime = h("span.quiet");
    this.content = h(
      "div",
      {},
      this.answer,
      this.figures,
      h(
        "div.columns",
        {},
        h(
          "div.main",
          {},
          h("section.panel.waypanel", { "aria-labelledby": "way-title" }, h("div.panelhead", {}, h("h2", { id: "way-title" }, "Way of the requests"), this.wayTime, h("div.field.inline", {}, h("label", { for: "every" }, "Follow"), this.every)), this.flow.element),
          h("section.panel", { "aria-labelledby": "heat-title" }, h("div.panelhead", {}, this.heatTitle, this.whole, this.hold), this.heat.element, this.table),
          h("section.panel", { "aria-labelledby": "memory-title" }, h("h2", { id: "memory-title" }, "Memory of the server"), this.chart.element),
          h("section.panel", { "aria-labelledby": "slow-title" }, h("h2", { id: "slow-title" }, "Slowest requests"), this.waterfall.element),
        ),
        h(
          "div.side",
          {},
          this.members.element,
          this.cache.element,
          h("section.panel", { "aria-labelledby": "facts-title" }, h("h2", { id: "facts-title" }, "Properties"), this.facts, this.buttons()),
          h("section.panel", { "aria-labelledby": "users-title" }, h("h2", { id: "users-title" }, "Users"), this.users),
          h("section.panel", { "aria-labelledby": "events-title" }, h("h2", { id: "events-title" }, "Events"), h("div.brief", { tabindex: "0", role: "region", "aria-label": "list of the events" }, this.events)),
        ),
      ),
    );
    this.element = h("div", {}, h("div.title", {}, h("a.back", { href: "#/" }, "Disks"), h("h1", {}, this.name), this.state), this.reason, this.content);
    // Not there before the disk is known: what comes later would move.
    this.content.hidden = true;
    this.whole.disabled = true;
  }

  buttons() {
    const info = () => this.store.disks.get(this.name)?.info;
    const soon = () => {
      this.store.listSoon = true;
    };
    this.limitButton = h("button.small", { type: "button", onclick: () => info() && askLimit(info(), soon) }, "Change limits…");
    this.removeButton = h("button.small.danger", { type: "button", onclick: () => info() && askRemove(info(), soon) }, "Remove…");
    this.tokenButton = h("button.small", { type: "button", onclick: askToken }, "Enter the token to change it…");
    return h("div.buttons", {}, this.limitButton, this.removeButton, this.tokenButton);
  }

  open() {
    this.drawFacts();
    this.draw();
    this.drawEvents();
    this.refreshSide();
    this.timer = setInterval(() => this.refreshSide(), 2_000);
  }

  close() {
    clearInterval(this.timer);
    for (const [target, what, listener] of this.listeners) target.removeEventListener(what, listener);
    this.forgetToken();
    this.hops.close();
    this.heat.close();
    this.chart.close();
    this.axis.hold(false);
  }

  get disk() {
    return this.store.disks.get(this.name);
  }

  async refreshSide() {
    const info = this.disk?.info;
    if (!info || document.hidden || this.refreshing) return;
    this.refreshing = true;
    const serving = info.state === "serving";
    if (serving && isArray(info)) await this.members.refresh();
    if (serving && isCached(info)) await this.cache.refresh();
    this.refreshing = false;
  }

  // The time that the way is of: the selection, or the last seconds.
  get stretch() {
    if (this.selection) return this.selection;
    const to = this.axis.to;
    return { from: to - RECENT_MS, to, low: 0, high: Infinity };
  }

  get region() {
    return this.selection ?? { from: this.axis.from, to: this.axis.to, low: 0, high: Infinity };
  }

  draw() {
    const { disk } = this;
    if (!disk) return;
    // A disk that was listed after this view was opened.
    if (!disk.history) this.store.open(this.name);
    const rates = disk.rates;
    put(
      this.figures,
      figure("reads/s", rates ? count(rates.reads) : "–", rates ? `${bytes(rates.readBytes)}/s` : null),
      figure("writes/s", rates ? count(rates.writes) : "–", rates ? `${bytes(rates.writeBytes)}/s` : null),
      figure("in flight", rates ? String(rates.inFlight) : "–"),
      figure("average", time(rates?.average)),
      figure("p50", time(rates?.p50)),
      figure("p99", time(rates?.p99)),
      figure("errors/s", rates ? count(rates.errors) : "–"),
    );
    this.autoEvery();
    this.drawHeat();
    this.drawWay();
  }

  autoEvery() {
    if (this.every.value !== "0" || !this.disk.rates) return;
    const wanted = everyFor(this.disk.rates.requests);
    // Twice the bound away, so that a load near it doesn't change the stream each second.
    const calm = everyFor(this.disk.rates.requests / 2) === wanted || everyFor(this.disk.rates.requests * 2) === wanted;
    if (wanted !== this.hops.every && calm) this.hops.sample(wanted);
  }

  changeEvery() {
    const wanted = Number(this.every.value) || everyFor(this.disk?.rates?.requests ?? 0);
    if (wanted !== this.hops.every) this.hops.sample(wanted);
  }

  get marks() {
    const marks = [];
    for (const event of this.store.events) {
      if (event.disk !== this.name || event.severity === "info" || event.at < this.axis.from) continue;
      marks.push({ at: event.at, letter: event.severity === "error" ? "✕" : "▲", color: event.severity === "error" ? "--failed" : "--degraded" });
    }
    for (const sample of this.store.memoryHistory) if (sample.squeezed) marks.push({ at: sample.to, letter: "S", color: "--degraded" });
    return marks.slice(-40);
  }

  drawHeat() {
    const name = this.hop ? `${this.hop.label}, ${this.hops.short(this.hop.layer)}` : "whole requests";
    say(this.heatTitle, `Latency: ${name}`);
    this.whole.disabled = !this.hop;
    const samples = this.hop ? this.hops.of(this.hop.key) : (this.disk?.history ?? []);
    this.heat.show(name, samples, this.marks);
    this.drawTable();
    this.drawMemory();
  }

  drawMemory() {
    this.chart.draw([]);
  }

  drawTable() {
    if (!this.table.open) return;
    const rows = tableOf(this.axis, this.heat.samples);
    put(this.tableBody, rows.map(([from, ...cells]) => h("tr", {}, h("th", { scope: "row" }, from), cells.map((cell) => h("td.number", {}, cell)))));
  }

  drawWay() {
    const { from, to } = this.stretch;
    this.flow.draw(from, to);
    say(this.wayTime, this.selection ? "in the selected time" : "in the last 10 s");
    this.waterfall.draw(this.region, this.hop);
    const most = blame(this.flow.way);
    const place = most ? this.hops.short(most.hop.layer) : "";
    const where = most ? `${share(most.share, 1)} of the requests' time is in “${most.hop.label}”${place === most.hop.label ? "" : ` of ${place}`}.` : "";
    if (this.answerText !== where) {
      this.answerText = where;
      put(this.answer, where || "The way of the requests isn't known yet.");
    }
    if (this.hop) this.drawHeat();
  }

  chooseHop(hop) {
    this.hop = hop;
    this.heat.select(null);
    this.drawHeat();
  }

  chooseRegion(selection) {
    this.selection = selection;
    this.drawWay();
  }

  toggleHold() {
    const on = !this.axis.held;
    this.hold.setAttribute("aria-pressed", String(on));
    say(this.hold, on ? "Go on" : "Hold the time axis");
    this.axis.hold(on);
  }

  drawFacts() {
    const info = this.disk?.info;
    const state = stateOf(info);
    setBadge(this.state, state);
    const gone = this.store.listed && !info;
    say(this.reason, gone ? "This disk isn't served any more." : (info?.reason ?? ""));
    this.reason.hidden = !this.reason.textContent;
    const may = mayChange();
    this.limitButton.hidden = this.removeButton.hidden = !may || !info;
    this.tokenButton.hidden = may;
    if (!info) return;
    if (this.content.hidden) {
      this.content.hidden = false;
      this.draw();
      this.refreshSide();
    }
    const text = JSON.stringify(info, (key, value) => (key === "state_secs" ? undefined : value));
    if (text === this.factsText) return;
    this.factsText = text;
    const facts = [
      ["stands on", info.volume],
      ["size", info.size_bytes ? bytes(info.size_bytes) : "not known"],
      ["limits", info.limit ?? "none"],
      ["access", [info.read_only ? "read-only" : "read and write", info.exclusive ? "one user at a time" : null].filter(Boolean).join(", ")],
      ["state since", `${span(info.state_secs)}, ${info.state}`],
      ["reached at", (info.exports ?? []).join("\n") || "nowhere"],
    ];
    put(this.facts, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd.wrap", {}, value)]));
    const users = info.users ?? [];
    put(this.users, users.length ? users.map((user) => h("li.wrap", {}, user.name, h("span.quiet", {}, ` ${plural(user.count, "queue or connection", "queues or connections")}`))) : h("li.quiet", {}, "Nobody uses it."));
  }

  drawEvents() {
    const mine = this.store.events.filter((event) => event.disk === this.name).slice(-EVENTS).reverse();
    if (!mine.length) return put(this.events, h("li.quiet", {}, "None since the server began."));
    if (!this.events.firstElementChild?.dataset.key) put(this.events);
    keyed(this.events, mine, (event) => event.id, (event) => eventLine(event, false), () => {});
  }
}
