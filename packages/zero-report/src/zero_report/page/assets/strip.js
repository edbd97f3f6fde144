// The strip: one step of all ranks, with lanes for passes, units, collectives and tiers. Times that were only waited are
// hatched.

const KINDS = ["data", "forward", "backward", "update", "gather", "reduce", "publish", "broadcast", "control", "checkpoint", "read", "write", "unit", "save", "exchange"];
const COLOURS = ["data", "forward", "backward", "update", "gather", "reduce", "publish", "publish", "control", "save", "tier", "tier", "compute", "save", "publish"];
const LANES = [0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 3, 3, 1, 0, 2];
const COMPUTE = 12;

const LANE_NAMES = ["passes", "units", "messages", "tiers"];
const PHASE_KINDS = { forward: 1, backward: 2, update: 3 };

const ms = (us) => page.digits(us / 1e3, 5);

page.describeSpan = (span) => {
  const what = span.kind === COMPUTE ? `${span.name} in ${span.phase}` : `${KINDS[span.kind]}${span.name && span.name !== KINDS[span.kind] ? ` of ${span.name}` : ""}`;
  const parts = [`rank ${span.rank}: ${what}`, `${ms(span.begin)} to ${ms(span.end)} ms`, `${page.seconds(span.duration / 1e6)}`];
  if (span.running) parts.push("not over");
  if (span.waited) parts.push(`waited ${page.seconds(span.waited / 1e6)}`);
  if (span.bytes) parts.push(page.bytes(span.bytes));
  return parts.join(" · ");
};

