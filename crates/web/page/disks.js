// The list of disks. Only rows in view are drawn, so it is as quick with 65,536 disks as with ten.

import { stream } from "./api.js";
import { h, keyed, put, say } from "./dom.js";
import { bytes, count, plural, time } from "./format.js";
import { STATES, badge, kindOf, setBadge, urgency } from "./state.js";

const COLUMNS = [
  { key: "state", text: "state", first: "up", of: (disk) => urgency(disk.state) },
  { key: "name", text: "disk", first: "up", of: (disk) => disk.name },
  { key: "kind", text: "stands on", first: "up", of: (disk) => kindOf(disk.info.volume) },
  { key: "reads", text: "reads/s", number: true, of: (disk) => disk.rates?.reads ?? -1 },
  { key: "writes", text: "writes/s", number: true, of: (disk) => disk.rates?.writes ?? -1 },
  { key: "bytes", text: "bytes/s", number: true, of: (disk) => (disk.rates ? disk.rates.readBytes + disk.rates.writeBytes : -1) },
  { key: "flight", text: "in flight", number: true, of: (disk) => disk.rates?.inFlight ?? -1 },
  { key: "average", text: "average", number: true, of: (disk) => disk.rates?.average ?? -1 },
  { key: "p99", text: "p99", number: true, of: (disk) => disk.rates?.p99 ?? -1 },
  { key: "most", text: "most time in", first: "up", of: (disk) => disk.way?.label ?? "\uffff" },
  { key: "users", text: "users", number: true, of: (disk) => disk.info.users?.length ?? 0 },
];

const ORDER_EVERY_MS = 5_000;
// Few enough requests that following them costs next to nothing.
const FOLLOWED = 64;
const BEYOND = 12;

export class Disks {
  constructor(store) {
    this.store = store;
    this.sort = { key: "state", up: true };
    this.filter = { text: "", state: null };
    this.shown = [];
    this.build();
    this.listeners = [
      [store, "disks", () => this.order(false)],
      [store, "counts", () => this.counted()],
      [store, "ways", () => this.draw()],
      [window, "scroll", () => this.draw()],
      [window, "resize", () => this.measure()],
    ];
    for (const [target, name, listener] of this.listeners) target.addEventListener(name, listener, { passive: true });
  }

  build() {
    this.search = h("input", { type: "search", id: "search", placeholder: "name, volume or user", autocomplete: "off", spellcheck: "false", oninput: () => this.filtered() });
    this.chips = h("div.chips", { role: "group", "aria-label": "disks in a state" });
    const orders = COLUMNS.map((column) => h("option", { value: column.key }, column.text));
    this.select = h("select", { id: "order", onchange: () => this.sortBy(this.select.value) }, orders);
    this.heads = COLUMNS.map((column) =>
      h(`span.${column.key}${column.number ? ".number" : ""}`, { role: "columnheader", "aria-sort": "none" }, h("button", { type: "button", onclick: () => this.sortBy(column.key) }, column.text, h("span.arrow", { "aria-hidden": "true" }))),
    );
    this.body = h("div.body", { role: "rowgroup", onkeydown: (event) => this.key(event) });
    this.table = h("div.disks", { role: "table", "aria-label": "disks" }, h("div.heads", { role: "rowgroup" }, h("div.head", { role: "row", "aria-rowindex": "1" }, this.heads)), this.body);
    this.found = h("p.quiet.found", { role: "status" });
    this.totals = h("dl.totals");
    // Not there before the first answer: what comes later would move.
    this.list = h("div", { hidden: true }, this.chips, this.found, this.table);
    this.element = h(
      "div",
      {},
      h("h1", {}, "Disks"),
      this.totals,
      h(
        "div.tools",
        {},
        h("div.field", {}, h("label", { for: "search" }, "Find"), this.search),
        h("div.field.phone", {}, h("label", { for: "order" }, "Order"), this.select),
      ),
      this.list,
    );
  }

  open() {
    this.order(true);
    this.ways = stream("hops", { every: FOLLOWED, brief: true }, { object: (object) => this.store.addWays(object), state: () => {} });
  }

