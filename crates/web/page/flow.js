// The way of the requests: one bar whose parts are the hops and whose widths are their share of the time, and a row for each hop with its place in that bar.

import { h, keyed, say } from "./dom.js";
import { share, time, whole } from "./format.js";
import { drawStrip, rangeOf, strip } from "./heatmap.js";
import { percentile } from "./histogram.js";

const HEADS = ["hop", "where in the request's time", "share", "average", "p99", "last 3 minutes"];

export class Flow {
  // `choose(hop)`: the hop of which the heat map is wanted; null for whole requests.
  constructor(hops, axis, choose) {
    this.hops = hops;
    this.axis = axis;
    this.choose = choose;
    this.chosen = null;
    this.bar = h("div.way", { role: "img" });
    this.key = h("ul.layers", { "aria-label": "layers" });
    this.rows = h("div.rows", { role: "rowgroup" });
    this.table = h(
      "div.flow",
      { role: "table", "aria-label": "hops of the requests, in the order of their way" },
      h("div", { role: "rowgroup" }, h("div.head", { role: "row" }, HEADS.map((text) => h("span", { role: "columnheader" }, text)))),
      this.rows,
    );
    this.note = h("p.quiet");
    this.element = h("div", {}, this.bar, this.key, this.table, this.note);
  }

  draw(from, to) {
    const way = this.hops.way(from, to);
    this.way = way;
    let before = 0;
    for (const hop of way.hops) {
      hop.share = way.sum_ns ? hop.sum_ns / way.sum_ns : 0;
      hop.offset = before;
      before += hop.share;
    }
    const has = way.hops.length > 0;
    this.table.hidden = !has;
    this.bar.hidden = !has;
    this.drawBar(way);
    keyed(this.key, [...this.hops.layers], ([name]) => name, ([name, at]) => h("li", {}, h(`span.swatch.layer${at}`, { "aria-hidden": "true" }), this.hops.short(name)), () => {});
    keyed(this.rows, way.hops, (hop) => hop.key, (hop) => this.row(hop), (row, hop) => this.update(row, hop));
    say(this.note, this.words(way));
  }

  drawBar(way) {
    const most = [...way.hops].sort((a, b) => b.share - a.share).slice(0, 3);
    const words = most.map((hop) => `${hop.label} of ${this.hops.short(hop.layer)} ${share(hop.sum_ns, way.sum_ns)}`);
    this.bar.setAttribute("aria-label", `Time of the requests: ${words.join(", ")}`);
    const width = this.bar.clientWidth;
    keyed(this.bar, way.hops, (hop) => hop.key, (hop) => h(`span.part.layer${this.hops.layer(hop.layer)}`, {}, h("span")), (part, hop) => {
      part.style.flexGrow = String(Math.max(hop.share, 0.0005));
      part.title = `${this.hops.short(hop.layer)}: ${hop.label}, ${share(hop.sum_ns, way.sum_ns)}`;
      const words = `${hop.member ? this.hops.short(hop.layer) : hop.label} ${share(hop.sum_ns, way.sum_ns)}`;
      // Only where there is room for all of it: a letter takes some 7 pixels.
      say(part.firstChild, hop.share * width > words.length * 7 + 8 ? words : "");
    });
  }

  row(hop) {
    const choice = h("button.hop", { type: "button", "aria-pressed": "false", onclick: () => this.toggle(hop) });
    const at = this.hops.layer(hop.layer);
    choice.append(...[h("span.label", {}, h(`span.swatch.layer${at}`, { "aria-hidden": "true" }), hop.label), this.hops.short(hop.layer) === hop.label ? null : h("span.layer", {}, this.hops.short(hop.layer))].filter((part) => part !== null));
    choice.style.setProperty("--depth", String(Math.min(hop.depth ?? 0, 6)));
    const cells = [
      h("span", { role: "rowheader" }, choice),
      h("span.place", { role: "cell" }, h(`span.fill.layer${at}`)),
      h("span.number.share", { role: "cell" }),
      h("span.number.average", { role: "cell" }),
      h("span.number.p99", { role: "cell" }),
      h("span.stripcell", { role: "cell" }, strip(`latency of ${hop.label} over time; choose the hop for a large one`)),
    ];
    return h("div.row", { role: "row" }, cells);
  }

  update(row, hop) {
    const [head, place, part, average, p99, last] = row.children;
    head.firstChild.setAttribute("aria-pressed", String(this.chosen?.key === hop.key));
    place.firstChild.style.left = `${hop.offset * 100}%`;
    place.firstChild.style.width = `${hop.share * 100}%`;
    say(part, share(hop.sum_ns, this.way.sum_ns));
    say(average, hop.count ? time(hop.sum_ns / hop.count) : "–");
    say(p99, time(percentile(hop.latency_ns, 0.99)));
    row.title = `${hop.name}: ${whole(hop.count)} requests passed it`;
    const samples = this.hops.of(hop.key);
    drawStrip(last.firstChild, this.axis, samples, rangeOf(samples));
  }

  toggle(hop) {
    this.chosen = this.chosen?.key === hop.key ? null : hop;
    for (const row of this.rows.children) row.firstChild.firstChild.setAttribute("aria-pressed", String(row.dataset.key === this.chosen?.key));
    this.choose(this.chosen);
  }

  words(way) {
    const { state, why, every, lost, unknown } = this.hops;
    if (state === "missing") return `The way isn't known: ${why}`;
    if (!this.hops.samples.length) return state === "open" ? "Waiting for the first second." : "Waiting for the stream of hops.";
    if (!way.hops.length) return "No requests in this time.";
    const followed = Math.max(...way.hops.map((hop) => hop.count));
    const of = every === 1 ? "every one" : `one in ${every}`;
    const parts = [`${whole(followed)} requests were followed, ${of}.`];
    if (lost) parts.push(`${whole(lost)} events were lost.`);
    if (unknown) parts.push(`${whole(unknown)} requests are in no figure, because some of their events may be lost.`);
    return parts.join(" ");
  }
}

// The three hops with most of the time, in words, for the head of the page.
export function blame(way) {
  const [first] = [...way.hops].sort((a, b) => b.sum_ns - a.sum_ns);
  return first && way.sum_ns ? { hop: first, share: first.sum_ns / way.sum_ns } : null;
}

