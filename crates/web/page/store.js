// What the server was last known to say: disks with their rates, memory and events. All asking that isn't of one view is here.

import { ask, stream } from "./api.js";
import { ended, percentile, since, sum, total } from "./histogram.js";
import { stateOf } from "./state.js";

const LIST_EVERY_MS = 5_000;
const FIRST_PAGE = 200;
const PAGE = 1_000;
const LATE_MS = 5_000;
const MOST_EVENTS = 1_000;
const MOST_HISTORIES = 17;
export const WINDOW_MS = 180_000;

class Disk {
  constructor(info) {
    this.name = info.name;
    this.info = info;
    this.last = null;
    this.rates = null;
    // The hop with most of the time of the last second's requests, and whether some waited for a limit; null while nothing is followed.
    this.way = null;
    // Samples of the latencies of whole requests; null unless somebody looks at the disk.
    this.history = null;
  }

  get state() {
    const state = stateOf(this.info);
    return state === "healthy" && this.way?.isLimited ? "limited" : state;
  }

  // Requests at work on average: the time that clients wait for this disk, in seconds of each second.
  get load() {
    return this.rates ? this.rates.time / 1e9 / this.rates.seconds : 0;
  }
}

const ZERO = { requests: 0, bytes: 0, errors: 0, time_ns: 0, latency_ns: [] };

// Differences of two answers of `stat` as rates a second; null if the counters went back.
export function ratesOf(now, before) {
  const seconds = (now.elapsed_ns - before.elapsed_ns) / 1e9;
  if (!(seconds > 0)) return null;
  const rates = { seconds, requests: 0, reads: 0, writes: 0, readBytes: 0, writeBytes: 0, errors: 0, time: 0 };
  const latencies = [];
  for (const [name, operation] of Object.entries(now.operations)) {
    const old = before.operations[name] ?? ZERO;
    const requests = operation.requests - old.requests;
    const added = since(operation.latency_ns, old.latency_ns);
    if (requests < 0 || added === null) return null;
    latencies.push(ended(added));
    rates.requests += requests / seconds;
    rates.errors += (operation.errors - old.errors) / seconds;
    rates.time += operation.time_ns - old.time_ns;
    if (name === "read") {
      rates.reads += requests / seconds;
      rates.readBytes += (operation.bytes - old.bytes) / seconds;
    } else if (name !== "flush") {
      rates.writes += requests / seconds;
      rates.writeBytes += (operation.bytes - old.bytes) / seconds;
    }
  }
  rates.latencies = sum(latencies);
  rates.inFlight = now.in_flight;
  const requests = total(rates.latencies);
  rates.average = requests ? rates.time / requests : null;
  rates.p50 = percentile(rates.latencies, 0.5);
  rates.p99 = percentile(rates.latencies, 0.99);
  return rates;
}

export class Store extends EventTarget {
  constructor() {
    super();
    this.disks = new Map();
    this.listed = false;
    this.version = null;
    this.methods = null;
    this.connection = "waiting";
    this.connectionText = "connecting";
    this.events = [];
    this.eventsState = "waiting";
    this.memory = null;
    this.memoryHistory = [];
    this.memoryWatchers = 0;
    this.opened = [];
    this.lastAnswer = 0;
    this.seen = new Set();
  }

