// Memory by owner, over the step that the strip shows and over the run, with a line for the planned peak.

const OWNER_COLOURS = { parameters: "update", masters: "backward", states: "forward", gradients: "reduce", gathered: "gather", activations: "tier", buffers: "publish", other: "other" };
const OWNER_ORDER = ["masters", "states", "parameters", "buffers", "gradients", "gathered", "activations", "other"];

// Return the layers to draw and a note for the title: "other" is left out if it is so large that the known owners would
// be too small to see.
const RESERVED = 4;
const drawable = (layers) => {
  const most = (chosen) => Math.max(0, ...chosen[0].values.map((_, at) => chosen.reduce((sum, layer) => sum + (layer.values[at] ?? 0), 0)));
  const known = layers.filter((layer) => layer.name !== "other"), rest = layers.filter((layer) => layer.name === "other");
  if (!known.length || !rest.length || !most(known) || most(rest) < RESERVED * most(known)) return { layers, note: "" };
  return { layers: known, note: `; without what the process holds beyond these, ${page.bytes(most(rest))}` };
};

page.showMemoryOfRun = (data) => {
  const c = data.curves;
  const looked = c.step.map((_, at) => at).filter((at) => OWNER_ORDER.some((owner) => c.memory?.[owner]?.[at] != null));
  const layers = OWNER_ORDER.map((owner) => ({ name: owner, colour: OWNER_COLOURS[owner], values: looked.map((at) => c.memory[owner][at]) }));
  const drawn = drawable(layers);
  page.stack(page.at("memory-run"), `Over the run, peaks of the steps in which it was looked at, mean over ranks${drawn.note}`, looked.map((at) => c.step[at]), drawn.layers, page.bytes, { level: planLevel(data) });
};

const planLevel = (data) => (data.plan ? { name: "plan", value: data.plan } : null);

page.showMemoryOfStep = (data, shown, chosen) => {
  const host = page.at("memory-step");
  const looked = data.steps.steps.filter((one) => one.ranks.some((rank) => rank.memory.length));
  const step = looked.filter((one) => one.step <= shown.step).pop() ?? looked[0] ?? shown;
  const measured = step.ranks.filter((rank) => rank.memory.length && (!chosen || chosen.has(rank.rank)));
  const total = (rank) => Math.max(...rank.memory.map((sample) => sample.slice(1).reduce((sum, value) => sum + value, 0)));
  const rank = measured.reduce((best, one) => (best && total(best) >= total(one) ? best : one), null);
  if (!rank) {
    host.replaceChildren(page.element("h3", `Over step ${step.step}`), page.element("p", "Memory was looked at in none of these steps.", "nothing"));
    return;
  }
  const x = rank.memory.map((sample) => sample[0] / 1e3);
  const layers = OWNER_ORDER.map((owner) => {
    const column = data.steps.owners.indexOf(owner) + 1;
    return { name: owner, colour: OWNER_COLOURS[owner], values: rank.memory.map((sample) => sample[column]) };
  });
  const nearest = step === shown ? "" : ", the nearest in which memory was looked at";
  const drawn = drawable(layers);
  page.stack(host, `Over step ${step.step}${nearest}; rank ${rank.rank}, which holds most${drawn.note}`, x, drawn.layers, page.bytes, {
    xName: "ms", xFormat: (value) => `${page.digits(value, 5)} ms`, level: planLevel(data), stepped: x.length > 1,
  });
};
