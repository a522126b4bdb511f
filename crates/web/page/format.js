// Numbers for people: three digits, binary units for memory and sizes, decimal ones for rates of requests and times.

function three(value) {
  if (value >= 100) return value.toFixed(0);
  if (value >= 10) return value.toFixed(1).replace(/\.0$/, "");
  return value.toFixed(2).replace(/\.?0+$/, "");
}

function scaled(value, step, units) {
  let at = 0;
  // 999.5 is shown as the next unit's 1, not as 1000.
  while (value >= step - 0.5 && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  return [three(value), units[at]];
}

export function count(value) {
  return scaled(value, 1000, ["", " k", " M", " G"]).join("");
}

// Figures without a fraction, with thin spaces between groups.
export function whole(value) {
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function bytes(value) {
  return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]).join(" ");
}

export function time(ns) {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  if (ns === 0) return "0";
  return scaled(ns, 1000, ["ns", "µs", "ms", "s"]).join(" ");
}

export function share(part, of) {
  if (!of) return "–";
  const percent = (100 * part) / of;
  return percent > 0 && percent < 0.1 ? "< 0.1 %" : `${percent.toFixed(percent < 9.95 ? 1 : 0)} %`;
}

// A length of time that a person waits: 1 h 20 min.
export function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.round(hours / 24)} days`;
}

export function clock(ms) {
  const date = new Date(ms);
  const two = (value) => String(value).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function plural(number, one, many) {
  return `${whole(number)} ${number === 1 ? one : many}`;
}
