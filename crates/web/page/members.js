// The members of an array, with a rebuild, resync or check that is under way; and the counters of a cache.

import { ask } from "./api.js";
import { h, put } from "./dom.js";
import { bytes, plural, share, span, whole } from "./format.js";

const SHAPES = { "active sync": "●", "spare rebuilding": "◐", spare: "○", faulty: "✕", removed: "–" };
const WORDS = { resync: "Resync", recover: "Rebuild", check: "Check", repair: "Repair" };

export class Members {
  constructor(name) {
    this.name = name;
    this.body = h("div");
    this.element = h("section.panel.members", { "aria-labelledby": "members-title" }, h("h2", { id: "members-title" }, "Members"), this.body);
    this.element.hidden = true;
  }

  async refresh() {
    this.element.hidden = false;
    try {
      this.draw(await ask("disk.ask", { name: this.name, question: { raid: "detail" } }));
    } catch (error) {
      put(this.body, h("p.quiet", {}, `Not known: ${error.message}`));
    }
  }

  draw(detail) {
    const parts = [this.summary(detail)];
    const sync = detail.serving?.sync;
    if (sync) parts.push(progress(sync));
    if (detail.serving?.trouble) parts.push(h("p.warn", {}, `The last rebuild didn't end: ${detail.serving.trouble}`));
    const rows = detail.members.map((member) =>
      h(
        "tr",
        {},
        h("td.number", {}, member.place ?? "–"),
        h("th.wrap", { scope: "row" }, member.name ?? "none"),
        h("td", {}, h("span.member", { "data-state": member.state }, h("span.shape", { "aria-hidden": "true" }, SHAPES[member.state] ?? "○"), ` ${member.state}`)),
        h("td.number", {}, member.corrected_reads ? whole(member.corrected_reads) : "0"),
      ),
    );
    parts.push(
      h(
        "div.scroll",
        { tabindex: "0", role: "region", "aria-label": "table of the members" },
        h("table.plain", {}, h("thead", {}, h("tr", {}, [["place", 1], ["device"], ["state"], ["corrected", 1]].map(([text, number]) => h(number ? "th.number" : "th", { scope: "col" }, text)))), h("tbody", {}, rows)),
      ),
    );
    for (const away of detail.serving?.away ?? []) parts.push(h("p.quiet", {}, `Place ${away.place}, ${away.name}, doesn't answer, and is taken back when it does.`));
    for (const note of detail.notes ?? []) parts.push(h("p.quiet", {}, note));
    // An unchanged panel isn't made anew, so that a reader of the screen isn't disturbed.
    const text = JSON.stringify(detail);
    if (text === this.text) return;
    this.text = text;
    put(this.body, parts);
  }

  summary(detail) {
    const state = detail.serving?.failed ? "failed" : detail.degraded ? "degraded" : "whole";
    const words = [`RAID-${detail.level}, ${plural(detail.raid_devices, "device", "devices")}, chunks of ${bytes(detail.chunk_bytes)}, ${detail.consistency_policy}.`];
    if (state === "failed") words.push("It has failed: two members are lost.");
    else if (state === "degraded") words.push(`It has no redundancy: place ${detail.missing ?? "?"} has no whole member.`);
    else words.push(detail.clean ? "Whole and clean." : "Whole.");
    if (detail.serving?.mismatch_sectors) words.push(`The last check found ${plural(detail.serving.mismatch_sectors, "sector", "sectors")} with wrong parity.`);
    return h(state === "whole" ? "p" : "p.warn", {}, words.join(" "));
  }
}

function progress(sync) {
  const done = sync.of_bytes ? sync.done_bytes / sync.of_bytes : 0;
  const left = sync.seconds_left === null || sync.seconds_left === undefined ? "time left not known" : `${span(sync.seconds_left)} left`;
  const name = WORDS[sync.action] ?? sync.action;
  return h(
    "div.sync",
    {},
    h("progress", { max: "1", value: String(done), "aria-label": `${name}, done` }),
    h("p", {}, h("strong", {}, `${name} ${share(sync.done_bytes, sync.of_bytes)}`), `, ${left}, ${bytes(sync.speed_kib * 1024)}/s, ${bytes(sync.done_bytes)} of ${bytes(sync.of_bytes)}`),
  );
}

const PAGE = 4096;

// The facts of a cache, from its counters now and when they were read before.
function factsOf(now, before) {
  const used = (now.nr_active_file ?? 0) + (now.nr_inactive_file ?? 0);
  const free = (now.nr_free_pages ?? 0) + (now.nr_listed_pages ?? 0);
  const facts = [];
  if (before) {
    const [hits, misses] = [now.hits - before.hits, now.misses - before.misses];
    facts.push(["hits lately", hits + misses > 0 ? `${share(hits, hits + misses)} of reads` : "no reads"]);
  }
  facts.push(["hits ever", now.hits + now.misses > 0 ? `${share(now.hits, now.hits + now.misses)} of reads` : "no reads"]);
  facts.push(["in use", `${bytes(used * PAGE)} of ${bytes((used + free) * PAGE)}`]);
  facts.push(["dirty", bytes((now.nr_dirty ?? 0) * PAGE)]);
  if (now.nr_writeback) facts.push(["being written", bytes(now.nr_writeback * PAGE)]);
  return facts;
}

export class CacheFigures {
  constructor(name) {
    this.name = name;
    this.list = h("dl.facts");
    this.element = h("section.panel", { "aria-labelledby": "cache-title" }, h("h2", { id: "cache-title" }, "Cache"), this.list);
    this.element.hidden = true;
  }

  async refresh() {
    let counters;
    try {
      counters = await ask("disk.ask", { name: this.name, question: { cache: "counters" } });
    } catch {
      return;
    }
    put(this.list, factsOf(counters, this.before).map(([words, value]) => [h("dt", {}, words), h("dd", {}, value)]).flat());
    this.before = counters;
    this.element.hidden = false;
  }
}