// Show the strip with its controls. `onStep(step, chosen)` is called when another step or set of ranks is chosen; `chosen`
// is null for all ranks.
page.showStrip = (data, onStep) => {
  const steps = data.steps.steps;
  const slider = page.at("step-slider"), filter = page.at("rank-filter"), readout = page.at("strip-readout");
  if (!steps.length) {
    page.at("step").querySelector(".controls").hidden = true;
    page.at("strip").append(page.element("p", "No step was recorded span by span.", "nothing"));
    return;
  }
  slider.max = String(steps.length - 1);
  const state = { at: steps.length > 1 && !data.verdict.ended ? steps.length - 2 : steps.length - 1, chosen: null, spans: [], ranks: [], lanes: [0], mark: null };
  const wanted = Number(/(?:^|[#&])step=(\d+)/.exec(location.hash)?.[1]);
  if (steps.some((step) => step.step === wanted)) state.at = steps.findIndex((step) => step.step === wanted);
  let chart = null;

  const load = () => {
    const step = steps[state.at];
    const ranks = step.ranks.filter((rank) => !state.chosen || state.chosen.has(rank.rank));
    state.ranks = ranks;
    state.spans = ranks.map((rank) => page.spansOf(rank, data.steps.names));
    const used = new Set(state.spans.flatMap((spans) => spans.map((span) => LANES[span.kind])));
    state.lanes = [0, 1, 2, 3].filter((lane) => lane === 0 || used.has(lane));
    state.mark = null;
    slider.value = String(state.at);
    slider.setAttribute("aria-valuetext", `step ${step.step}`);
    page.at("step-number").textContent = step.step;
    const hidden = step.ranks.reduce((total, rank) => total + rank.left_out, 0);
    const notes = [`${page.seconds(step.us / 1e6)}, began ${page.time(step.began)}`, `${ranks.length} of ${data.steps.of} ranks shown`];
    if (data.steps.ranks.length < data.steps.of) notes.push(`${data.steps.ranks.length} ranks are in this page: those that lose most and those that others wait for`);
    if (hidden) notes.push(`${hidden.toLocaleString("en")} short spans left out`);
    if (step.ranks.some((rank) => rank.open)) notes.push("this step was not over");
    const behind = step.ranks.filter((rank) => rank.step !== step.step);
    for (const rank of behind.slice(0, 4)) notes.push(`rank ${rank.rank} was in step ${rank.step}`);
    if (behind.length > 4) notes.push(`${behind.length - 4} more ranks were in other steps`);
    page.at("strip-note").textContent = notes.join(" · ");
    readout.textContent = ranks.length ? "Point at a span, or use the arrow keys." : "No rank of this page is in the list.";
  };

  const redraw = () => { load(); chart.redraw(); onStep(steps[state.at], state.chosen); };

  load();
  chart = page.draw(page.at("strip"), "", "Spans of one step by rank; arrow keys go from span to span", (width) => stripChart(width, state, steps, (span) => {
    readout.textContent = span ? page.describeSpan(span) : "";
  }));
  onStep(steps[state.at], state.chosen);
  slider.addEventListener("input", () => {
    state.at = Number(slider.value);
    // The frame of a notebook has no address that could say the step.
    if (location.protocol !== "about:") history.replaceState(null, "", `#step=${steps[state.at].step}`);
    redraw();
  });
  filter.addEventListener("input", () => {
    try {
      state.chosen = page.parseRanks(filter.value);
      filter.setAttribute("aria-invalid", "false");
      redraw();
    } catch (error) {
      filter.setAttribute("aria-invalid", "true");
      readout.textContent = error.message;
    }
  });
  page.at("strip-reset").addEventListener("click", () => { state.mark = null; chart.redraw(); });
  chart.box.addEventListener("keydown", (event) => spanKey(event, state, chart, readout), { capture: true });
  const legend = () => showLegend(state, steps);
  legend();
  page.onTheme(legend);
};

// Pixels; at most about 900 for all lanes of all ranks.
const laneHeight = (state) => Math.max(5, Math.min(14, Math.floor(900 / Math.max(1, state.ranks.length * state.lanes.length))));

// Return uPlot's options and data for the strip, and its height. `tell(span)`: called with the span under the pointer.
const stripChart = (width, state, steps, tell) => {
  const count = Math.max(1, state.ranks.length), lane = laneHeight(state);
  const us = steps[state.at].us;
  const size = count * (lane * state.lanes.length + 6) + 46;
  const labels = state.ranks.map((rank) => rank.rank);
  const skip = Math.ceil(14 / (lane * state.lanes.length + 6));
  const options = {
    legend: { show: false },
    cursor: { drag: { x: true, y: false }, y: false, points: { show: false } },
    scales: { x: { time: false, min: 0, max: us / 1e3, auto: false }, y: { auto: false, min: 0, max: count, dir: -1 } },
    series: [{}, { points: { show: false }, paths: () => null }],
    axes: [
      { ...page.axisStyle(), size: 30, values: (_, ticks) => ticks.map((tick) => `${page.digits(tick, 5)} ms`) },
      { ...page.axisStyle(), size: 64, grid: { show: false }, ticks: { show: false }, splits: () => labels.map((_, at) => at + 0.5), values: () => labels.map((rank, at) => (at % skip ? "" : `rank ${rank}`)) },
    ],
    hooks: {
      drawAxes: [(plot) => drawSpans(plot, state)],
      setCursor: [(plot) => { if (plot.cursor.left >= 0) { const span = spanAt(plot, state); if (span) tell(span); } }],
    },
  };
  return { options, data: [[0, us / 1e3], [null, null]], size };
};

// Return [top, height] of the lane for spans of `kind` of the rank number `at`, in the plot's area; in pixels of the
// device (`device`) or of CSS.
const verticalPlace = (plot, state, at, kind, device) => {
  const scale = device ? window.devicePixelRatio || 1 : 1;
  const height = device ? plot.bbox.height : plot.bbox.height / (window.devicePixelRatio || 1);
  const room = height / Math.max(1, state.ranks.length);
  const lane = (room - 5 * scale) / state.lanes.length;
  return [at * room + 2.5 * scale + state.lanes.indexOf(LANES[kind]) * lane, lane - scale];
};

// Paint all spans of the shown ranks, and a frame around the marked one.
const drawSpans = (plot, state) => {
  const pen = plot.ctx;
  pen.save();
  pen.beginPath();
  pen.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  pen.clip();
  const ground = page.colour("ground"), ink = page.colour("ink"), line = page.colour("grid");
  const colours = COLOURS.map((name) => page.colour(name));
  const hatches = colours.map((colour) => page.hatch(pen, colour));
  state.spans.forEach((spans, at) => {
    const room = plot.bbox.height / state.spans.length;
    pen.fillStyle = line;
    pen.fillRect(plot.bbox.left, Math.round(plot.bbox.top + (at + 1) * room) - 1, plot.bbox.width, 1);
    for (const span of spans) {
      const left = plot.valToPos(span.begin / 1e3, "x", true), right = plot.valToPos(span.end / 1e3, "x", true);
      if (right < plot.bbox.left || left > plot.bbox.left + plot.bbox.width) continue;
      const [top, height] = verticalPlace(plot, state, at, span.kind, true);
      const y = plot.bbox.top + top, wide = Math.max(1, right - left);
      const colour = colours[span.kind === COMPUTE ? PHASE_KINDS[span.phase] : span.kind];
      const wait = Math.min(wide, (span.waited / Math.max(1, span.duration)) * wide);
      pen.fillStyle = colour;
      pen.fillRect(left, y, Math.max(wait ? 0 : 1, wide - wait), height);
      if (span.kind === COMPUTE && wide > 3) {
        pen.fillStyle = ground;
        pen.fillRect(left, y, 1, height);
      }
      if (wait > 0) {
        pen.fillStyle = hatches[span.kind];
        pen.fillRect(left + wide - wait, y, wait, height);
        pen.strokeStyle = colour;
        pen.lineWidth = 1;
        if (wait > 3) pen.strokeRect(left + wide - wait + 0.5, y + 0.5, wait - 1, height - 1);
      }
      if (state.mark === span) {
        pen.strokeStyle = ink;
        pen.lineWidth = 2;
        pen.strokeRect(left - 1, y - 1, wide + 2, height + 2);
      }
    }
  });
  pen.restore();
};

// Return the shortest span under the pointer, null if there is none.
const spanAt = (plot, state) => {
  const us = plot.posToVal(plot.cursor.left, "x") * 1e3, y = plot.cursor.top;
  const at = Math.floor((y / plot.over.clientHeight) * state.spans.length);
  const near = 2 * ((plot.scales.x.max - plot.scales.x.min) / plot.over.clientWidth) * 1e3;
  let best = null;
  for (const span of state.spans[at] ?? []) {
    const [top, height] = verticalPlace(plot, state, at, span.kind, false);
    const inside = span.begin - near <= us && us <= span.end + near && top <= y && y <= top + height + 1;
    if (inside && (!best || span.duration < best.duration)) best = span;
  }
  return best;
};

// Handle an arrow key: mark the next or previous span of the rank, or the nearest of the rank above or below.
const spanKey = (event, state, chart, readout) => {
  const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (!move || !state.spans.length) return;
  event.preventDefault();
  let row = state.mark ? state.spans.findIndex((spans) => spans.includes(state.mark)) : 0;
  row = Math.max(0, Math.min(state.spans.length - 1, row + (state.mark ? move[0] : 0)));
  const spans = state.spans[row];
  if (!spans.length) return;
  let at = state.mark ? spans.indexOf(state.mark) : -1;
  if (at < 0 && state.mark) at = spans.reduce((best, span, index) => (Math.abs(span.begin - state.mark.begin) < Math.abs(spans[best].begin - state.mark.begin) ? index : best), 0);
  else at = Math.max(0, Math.min(spans.length - 1, at + move[1]));
  state.mark = spans[Math.max(0, at)];
  readout.textContent = page.describeSpan(state.mark);
  chart.plot.redraw(false, false);
};

// Fill the legend with the kinds of spans that occur in the page, drawn as in the strip.
const showLegend = (state, steps) => {
  const present = new Set();
  for (const step of steps) for (const rank of step.ranks) for (let at = 0; at < rank.spans.length; at += 6) present.add(rank.spans[at]);
  const host = page.at("strip-legend");
  host.replaceChildren();
  const entries = [...present].sort((a, b) => a - b).filter((kind) => kind !== COMPUTE).map((kind) => [KINDS[kind], COLOURS[kind], false]);
  page.at("strip-lanes").textContent = `Lanes of a rank, from the top: ${LANE_NAMES.filter((_, lane) => [...present].some((kind) => LANES[kind] === lane)).join(", ")}.`;
  if (entries.length) entries.push(["hatched: waited for it", "ink", true]);
  for (const [name, colour, hatched] of entries) {
    const item = page.element("li");
    const swatch = document.createElement("canvas");
    swatch.width = 36; swatch.height = 20;
    swatch.style.width = "18px"; swatch.style.height = "10px";
    const pen = swatch.getContext("2d");
    pen.fillStyle = hatched ? page.hatch(pen, page.colour(colour)) : page.colour(colour);
    pen.fillRect(0, 0, 36, 20);
    item.append(swatch, page.element("span", name));
    host.append(item);
  }
};
