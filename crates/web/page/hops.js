// The stream of `hops` of one disk, and what its samples add up to.

import { stream } from "./api.js";
import { ofBegins, sum } from "./histogram.js";
import { trim } from "./store.js";

export function keyOf(hop) {
  return `${hop.layer}\u0000${hop.name}\u0000${hop.label}\u0000${hop.member ?? ""}`;
}

export class Hops extends EventTarget {
  constructor(disk, every) {
    super();
    this.disk = disk;
    this.samples = [];
    this.state = "waiting";
    this.why = "";
    this.lost = 0;
    this.unknown = 0;
    this.layers = new Map();
    this.sample(every);
  }

  // Follows one request in `every` from now on.
  sample(every) {
    this.source?.close();
    this.every = every;
    this.source = stream("hops", { disk: this.disk, every }, {
      object: (object) => this.add(object),
      state: (state, why) => {
        if (this.state === "missing" && state === "waiting") return;
        this.state = state;
        this.why = why ?? "";
        this.dispatchEvent(new Event("change"));
      },
    });
  }

  add(object) {
    const found = object.disks?.find((disk) => disk.disk === this.disk);
    const now = Date.now();
    this.every = object.every ?? this.every;
    this.lost += object.lost ?? 0;
    this.unknown += object.unknown ?? 0;
    const length = (object.elapsed_ns ?? 1e9) / 1e6;
    const hops = (found?.hops ?? []).map((hop) => ({ ...hop, latency_ns: ofBegins(hop.latency_ns) }));
    const slowest = (found?.slowest ?? []).map((request) => ({ ...request, at: now }));
    this.samples.push({ from: now - length, to: now, hops, requests: found?.requests ?? 0, slowest });
    trim(this.samples, now);
    for (const hop of hops) this.layer(hop.layer);
    this.dispatchEvent(new Event("change"));
  }

  // A layer in words: without the disk's name, which all of them begin with; `[MEMBER]/LAYER` is a member of an array.
  short(layer) {
    const name = layer.startsWith(`${this.disk}/`) ? layer.slice(this.disk.length + 1) : layer;
    const found = /^\[(.*)\](?:\/(.*))?$/s.exec(name);
    if (!found) return name;
    const [, member, below] = found;
    return below && below !== member ? `member ${member}, ${below}` : `member ${member}`;
  }

  // Number of the color of a layer: in the order in which layers were first seen.
  layer(name) {
    if (!this.layers.has(name)) this.layers.set(name, this.layers.size % 8);
    return this.layers.get(name);
  }

  // The way of the requests between two moments: hops in order with their sums.
  way(from, to) {
    const hops = new Map();
    let requests = 0;
    for (const sample of this.samples) {
      if (sample.to <= from || sample.to > to) continue;
      requests += sample.requests;
      for (const hop of sample.hops) {
        const key = keyOf(hop);
        const known = hops.get(key);
        if (known) {
          known.count += hop.count;
          known.sum_ns += hop.sum_ns;
          known.lists.push(hop.latency_ns);
        } else hops.set(key, { ...hop, key, lists: [hop.latency_ns] });
      }
    }
    const list = [...hops.values()];
    for (const hop of list) hop.latency_ns = sum(hop.lists);
    return { requests, hops: list, sum_ns: list.reduce((before, hop) => before + hop.sum_ns, 0) };
  }

  // Samples of one hop, for a heat map.
  of(key) {
    return this.samples.map(({ from, to, hops }) => ({ from, to, latencies: hops.find((hop) => keyOf(hop) === key)?.latency_ns ?? [] }));
  }

  // The slowest requests in a region, the slowest first. With a hop, its time in the request is what must lie in the region.
  slowest(region, hop) {
    const found = [];
    for (const sample of this.samples) {
      if (sample.to <= region.from || sample.to > region.to + 999) continue;
      for (const request of sample.slowest) {
        const ns = hop ? timeAt(request, hop) : request.total_ns;
        if (ns >= region.low && ns <= region.high) found.push(request);
      }
    }
    return found.sort((a, b) => b.total_ns - a.total_ns);
  }

  close() {
    this.source.close();
  }
}

function timeAt(request, hop) {
  let ns = -1;
  for (const part of request.hops) if (part.layer === hop.layer && part.label === hop.label) ns = Math.max(ns, part.ns);
  return ns;
}
