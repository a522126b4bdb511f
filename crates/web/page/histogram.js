// Latencies as the server counts them: pairs [bound, count] in the order of the bounds, eight buckets for each doubling.
// `bound` is the time that the bucket's requests stayed below.

// Times below are in one bucket, and times from LONGEST on in another.
const SHORTEST = 128;
const LONGEST = 2 ** 37;

// Time at which the bucket begins that ends at `bound`.
export function lower(bound) {
  if (bound <= SHORTEST) return 0;
  return bound - 2 ** (Math.floor(Math.log2(bound - 1)) - 3);
}

// What was added since; null if the counters went back, because the server was started anew.
export function since(now, before) {
  const old = new Map(before);
  const added = [];
  for (const [bound, count] of now) {
    const more = count - (old.get(bound) ?? 0);
    if (more < 0) return null;
    if (more > 0) added.push([bound, more]);
    old.delete(bound);
  }
  return old.size ? null : added;
}

// The last bucket ends nowhere; it is drawn as a doubling.
export function ended(list) {
  return list.map(([bound, count]) => [Math.min(bound, 2 * LONGEST), count]);
}

// Pairs whose times are where buckets begin, as `hops` has them.
export function ofBegins(list) {
  return list.map(([begin, count]) => [begin < SHORTEST ? SHORTEST : begin >= LONGEST ? 2 * LONGEST : begin + 2 ** (Math.floor(Math.log2(begin)) - 3), count]);
}

export function sum(lists) {
  const counts = new Map();
  for (const list of lists) {
    for (const [bound, count] of list) counts.set(bound, (counts.get(bound) ?? 0) + count);
  }
  return [...counts].sort((a, b) => a[0] - b[0]);
}

export function total(list) {
  return list.reduce((before, [, count]) => before + count, 0);
}

// Time that `share` (0 to 1) of the requests stayed below; null without requests.
export function percentile(list, share) {
  const all = total(list);
  if (!all) return null;
  let left = Math.max(all * share, 1e-9);
  for (const [bound, count] of list) {
    if (left <= count) {
      const from = lower(bound);
      return from + ((bound - from) * left) / count;
    }
    left -= count;
  }
  return list[list.length - 1][0];
}

export function longest(list) {
  return list.length ? list[list.length - 1][0] : null;
}

// Requests between two times; a bucket that is cut counts by the part that is inside.
export function between(list, from, to) {
  let inside = 0;
  for (const [bound, count] of list) {
    const low = lower(bound);
    const part = Math.min(bound, to) - Math.max(low, from);
    if (part > 0) inside += (count * part) / (bound - low);
  }
  return inside;
}
