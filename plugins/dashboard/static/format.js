// ---- numbers and small helpers -----------------------------------------------------------------------------------------------------

const by = (id) => document.getElementById(id);

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function seconds(value) {
  if (value === undefined || value === null) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${(value / 60).toFixed(0)} min`;
}

function count(value) {
  if (value === undefined || value === null) return "–";
  if (value < 10 && !Number.isInteger(value)) return value.toFixed(1);
  return Math.round(value).toLocaleString("en");
}

function percent(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0)} %` : "–";
}

// "cmpl-0123456789ab-0" -> "cmpl-…89ab-0": ids begin alike and differ at the end
function shortId(id) {
  return id.length <= 16 ? id : `${id.slice(0, id.indexOf("-") + 1)}…${id.slice(-8)}`;
}

function element(kind, text = "", name = "") {
  const made = document.createElement(kind);
  if (text) made.textContent = text;
  if (name) made.className = name;
  return made;
}
