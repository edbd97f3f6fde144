// Two runs side by side.

page.showComparison = (data) => {
  const other = data.other;
  if (!other) return;
  page.at("compare").hidden = false;
  page.at("compare-sentence").textContent = `The other run, ${other.path}: ${other.sentence}`;
  overlay("compare-loss", "Loss", data.curves, other.curves, "loss", (value) => page.digits(value));
  overlay("compare-seconds", "Seconds per step", data.curves, other.curves, "seconds", page.seconds);
  page.table(page.at("compare-configuration"), [
    { name: "key", code: true, show: (row) => row[0] },
    { name: "this run", code: true, show: (row) => (row[1] === null ? "–" : JSON.stringify(row[1])) },
    { name: "other run", code: true, show: (row) => (row[2] === null ? "–" : JSON.stringify(row[2])) },
  ], other.configuration, "Nothing.");
  page.table(page.at("compare-figures"), [
    { name: "figure", show: (row) => row.name },
    { name: "this run", number: true, show: (row) => figure(row.here, row.unit) },
    { name: "other run", number: true, show: (row) => figure(row.there, row.unit) },
    { name: "this / other", number: true, show: (row) => (row.here !== null && row.there ? page.digits(row.here / row.there) : "–") },
  ], other.figures, "Nothing.");
};

const figure = (value, unit) => {
  if (value === null) return "–";
  if (unit === "B") return page.bytes(value);
  if (unit === "s") return page.seconds(value);
  return unit === "%" ? page.percent(value) : page.digits(value, 4);
};

// Draw one curve of both runs over a common axis, which has the points of both.
const overlay = (id, title, here, there, name, format) => {
  const joined = uPlot.join([[here.step, here[name] ?? []], [there.step, there[name] ?? []]].filter(([x]) => x.length));
  const filled = joined.slice(1).map((column) => column.map((value) => value ?? null));
  page.lines(page.at(id), title, joined[0], [
    { name: "this run", colour: "backward", values: interpolated(filled[0] ?? []), format },
    { name: "other run", colour: "reduce", values: interpolated(filled[1] ?? []), format },
  ]);
};

// Return a curve's values with linear interpolation at the points that only the other curve has.
const interpolated = (values) => {
  const out = [...values];
  let last = -1;
  for (let at = 0; at < out.length; at += 1) {
    if (values[at] === null) continue;
    if (last >= 0) for (let gap = last + 1; gap < at; gap += 1) out[gap] = values[last] + ((values[at] - values[last]) * (gap - last)) / (at - last);
    last = at;
  }
  return out;
};
