// Line and area charts by uPlot, in the page's colours, with keys and a size that follows the page.

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4], [14, 4], [1, 5], [6, 2, 1, 2]];
page.dash = (number) => DASHES[number % DASHES.length];

const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);

const axisStyle = () => ({
  stroke: page.colour("quiet"),
  grid: { stroke: page.colour("grid"), width: 1 },
  ticks: { stroke: page.colour("line"), width: 1, size: 4 },
  font: "11px system-ui, 'DejaVu Sans', sans-serif",
});

// Draw a chart into `host`, and again when the theme, the width or (by `redraw` of the result) its data changes.
// `make(width)` returns {options, data, size}: uPlot's, and the height if it is not `height`. `summary`: for readers of
// the screen.
page.draw = (host, title, summary, make, height = 220) => {
  host.replaceChildren();
  if (title) host.append(page.element("h3", title));
  const box = page.element("div", null, "host");
  box.tabIndex = 0;
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", summary);
  host.append(box);
  let plot = null;
  const render = () => {
    const width = Math.max(240, Math.floor(box.clientWidth || host.clientWidth));
    const { options, data, size } = make(width);
    plot?.destroy();
    plot = new uPlot({ width, height: size ?? height, ...withLastValues(options) }, data, box);
    if (options.legend?.live) plot.setLegend({ idx: data[0].length - 1 });
  };
  render();
  page.onTheme(render);
  let width = host.clientWidth;
  new ResizeObserver(() => {
    if (host.clientWidth !== width && host.clientWidth) { width = host.clientWidth; render(); }
  }).observe(host);
  box.addEventListener("keydown", (event) => chartKey(event, plot));
  return { redraw: render, get plot() { return plot; }, box };
};

// Return uPlot's options with a live legend that shows the last point's values while the pointer is not over the chart.
const withLastValues = (options) => {
  if (!options.legend?.live) return options;
  const back = (plot) => { if (plot.cursor.left < 0) plot.setLegend({ idx: plot.data[0].length - 1 }); };
  return { ...options, hooks: { ...options.hooks, setCursor: [...(options.hooks?.setCursor ?? []), back] } };
};

// Handle a key on a chart: arrows move the cursor, + and - zoom around it, Escape or 0 shows everything.
const chartKey = (event, plot) => {
  if (!plot || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const xs = plot.data[0];
  const { min, max } = plot.scales.x;
  const at = plot.cursor.idx ?? Math.floor(xs.length / 2);
  const move = (index) => {
    const to = Math.max(0, Math.min(xs.length - 1, index));
    plot.setCursor({ left: plot.valToPos(xs[to], "x"), top: plot.over.clientHeight / 2 });
  };
  const zoom = (factor) => {
    const centre = xs[at] ?? (min + max) / 2, half = ((max - min) * factor) / 2;
    const low = Math.max(xs[0], centre - half), high = Math.min(xs[xs.length - 1], centre + half);
    if (high > low) plot.setScale("x", { min: low, max: high });
  };
  const act = {
    ArrowLeft: () => move(at - 1), ArrowRight: () => move(at + 1), Home: () => move(0), End: () => move(xs.length - 1),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
    Escape: () => plot.setScale("x", { min: xs[0], max: xs[xs.length - 1] }),
    0: () => plot.setScale("x", { min: xs[0], max: xs[xs.length - 1] }),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
};

// Draw lines over `x`. `lines`: {name, colour, values, format, dash, scale}; `band`: {low, high, colour}; `zero`: the axis
// includes 0; `doubling`: the axis is logarithmic, in powers of two. Return the chart, null if there are no values.
page.lines = (host, title, x, lines, { band = null, xName = "step", height = 220, zero = false, doubling = false } = {}) => {
  const known = lines.filter((line) => line.values?.some((value) => value !== null));
  if (!x.length || !known.length) { showEmptyChart(host, title); return null; }
  const summary = `${title}: ${known.map((line) => `${line.name} ${rangeText(line)}`).join("; ")}`;
  return page.draw(host, title, summary, () => {
    const series = [{ label: xName, value: (_, value) => (value === null ? "–" : page.digits(value, 7)) }];
    const data = [x];
    const bands = [];
    if (band) {
      const shade = page.colour(band.colour);
      data.push(band.high, band.low);
      for (const label of ["highest rank", "lowest rank"]) {
        series.push({ label, stroke: shade, width: 0.75, alpha: 0.5, dash: [1, 2], points: { show: false }, value: (_, v) => known[0].format(v) });
      }
      bands.push({ series: [1, 2], fill: `${shade}2b` });
    }
    known.forEach((line, number) => {
      data.push(line.values);
      series.push({
        label: line.name, stroke: page.colour(line.colour), width: 1.75, dash: line.dash ?? page.dash(number),
        scale: line.scale ?? "y", spanGaps: false, points: { show: x.length < 40, size: 5 },
        value: (_, value) => line.format(value),
      });
    });
    const axes = [{ ...axisStyle(), values: (_, ticks) => ticks.map((tick) => page.digits(tick, 6)), size: 28 }];
    [...new Set(known.map((line) => line.scale ?? "y"))].forEach((scale, number) => {
      const line = known.find((one) => (one.scale ?? "y") === scale);
      axes.push({
        ...axisStyle(), scale, side: number ? 1 : 3, size: 64, grid: number ? { show: false } : axisStyle().grid,
        values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : line.format(tick))),
      });
    });
    const range = zero ? (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.05 : 1] : undefined;
    return {
      data,
      options: { series, bands, axes, scales: { x: { time: false }, ...(range ? { y: { range } } : doubling ? { y: { distr: 3, log: 2 } } : {}) }, legend: { live: true }, cursor: { drag: { x: true, y: false } } },
    };
  }, height);
};

