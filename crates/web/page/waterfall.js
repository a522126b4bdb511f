// The slowest requests of a time: a bar each, and the one that is chosen as a waterfall over the layers.

import { h, keyed, put, say } from "./dom.js";
import { bytes, clock, plural, time, whole } from "./format.js";

const MOST = 12;

export class Waterfall {
  constructor(hops) {
    this.hops = hops;
    this.chosen = null;
    this.list = h("div.slowlist", { role: "listbox", "aria-label": "slowest requests", tabindex: "0", onkeydown: (event) => this.key(event) });
    this.note = h("p.quiet");
    this.detail = h("div.detail", { role: "region", "aria-label": "the chosen request", tabindex: "0" });
    this.element = h("div", {}, this.note, h("div.slow", {}, this.list, this.detail));
  }

  draw(region, hop) {
    const all = this.hops.slowest(region, hop);
    this.requests = all.slice(0, MOST);
    const most = this.requests[0]?.total_ns ?? 1;
    // The slowest, until a person picks one.
    if (!this.picked || !this.requests.some((request) => idOf(request) === this.chosen)) this.chosen = this.requests.length ? idOf(this.requests[0]) : null;
    keyed(this.list, this.requests, idOf, (request) => this.line(request), (line, request) => {
      line.setAttribute("aria-selected", String(idOf(request) === this.chosen));
      line.querySelector(".bar").style.width = `${(request.total_ns / most) * 100}%`;
    });
    this.element.classList.toggle("none", !this.requests.length);
    say(this.note, this.words(all.length));
    this.drawDetail();
    const active = this.requests.findIndex((request) => idOf(request) === this.chosen);
    if (active < 0) this.list.removeAttribute("aria-activedescendant");
    else this.list.setAttribute("aria-activedescendant", this.list.children[active].id);
  }

  words(number) {
    if (this.hops.state === "missing") return "Slow requests can't be listed without the stream of hops.";
    if (!number) return "None was told in this region. At most ten a second of the followed requests are.";
    return `${plural(number, "slow request", "slow requests")} told in this time, the ${whole(this.requests.length)} slowest:`;
  }

  line(request) {
    const id = idOf(request);
    const parts = parted(request).map((part) => {
      const piece = h(`span.part.layer${this.hops.layer(part.layer)}`);
      piece.style.flexGrow = String(part.ns);
      return piece;
    });
    const told = `${request.op} at sector ${whole(request.sector)}, ${bytes(request.bytes)}`;
    return h(
      "div.slowline",
      { role: "option", id: `slow-${id.replaceAll(" ", "-")}`, onclick: () => this.pick(id) },
      h("span.number", {}, time(request.total_ns)),
      h("span.what", {}, told),
      h("span.when", {}, clock(request.at)),
      h("span.track", { "aria-hidden": "true" }, h("span.bar", {}, parts)),
    );
  }

  pick(id) {
    this.picked = true;
    this.chosen = id;
    for (const line of this.list.children) line.setAttribute("aria-selected", String(line.dataset.key === id));
    const line = [...this.list.children].find((child) => child.dataset.key === id);
    this.list.setAttribute("aria-activedescendant", line.id);
    line.scrollIntoView({ block: "nearest" });
    this.drawDetail();
  }

  key(event) {
    const at = this.requests.findIndex((request) => idOf(request) === this.chosen);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: this.requests.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (this.requests[to]) this.pick(idOf(this.requests[to]));
  }

  drawDetail() {
    const request = this.requests.find((one) => idOf(one) === this.chosen);
    if (this.drawn === this.chosen) return;
    this.drawn = this.chosen;
    if (!request) return put(this.detail);
    const length = Math.max(request.total_ns, 1);
    const rows = request.hops.map((hop) => {
      const fill = h(`span.fill.layer${this.hops.layer(hop.layer)}`);
      fill.style.left = `${(hop.begin_ns / length) * 100}%`;
      fill.style.width = `${(hop.ns / length) * 100}%`;
      return h("tr", {}, h("th", { scope: "row" }, h("span.label", {}, hop.label), this.hops.short(hop.layer) === hop.label ? null : h("span.layer", {}, this.hops.short(hop.layer))), h("td.place", {}, fill), h("td.number", {}, time(hop.begin_ns)), h("td.number", {}, time(hop.ns)));
    });
    put(
      this.detail,
      h(
        "table.falls",
        {},
        h("caption", {}, `${request.op} at sector ${whole(request.sector)}, ${bytes(request.bytes)}: ${time(request.total_ns)}`),
        h("thead", {}, h("tr", {}, ["hop", "when", "begins at", "takes"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, rows),
      ),
    );
  }
}

function idOf(request) {
  return `${request.begin_ns} ${request.sector} ${request.total_ns}`;
}

// Hops one after the other, for a bar: what hops of members have in common is drawn once.
function parted(request) {
  const parts = [];
  let at = 0;
  for (const hop of [...request.hops].sort((a, b) => a.begin_ns - b.begin_ns)) {
    const end = hop.begin_ns + hop.ns;
    if (end <= at) continue;
    parts.push({ layer: hop.layer, ns: end - Math.max(hop.begin_ns, at) });
    at = end;
  }
  return parts;
}
