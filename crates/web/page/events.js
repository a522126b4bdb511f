// Events of the server, the newest first, as they come.

import { h, keyed, say } from "./dom.js";
import { clock, plural } from "./format.js";

const SHAPES = { info: "●", warning: "▲", error: "✕" };
const RANK = { info: 0, warning: 1, error: 2 };
const MOST = 200;

// The line of an event; `named`: with its disk.
export function eventLine(event, named) {
  const severity = h("span.severity", { "data-severity": event.severity }, h("span.shape", { "aria-hidden": "true" }, SHAPES[event.severity] ?? "○"), ` ${event.severity}`);
  const disk = named && event.disk ? h("a", { href: `#/disk/${encodeURIComponent(event.disk)}` }, event.disk) : null;
  const more = event.left_out ? h("span.quiet", {}, ` and ${plural(event.left_out, "one", "others")} like it before`) : null;
  const time = h("time", { datetime: event.time, title: event.time }, clock(event.at));
  return h("li.event", {}, time, severity, h("span.kind", {}, event.kind), h("span.text", {}, disk, disk ? ": " : null, event.text, more));
}

export class Events {
  constructor(store) {
    this.store = store;
    this.text = "";
    this.least = 0;
    this.find = h("input", { type: "search", id: "find-event", placeholder: "disk, kind or text", autocomplete: "off", oninput: () => this.filter() });
    this.severity = h("select", { id: "severity", onchange: () => this.filter() }, [["0", "all"], ["1", "warnings and errors"], ["2", "errors"]].map(([value, text]) => h("option", { value }, text)));
    this.list = h("ol.events", { "aria-label": "events, the newest first" });
    this.note = h("p.quiet", { role: "status" });
    this.element = h(
      "div",
      {},
      h("h1", {}, "Events"),
      h("div.tools", {}, h("div.field", {}, h("label", { for: "find-event" }, "Find"), this.find), h("div.field", {}, h("label", { for: "severity" }, "Show"), this.severity)),
      this.note,
      h("section.panel", { "aria-label": "events" }, this.list),
    );
    this.listen = () => this.draw();
    store.addEventListener("events", this.listen);
    store.addEventListener("connection", this.listen);
  }

  open() {
    this.draw();
  }

  close() {
    this.store.removeEventListener("events", this.listen);
    this.store.removeEventListener("connection", this.listen);
  }

  filter() {
    this.text = this.find.value.trim().toLowerCase();
    this.least = Number(this.severity.value);
    this.draw();
  }

  draw() {
    const found = this.store.events.filter((event) => (RANK[event.severity] ?? 0) >= this.least && `${event.disk ?? ""}\n${event.kind}\n${event.text}`.toLowerCase().includes(this.text));
    const shown = found.slice(-MOST).reverse();
    keyed(this.list, shown, (event) => event.id, (event) => eventLine(event, true), () => {});
    const live = { open: "New ones appear as they come.", waiting: "Waiting for the stream of events.", missing: "This server has no stream of events." }[this.store.eventsState];
    say(this.note, `${plural(found.length, "event", "events")}${found.length > MOST ? `, the last ${MOST} shown` : ""}. ${live}`);
  }
}
