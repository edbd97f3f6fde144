// Ranks side by side: seconds per step by activity, and how long others wait for each.

const RANK_LAYERS = [["compute", "backward"], ["wait", "gather"], ["tier", "tier"], ["data", "data"], ["save", "save"]];
const RANK_NAMES = { compute: "computes", wait: "waits for ranks", tier: "waits for tiers", data: "waits for data", save: "saves" };
const LISTED = 12;

page.showRanks = (data) => {
  const rows = data.rank_rows;
  const layers = RANK_LAYERS.map(([name, colour]) => ({ name: RANK_NAMES[name], colour, values: rows[name] }));
  const host = page.at("ranks-chart");
  if (rows.rank.length > 1) page.bars(host, "Seconds per step by rank", rows.rank, layers, page.seconds);
  else host.remove();
  const order = rows.rank.map((_, at) => at).sort((a, b) => rows.blamed[b] - rows.blamed[a] || rows.rank[a] - rows.rank[b]);
  const listed = order.slice(0, LISTED);
  page.table(page.at("ranks-table"), [
    { name: "rank", number: true, show: (at) => String(rows.rank[at]) },
    { name: "host", show: (at) => rows.host[at] },
    { name: "others wait for it", number: true, show: (at) => page.percent(rows.blamed[at]) },
    ...RANK_LAYERS.map(([name]) => ({ name: RANK_NAMES[name], number: true, show: (at) => page.seconds(rows[name][at]) })),
    { name: "memory, peak", number: true, show: (at) => page.bytes(rows.memory[at]) },
    { name: "record", show: (at) => (rows.closed[at] ? "closed" : "open") },
  ], listed, "No rank wrote a record.");
  if (order.length > LISTED) page.at("ranks-table").append(page.element("p", `The ${LISTED} ranks that the others wait for most, of ${order.length}.`, "quiet"));
};

// Draw stacked bars, one per rank. `layers`: {name, colour, values}, the first at the bottom.
page.bars = (host, title, ranks, layers, format) => {
  const known = layers.filter((layer) => layer.values.some((value) => value > 0));
  const sums = ranks.map(() => 0);
  const tops = known.map((layer) => layer.values.map((value, at) => (sums[at] += value ?? 0)));
  if (!known.length) return;
  const summary = `${title}: ${ranks.length} ranks, from ${format(Math.min(...sums))} to ${format(Math.max(...sums))}`;
  page.draw(host, title, summary, () => {
    const bars = uPlot.paths.bars({ size: [ranks.length > 60 ? 1 : 0.7, 90], align: 0 });
    const data = [ranks], series = [{ label: "rank", value: (_, value) => (value === null ? "–" : String(value)) }];
    for (let at = known.length - 1; at >= 0; at -= 1) {
      const colour = page.colour(known[at].colour);
      data.push(tops[at]);
      series.push({
        label: known[at].name, stroke: page.colour("ground"), width: ranks.length > 60 ? 0 : 1, fill: colour, paths: bars, points: { show: false },
        value: (_, __, ___, index) => (index === null || index === undefined ? "–" : format(known[at].values[index])),
      });
    }
    return {
      data,
      options: {
        series, legend: { live: true, markers: { stroke: (_, number) => series[number].fill } }, cursor: { drag: { x: true, y: false } },
        scales: { x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] }, y: { range: (_, low, high) => [0, high * 1.06 || 1] } },
        axes: [
          { ...page.axisStyle(), size: 28, grid: { show: false }, incrs: [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096], values: (_, ticks) => ticks.map(String) },
          { ...page.axisStyle(), size: 64, values: (_, ticks) => ticks.map((tick) => format(tick)) },
        ],
      },
    };
  }, 200);
};