// Draw stacked areas over `x`, the first layer at the bottom. `layers`: {name, colour, values}; `level`: {name, value}, a
// horizontal line. Return the chart, null if there are no values.
page.stack = (host, title, x, layers, format, { xName = "step", xFormat = (v) => page.digits(v, 7), level = null, height = 240, stepped = false } = {}) => {
  const known = layers.filter((layer) => layer.values.some((value) => value > 0));
  if (!x.length || !known.length) { showEmptyChart(host, title); return null; }
  const sums = x.map(() => 0);
  const tops = known.map((layer) => layer.values.map((value, at) => (sums[at] += value ?? 0)));
  const summary = `${title}, stacked: ${known.map((layer) => `${layer.name} ${rangeText({ ...layer, format })}`).join("; ")}`;
  return page.draw(host, title, summary, () => {
    const paths = stepped ? uPlot.paths.stepped({ align: 1 }) : undefined;
    const series = [{ label: xName, value: (_, value) => (value === null ? "–" : xFormat(value)) }];
    const data = [x];
    for (let at = known.length - 1; at >= 0; at -= 1) {
      const colour = page.colour(known[at].colour);
      data.push(tops[at]);
      series.push({
        label: known[at].name, stroke: colour, fill: `${colour}73`, width: 1.5, dash: page.dash(at), paths, points: { show: x.length < 3 },
        value: (_, __, ___, index) => (index === null || index === undefined ? "–" : format(known[at].values[index])),
      });
    }
    const bands = known.slice(1).map((_, at) => ({ series: [at + 1, at + 2] }));
    if (level) {
      data.push(x.map(() => level.value));
      series.push({ label: level.name, stroke: page.colour("ink"), width: 2, dash: [6, 4], points: { show: false }, value: () => format(level.value) });
    }
    return {
      data,
      options: {
        series, bands, legend: { live: true }, cursor: { drag: { x: true, y: false } },
        scales: { x: { time: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.06 : 1] } },
        axes: [
          { ...axisStyle(), size: 28, values: (_, ticks) => ticks.map((tick) => xFormat(tick)) },
          { ...axisStyle(), size: 64, values: (_, ticks) => ticks.map((tick) => format(tick)), ...(format === page.bytes ? { incrs: BYTE_STEPS } : {}) },
        ],
      },
    };
  }, height);
};

page.axisStyle = axisStyle;

// Show a title and a note in place of a chart without values.
const showEmptyChart = (host, title) => {
  host.replaceChildren(page.element("h3", title), page.element("p", "Nothing was recorded for this.", "nothing"));
};

// Return the first and the last known value of a line as text.
const rangeText = ({ values, format }) => {
  const known = values.filter((value) => value !== null);
  return known.length ? `from ${format(known[0])} to ${format(known[known.length - 1])}` : "unknown";
};