  close() {
    this.ways?.close();
    for (const [target, name, listener] of this.listeners) target.removeEventListener(name, listener);
  }

  filtered() {
    this.filter.text = this.search.value.trim().toLowerCase();
    this.order(true);
  }

  sortBy(key) {
    const column = COLUMNS.find((one) => one.key === key);
    this.sort = this.sort.key === key ? { key, up: !this.sort.up } : { key, up: column.first === "up" };
    this.order(true);
  }

  matches(disk) {
    const { text, state } = this.filter;
    if (state && disk.state !== state) return false;
    if (!text) return true;
    const info = disk.info;
    const users = (info.users ?? []).map((user) => user.name).join("\n");
    return `${info.name}\n${info.volume}\n${users}`.toLowerCase().includes(text);
  }

  counted() {
    // At first there were no figures to order by. An order by figures that somebody asked for is kept.
    const first = !this.hadRates && [...this.store.disks.values()].some((disk) => disk.rates);
    if (first) this.hadRates = true;
    const kept = !["state", "name", "kind"].includes(this.sort.key);
    const due = first || kept || performance.now() - (this.orderedAt ?? 0) > ORDER_EVERY_MS;
    const busy = this.body.contains(document.activeElement) || this.body.matches(":hover");
    if (due && !busy) this.order(false);
    else {
      this.draw();
      this.drawTotals();
    }
  }

  // Makes the order anew. `asked`: by a person, so it may move what is under the pointer.
  order(asked) {
    const column = COLUMNS.find((one) => one.key === this.sort.key);
    const way = this.sort.up ? 1 : -1;
    const wanted = [...this.store.disks.values()].filter((disk) => this.matches(disk));
    const values = new Map(wanted.map((disk) => [disk, column.of(disk)]));
    wanted.sort((a, b) => {
      const [one, two] = [values.get(a), values.get(b)];
      if (one !== two) return one < two ? -way : way;
      if (b.load !== a.load) return b.load - a.load;
      return a.name < b.name ? -1 : 1;
    });
    this.shown = wanted;
    this.list.hidden = !this.store.listed;
    this.orderedAt = performance.now();
    this.heads.forEach((head, at) => {
      const mine = COLUMNS[at].key === this.sort.key;
      head.setAttribute("aria-sort", mine ? (this.sort.up ? "ascending" : "descending") : "none");
      say(head.querySelector(".arrow"), mine ? (this.sort.up ? "▲" : "▼") : "");
    });
    this.select.value = this.sort.key;
    if (asked && this.body.contains(document.activeElement)) document.activeElement.blur();
    this.measure();
    this.drawTotals();
  }

  measure() {
    // Rows have one height for a width of the screen: the style sheet says which.
    this.height = parseFloat(getComputedStyle(this.table).getPropertyValue("--row")) || 36;
    this.body.style.height = `${this.shown.length * this.height}px`;
    this.table.setAttribute("aria-rowcount", String(this.shown.length + 1));
    this.draw();
  }

  draw() {
    if (!this.body.isConnected) return;
    const top = this.body.getBoundingClientRect().top;
    const first = Math.max(Math.floor(-top / this.height) - BEYOND, 0);
    const last = Math.min(Math.ceil((window.innerHeight - top) / this.height) + BEYOND, this.shown.length);
    const visible = [];
    for (let at = first; at < last; at += 1) visible.push({ at, disk: this.shown[at] });
    // The row with the focus stays, wherever it is.
    const focused = document.activeElement?.closest?.(".disks .row")?.dataset.key;
    const kept = focused === undefined ? -1 : this.shown.findIndex((disk) => disk.name === focused);
    if (kept >= 0 && (kept < first || kept >= last)) visible.splice(kept < first ? 0 : visible.length, 0, { at: kept, disk: this.shown[kept] });
    keyed(this.body, visible, ({ disk }) => disk.name, ({ disk }) => this.row(disk), (row, { at, disk }) => this.update(row, at, disk));
  }

