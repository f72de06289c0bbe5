// Formats numbers and times for people.

export const FINAL = ["succeeded", "failed", "cancelled"];
const DASH = "–";

/** A measured value, with few digits. */
export function measured(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.001 || size >= 1e6) return value.toExponential(1).replace("e+", "e").replaceAll("-", "−");
  const digits = size < 100 ? {maximumSignificantDigits: 3} : {maximumFractionDigits: 0};
  return value.toLocaleString("en", digits).replace("-", "−");
}

/** A whole number. */
export function count(value) {
  return value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en");
}

/** A job's message, such as why it failed, and warnings from the metrics of a running job. */
export function notes(job) {
  const warnings = job.state === "running" ? job.progress?.warnings || [] : [];
  return [job.message, ...warnings].filter(Boolean).join(" · ");
}

/** A duration. */
export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  const steps = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
  for (const [size, name, below, small] of steps) {
    if (seconds >= size) {
      const rest = Math.floor((seconds % size) / below);
      return `${Math.floor(seconds / size)} ${name}` + (rest && size !== 60 ? ` ${rest} ${small}` : "");
    }
  }
  return `${Math.max(0, Math.round(seconds))} s`;
}

/** Time since a Unix time. */
export const age = time => span(Date.now() / 1000 - time);

/** A Unix time in local time. */
export function clock(time) {
  const when = new Date(time * 1000), today = new Date().toDateString() === when.toDateString();
  const hours = when.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", second: "2-digit"});
  return today ? hours : `${when.toLocaleDateString([], {month: "short", day: "numeric"})} ${hours}`;
}

/** A size in bytes. */
export function bytes(value) {
  if (value < 1000) return `${value} B`;
  return value < 1e6 ? `${(value / 1e3).toFixed(0)} kB` : `${(value / 1e6).toFixed(1)} MB`;
}
