// Numbers, times and names as short text.

/** A number with at most `digits` significant digits, and thousands apart. */
function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(digits - 1).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  if (size >= 1000 || Number.isInteger(value)) return value.toLocaleString("en-US", { maximumFractionDigits: 0 }).replace("-", "−");
  return value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size)))).replace("-", "−");
}

function signed(value, digits = 3) {
  return value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)} %`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 1) return `${number(1000 * value, value < 0.01 ? 2 : 3).split(".")[0]} ms`;
  if (value < 60) return `${number(value)} s`;
  const [days, hours, minutes] = [Math.floor(value / 86400), Math.floor(value / 3600) % 24, Math.floor(value / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${minutes} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const unit = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return `${number(value / 1000 ** unit)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

function moment(time) {
  return time ? new Date(1000 * time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : "–";
}

/** A metric's key without what its node already says. */
function short(key) {
  return key.replace(/^(actor|critic|rollout|reward)\/(?!mean$)/, "").replace(/\/mean$/, "");
}

/** Text on one line, for a cell. */
function line(text, length = 400) {
  return String(text ?? "").slice(0, length).replace(/\s+/g, " ");
}

export { bytes, line, moment, number, percent, seconds, short, signed };
