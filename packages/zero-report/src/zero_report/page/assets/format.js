// Numbers as text, and elements with text. Nothing here sets HTML: names from the run are always text.

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

// Return a number with `digits` significant digits; a dash for none. So do the functions below, with units.
page.digits = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(digits - 1);
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(12, decimals), maximumSignificantDigits: undefined });
};

// With a decimal prefix: 1.2 MB.
page.scaled = (value, unit = "") => {
  if (value === null || value === undefined) return "–";
  for (const [factor, prefix] of UNITS) {
    if (Math.abs(value) >= factor) return `${page.digits(value / factor)} ${prefix}${unit}`;
  }
  return `${page.digits(value)}${unit ? ` ${unit}` : ""}`;
};

// Bytes with a binary prefix: 1.2 MiB.
page.bytes = (value) => {
  if (value === null || value === undefined) return "–";
  const steps = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let number = value, at = 0;
  while (Math.abs(number) >= 1024 && at < steps.length - 1) { number /= 1024; at += 1; }
  return `${page.digits(number)} ${steps[at]}`;
};

// Seconds in a suitable unit: 12.3 ms, 4 min.
page.seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size < 1e-3) return `${page.digits(value * 1e6)} µs`;
  if (size < 1) return `${page.digits(value * 1e3)} ms`;
  if (size < 120) return `${page.digits(value)} s`;
  if (size < 7200) return `${page.digits(value / 60)} min`;
  return `${page.digits(value / 3600)} h`;
};

page.percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`);

page.time = (unix) => new Date(unix * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";

// Return a new element with a text, if it is not null, and a class.
page.element = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = String(text);
  if (className) made.className = className;
  return made;
};

page.at = (id) => document.getElementById(id);

// Fill `host` with a table, or with the text `empty` if there are no rows. `columns`: {name, number, code, wide, show};
// `show(row)` returns text or an element.
page.table = (host, columns, rows, empty) => {
  host.replaceChildren();
  if (!rows.length) {
    host.append(page.element("p", empty, "empty"));
    return;
  }
  const table = page.element("table");
  const head = table.createTHead().insertRow();
  for (const column of columns) {
    const cell = page.element("th", column.name, column.number ? "number" : "");
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const column of columns) {
      const cell = line.insertCell();
      cell.className = column.number ? "number" : column.code ? "code" : column.wide ? "wide" : "name";
      cell.append(column.show(row) ?? "");
    }
  }
  host.append(table);
};