  row(disk) {
    const cells = COLUMNS.map((column) => h(`span.${column.key}${column.number ? ".number" : ""}`, { role: "cell" }));
    cells[0].append(badge(disk.state));
    cells[1].append(h("a", { href: `#/disk/${encodeURIComponent(disk.name)}` }, disk.name));
    return h("div.row", { role: "row" }, cells);
  }

  update(row, at, disk) {
    row.style.transform = `translateY(${at * this.height}px)`;
    row.setAttribute("aria-rowindex", String(at + 2));
    const [state, , kind, reads, writes, both, flight, average, p99, most, users] = row.children;
    const rates = disk.rates;
    setBadge(state.firstChild, disk.state);
    say(kind, kindOf(disk.info.volume));
    row.title = disk.info.reason ?? disk.info.volume;
    say(reads, rates ? count(rates.reads) : "–");
    say(writes, rates ? count(rates.writes) : "–");
    say(both, rates ? bytes(rates.readBytes + rates.writeBytes) : "–");
    say(flight, rates ? rates.inFlight : "–");
    say(average, time(rates?.average));
    say(p99, time(rates?.p99));
    say(most, disk.way ? `${Math.round(disk.way.share * 100)} % ${tail(disk.way.label)}` : "–");
    most.title = disk.way?.label ?? "";
    say(users, disk.info.users?.length ?? 0);
    row.classList.toggle("idle", !rates || rates.requests === 0);
  }

  // Up, Down and the like go from name to name.
  key(event) {
    const row = event.target.closest(".row");
    if (!row) return;
    const at = Number(row.getAttribute("aria-rowindex")) - 2;
    const page = Math.max(Math.floor(window.innerHeight / this.height) - 2, 1);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: this.shown.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.focus(Math.min(Math.max(to, 0), this.shown.length - 1));
  }

  focus(at) {
    const top = this.body.getBoundingClientRect().top + at * this.height;
    const head = 90;
    if (top < head) window.scrollBy(0, top - head);
    else if (top + this.height > window.innerHeight - 8) window.scrollBy(0, top + this.height - window.innerHeight + 8);
    this.draw();
    const row = [...this.body.children].find((child) => child.dataset.key === this.shown[at]?.name);
    row?.querySelector("a").focus({ preventScroll: true });
  }

  drawTotals() {
    const all = [...this.store.disks.values()];
    const sums = { requests: 0, bytes: 0, flight: 0, worst: null };
    for (const { rates, name } of all) {
      if (!rates) continue;
      sums.requests += rates.requests;
      sums.bytes += rates.readBytes + rates.writeBytes;
      sums.flight += rates.inFlight;
      if (rates.p99 !== null && (!sums.worst || rates.p99 > sums.worst.p99)) sums.worst = { p99: rates.p99, name };
    }
    put(
      this.totals,
      figure("requests/s", count(sums.requests)),
      figure("bytes/s", bytes(sums.bytes)),
      figure("in flight", count(sums.flight)),
      figure("worst p99", sums.worst ? time(sums.worst.p99) : "–", sums.worst?.name),
    );
    const counts = new Map();
    for (const disk of all) counts.set(disk.state, (counts.get(disk.state) ?? 0) + 1);
    const states = [null, ...STATES.filter((state) => counts.has(state) || state === this.filter.state)];
    keyed(
      this.chips,
      states,
      (state) => state ?? "all",
      (state) => h("button.chip", { type: "button", onclick: () => this.only(state) }, state ? badge(state) : h("span", {}, "all"), h("span.number")),
      (chip, state) => {
        chip.setAttribute("aria-pressed", String(this.filter.state === state));
        say(chip.lastChild, state ? (counts.get(state) ?? 0) : all.length);
      },
    );
    say(this.found, this.shown.length === all.length ? plural(all.length, "disk", "disks") : `${this.shown.length} of ${plural(all.length, "disk", "disks")}`);
  }

  only(state) {
    this.filter.state = state;
    this.order(true);
  }
}

// A member's name is a path, whose end tells more than its beginning.
function tail(label) {
  return label.length > 22 && label.includes("/") ? `${label.split(" ")[0]} …/${label.split("/").at(-1)}` : label;
}

export function figure(name, value, note) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value, note ? h("span.note", {}, note) : null));
}
