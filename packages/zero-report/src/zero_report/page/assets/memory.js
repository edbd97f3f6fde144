// Memory by owner: over the step that the strip shows, and over the run; the plan's line behind it.

const OWNER_COLOURS = { parameters: "update", masters: "backward", states: "forward", gradients: "reduce", gathered: "gather", activations: "tier", buffers: "publish", other: "other" };
const OWNER_ORDER = ["masters", "states", "parameters", "buffers", "gradients", "gathered", "activations", "other"];

page.showMemoryOfRun = (data) => {
  const c = data.curves;
  const layers = !c.step.length ? [] : OWNER_ORDER.filter((owner) => c.memory[owner]).map((owner) => ({ name: owner, colour: OWNER_COLOURS[owner], values: c.memory[owner] }));
  page.stack(page.at("memory-run"), "Over the run, peak of a step, mean over ranks", c.step, layers, page.bytes, { level: planLevel(data) });
};

const planLevel = (data) => (data.plan ? { name: "plan", value: data.plan } : null);

page.showMemoryOfStep = (data, step, chosen) => {
  const host = page.at("memory-step");
  const measured = step.ranks.filter((rank) => rank.memory.length && (!chosen || chosen.has(rank.rank)));
  const total = (rank) => Math.max(...rank.memory.map((sample) => sample.slice(1).reduce((sum, value) => sum + value, 0)));
  const rank = measured.reduce((best, one) => (best && total(best) >= total(one) ? best : one), null);
  if (!rank) {
    host.replaceChildren(page.element("h3", `Over step ${step.step}`), page.element("p", "Memory was not looked at in this step.", "nothing"));
    return;
  }
  const x = rank.memory.map((sample) => sample[0] / 1e3);
  const layers = OWNER_ORDER.map((owner) => {
    const column = data.steps.owners.indexOf(owner) + 1;
    return { name: owner, colour: OWNER_COLOURS[owner], values: rank.memory.map((sample) => sample[column]) };
  });
  page.stack(host, `Over step ${step.step}, rank ${rank.rank} (the one that holds most)`, x, layers, page.bytes, {
    xName: "ms", xFormat: (value) => `${page.digits(value, 5)} ms`, level: planLevel(data), stepped: x.length > 1,
  });
};