  start() {
    ask("pvblk.version").then(
      (version) => {
        this.version = version.version;
        this.methods = new Set(version.methods);
        this.tell("connection");
      },
      () => {},
    );
    this.events_stream = stream("events", { follow: true }, {
      object: (event) => this.addEvent(event),
      state: (state) => {
        this.eventsState = state;
        this.tell("connection");
      },
    });
    this.listLoop();
    this.countLoop();
    this.memoryLoop();
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.wake?.();
    });
    setInterval(() => this.judge(), 1_000);
  }

  tell(what, detail) {
    this.dispatchEvent(new CustomEvent(what, { detail }));
  }

  // Waits; a page that can't be seen waits until it can.
  async pause(ms) {
    await new Promise((resolve) => setTimeout(resolve, ms));
    while (document.hidden) {
      await new Promise((resolve) => {
        const before = this.wake;
        this.wake = () => {
          before?.();
          resolve();
        };
      });
    }
    this.wake = undefined;
  }

  answered() {
    this.lastAnswer = performance.now();
    this.connect("live", "live");
  }

  failed(error) {
    const text = error.name === "TimeoutError" ? "the server doesn't answer" : error.message;
    this.connect("gone", error instanceof TypeError ? "the server can't be reached" : text);
  }

  judge() {
    const late = performance.now() - this.lastAnswer;
    if (this.connection === "live" && late > LATE_MS && !document.hidden) {
      this.connect("late", `no answer for ${Math.round(late / 1000)} s`);
    }
  }

  connect(state, text) {
    if (this.connection === state && this.connectionText === text) return;
    this.connection = state;
    this.connectionText = text;
    this.tell("connection");
  }

  async listLoop() {
    for (;;) {
      try {
        await this.list();
      } catch (error) {
        this.failed(error);
      }
      this.listSoon = false;
      const until = performance.now() + LIST_EVERY_MS;
      do await this.pause(250);
      while (performance.now() < until && !this.listSoon);
    }
  }

  async list() {
    const seen = new Set();
    let after = null;
    do {
      const page = await ask("disk.list", { after, most: this.listed ? PAGE : FIRST_PAGE });
      this.answered();
      for (const info of page.disks) {
        seen.add(info.name);
        const disk = this.disks.get(info.name);
        if (disk) disk.info = info;
        else this.disks.set(info.name, new Disk(info));
      }
      after = page.next;
      if (!this.listed) {
        this.listed = true;
        this.tell("disks");
      }
    } while (after !== null && after !== undefined);
    for (const name of this.disks.keys()) if (!seen.has(name)) this.disks.delete(name);
    this.tell("disks");
  }

  async countLoop() {
    while (!this.listed) await this.pause(20);
    for (;;) {
      const begin = performance.now();
      try {
        const answer = await ask("stat");
        this.answered();
        this.count(answer);
      } catch (error) {
        this.failed(error);
      }
      const took = performance.now() - begin;
      await this.pause(Math.max(1_000 - took, took * 9));
    }
  }

  count(answer) {
    const now = Date.now();
    for (const counters of answer.disks) {
      const disk = this.disks.get(counters.disk);
      if (!disk) continue;
      const before = disk.last;
      disk.last = counters;
      disk.lastAt = now;
      const rates = before && ratesOf(counters, before);
      if (!rates) continue;
      disk.rates = rates;
      if (!disk.history) continue;
      disk.history.push({ from: now - rates.seconds * 1000, to: now, latencies: rates.latencies, time: rates.time });
      trim(disk.history, now);
    }
    this.tell("counts");
  }

  // Takes the hops of all disks in the last second.
  addWays(object) {
    const ways = new Map((object.disks ?? []).map((disk) => [disk.disk, disk]));
    for (const disk of this.disks.values()) {
      const hops = ways.get(disk.name)?.hops ?? [];
      const all = hops.reduce((before, hop) => before + hop.sum_ns, 0);
      const by = new Map();
      for (const hop of hops) by.set(hop.label, (by.get(hop.label) ?? 0) + hop.sum_ns);
      const [label, ns] = [...by].sort((a, b) => b[1] - a[1])[0] ?? [null, 0];
      disk.way = label === null || !all ? null : { label, share: ns / all, isLimited: (by.get("limit") ?? 0) > 0 };
    }
    this.tell("ways");
  }

  // Begins to keep the history of a disk. The one that was opened longest ago makes room.
  open(name) {
    const disk = this.disks.get(name);
    if (!disk) return;
    disk.history ??= [];
    this.opened = [...this.opened.filter((other) => other !== name), name];
    while (this.opened.length > MOST_HISTORIES) {
      const old = this.disks.get(this.opened.shift());
      if (old) old.history = null;
    }
  }

  async memoryLoop() {
    for (;;) {
      if (this.memoryWatchers > 0) {
        try {
          const answer = await ask("memory.ask", { question: { memory: "report" } });
          this.answered();
          const now = Date.now();
          const before = this.memory;
          this.memory = answer;
          const squeezed = before ? Math.max(answer.squeezes - before.squeezes, 0) : 0;
          this.memoryHistory.push({ from: this.memoryHistory.at(-1)?.to ?? now, to: now, answer, squeezed });
          trim(this.memoryHistory, now);
          this.tell("memory");
        } catch (error) {
          if (error.unknown) return;
        }
      }
      await this.pause(this.memoryWatchers > 0 ? 1_000 : 200);
    }
  }

  addEvent(event) {
    const id = `${event.run} ${event.number}`;
    if (this.seen.has(id)) return;
    this.seen.add(id);
    this.events.push({ ...event, id, at: Date.parse(event.time) });
    if (this.events.length > MOST_EVENTS) this.seen.delete(this.events.shift().id);
    this.listSoon = true;
    if (this.telling) return;
    // A flood of events is drawn once a frame.
    this.telling = requestAnimationFrame(() => {
      this.telling = null;
      this.tell("events");
    });
  }
}

export function trim(samples, now) {
  while (samples.length && samples[0].to < now - WINDOW_MS - 5_000) samples.shift();
}
