// Curves over all steps: loss, throughput, seconds by phase and wait.

const perSecond = (counts, seconds) => counts.map((count, at) => (count && seconds[at] ? count / seconds[at] : null));

page.showCurves = (data) => {
  const c = data.curves;
  const x = c.step;
  if (!x.length) {
    for (const [id, title] of [["loss", "Loss"], ["throughput", "Throughput"], ["norm", "Gradient norm"], ["rate", "Learning rate"], ["phases", "Seconds per step"]]) {
      page.lines(page.at(id), title, [], []);
    }
    return;
  }
  const number = (value) => page.digits(value);
  const differ = data.ranks > 1 && c.loss_low.some((low, at) => low !== c.loss_high[at]);
  page.lines(page.at("loss"), differ ? "Loss, mean over ranks" : "Loss", x, [
    { name: "loss", colour: "backward", values: c.loss, format: number },
  ], { band: differ ? { low: c.loss_low, high: c.loss_high, colour: "backward" } : null });
  const tokens = perSecond(c.tokens, c.seconds), samples = perSecond(c.samples, c.seconds);
  const [what, values] = tokens.some((value) => value !== null) ? ["tokens per second", tokens] : ["samples per second", samples];
  page.lines(page.at("throughput"), "Throughput", x, [
    { name: what, colour: "tier", values, format: (value) => page.scaled(value) },
  ], { zero: true });
  const small = { height: 130 };
  page.lines(page.at("norm"), "Gradient norm", x, [{ name: "norm", colour: "backward", values: c.grad_norm, format: number }], small);
  page.lines(page.at("rate"), "Learning rate", x, [{ name: "rate", colour: "publish", values: c.lr, format: number }], small);
  chartIfWorth("scale", "Loss scale", x, { name: "loss scale", colour: "gather", values: c.loss_scale, format: page.scaled }, (value) => value !== 1, { ...small, doubling: true });
  chartIfWorth("skipped", "Skipped steps, share of the steps", x, { name: "skipped", colour: "reduce", values: c.skipped, format: page.percent }, (value) => value > 0, { ...small, zero: true });
  page.stack(page.at("phases"), "Seconds per step, mean over ranks", x, timeLayers(c), page.seconds);
};

// Draw a chart that most runs do not need, if any value is `worth` it; else remove its place.
const chartIfWorth = (id, title, x, line, worth, options) => {
  if (line.values?.some((value) => value !== null && worth(value))) page.lines(page.at(id), title, x, [line], options);
  else page.at(id).remove();
};

// Return the layers of the seconds per step. Waits are parts of the passes; the rest of a pass is computing.
const timeLayers = (c) => {
  const at = (name, index) => c[name][index] ?? 0;
  const waits = ["gather_wait_s", "reduce_wait_s", "control_wait_s", "tier_wait_s"];
  const passes = ["forward_s", "backward_s", "update_s"];
  const sum = (names, index) => names.reduce((total, name) => total + at(name, index), 0);
  const known = c.seconds.map((seconds) => seconds !== null);
  const column = (value) => c.seconds.map((_, index) => (known[index] ? Math.max(0, value(index)) : null));
  const shares = (name) => column((index) => {
    const busy = sum(passes, index);
    const computing = Math.max(0, busy - sum(waits, index));
    return busy ? (at(name, index) / busy) * computing : 0;
  });
  return [
    { name: "forward", colour: "forward", values: shares("forward_s") },
    { name: "backward", colour: "backward", values: shares("backward_s") },
    { name: "update", colour: "update", values: shares("update_s") },
    { name: "waits: gather", colour: "gather", values: column((i) => at("gather_wait_s", i)) },
    { name: "waits: reduce", colour: "reduce", values: column((i) => at("reduce_wait_s", i)) },
    { name: "waits: control", colour: "control", values: column((i) => at("control_wait_s", i)) },
    { name: "waits: tiers", colour: "tier", values: column((i) => at("tier_wait_s", i)) },
    { name: "data", colour: "data", values: column((i) => at("data_s", i)) },
    { name: "checkpoints", colour: "save", values: column((i) => at("save_s", i)) },
    { name: "other", colour: "other", values: column((i) => at("seconds", i) - Math.max(sum(passes, i), sum(waits, i)) - at("data_s", i) - at("save_s", i)) },
  ];
};
