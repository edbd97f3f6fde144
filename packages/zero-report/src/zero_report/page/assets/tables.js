// Texts and tables: verdict, causes, waits, links, checkpoints, events, configuration, totals.

const CAUSE_NAMES = { data: "Data loaders", tier: "Host and drives", rank: "Slower ranks", link: "Links", save: "Checkpoints" };
const CAUSE_COLOURS = { data: "data", tier: "tier", rank: "reduce", link: "gather", save: "save" };

const countText = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;

page.showHead = (data) => {
  document.title = `${data.title}: report`;
  page.at("title").textContent = data.title;
  const t = data.totals;
  const facts = [
    countText(data.ranks, "rank"),
    `${countText(t.steps, "step")} in ${page.seconds(t.seconds)}`,
    `${page.seconds(t.step_seconds)} per step`,
  ];
  if (t.tokens_per_second) facts.push(`${page.scaled(t.tokens_per_second)} tokens/s`);
  else if (t.samples_per_second) facts.push(`${page.scaled(t.samples_per_second)} samples/s`);
  if (t.loss !== null) facts.push(`loss ${page.digits(t.loss)}`);
  if (t.skipped) facts.push(`${countText(t.skipped, "step")} skipped`);
  if (data.attempts > 1) facts.push(`${data.attempts} starts`);
  if (t.replayed) facts.push(`${countText(t.replayed, "step")} done again`);
  page.at("facts").textContent = facts.join(" · ");
  page.at("footer").textContent = `Made ${page.time(data.made)} by zero-report ${data.version} from ${data.path}.`;
};

page.showVerdict = (data) => {
  page.at("sentence").textContent = data.verdict.sentence;
  const ended = page.at("ended");
  if (data.verdict.ended) {
    ended.hidden = false;
    ended.append(page.element("strong", data.verdict.ended));
    if (data.verdict.detail) ended.append(page.element("pre", data.verdict.detail));
  }
  const list = page.at("causes");
  for (const cause of data.causes) {
    const item = page.element("li");
    const bar = page.element("span", null, "bar"), fill = page.element("span", null, "fill");
    fill.style.width = `${Math.min(100, 100 * cause.share)}%`;
    fill.style.background = `var(--${CAUSE_COLOURS[cause.kind]})`;
    bar.append(fill);
    item.append(page.element("span", CAUSE_NAMES[cause.kind]), bar, page.element("span", page.percent(cause.share), "share"));
    if (cause.share >= 0.005) item.append(page.element("span", cause.most.join("; "), "most quiet"));
    list.append(item);
  }
  if (data.verdict.steps) page.at("basis").textContent = `Each share is of the step of the rank that loses most by that cause, over ${data.verdict.steps} steps that were recorded span by span.`;
  const problems = page.at("problems");
  problems.hidden = !data.problems.length;
  for (const problem of data.problems.slice(0, 20)) problems.append(page.element("li", problem));
  if (data.problems.length > 20) problems.append(page.element("li", `and ${data.problems.length - 20} more`));
};

const LISTED_UNITS = 25;

page.showFlight = (data) => {
  if (!data.flight.length) return;
  page.at("flight").hidden = false;
  page.table(page.at("flight-table"), [
    { name: "rank", number: true, show: (row) => String(row.rank) },
    { name: "waits in", show: (row) => row.waits ?? "no message" },
    { name: "its last messages, the newest last", code: true, show: (row) => lineList(row.last) },
  ], data.flight, "");
};

// Return an element with one line per text.
const lineList = (texts) => {
  const made = page.element("div");
  for (const text of texts) made.append(page.element("div", text));
  return made;
};

// Return an element with a bar for a share from 0 to 1, and a text.
const gauge = (share, text) => {
  const made = page.element("span", null, "meter");
  const bar = page.element("span", null, "gauge"), fill = page.element("span");
  fill.style.width = `${Math.max(0, Math.min(100, 100 * share))}%`;
  bar.append(fill);
  made.append(bar, document.createTextNode(text));
  return made;
};

page.showTables = (data) => {
  page.table(page.at("waits-table"), [
    { name: "rank", number: true, show: (row) => String(row.rank) },
    { name: "step", number: true, show: (row) => String(row.step) },
    { name: "waited", number: true, show: (row) => page.seconds(row.us / 1e6) },
    { name: "in", show: (row) => row.in },
    { name: "for", show: (row) => row.cause },
  ], data.waits, "No rank waited for anything.");
  page.table(page.at("links-table"), [
    { name: "link", show: (row) => row.name },
    { name: "moved", number: true, show: (row) => page.bytes(row.bytes) },
    { name: "busy", number: true, show: (row) => page.seconds(row.busy) },
    { name: "waited for", number: true, show: (row) => page.seconds(row.waited) },
    { name: "rate of a rank", number: true, show: (row) => `${page.scaled(row.rate, "B")}/s` },
    { name: "peak", number: true, show: (row) => `${page.scaled(row.peak, "B")}/s` },
    { name: "of the peak", show: (row) => gauge(row.peak ? row.rate / row.peak : 0, page.percent(row.peak ? row.rate / row.peak : 0)) },
    { name: "peak from", show: (row) => row.source },
  ], data.links, "Nothing moved between ranks or tiers.");
  page.table(page.at("units-table"), [
    { name: "unit, parameter or message", code: true, show: (row) => row.name },
    { name: "waited for", number: true, show: (row) => page.seconds(row.waited) },
    { name: "waits mostly for", wide: true, show: (row) => row.cause },
    { name: "computes", number: true, show: (row) => page.seconds(row.computed) },
    { name: "messages", number: true, show: (row) => page.digits(row.messages) },
    { name: "gathers", number: true, show: (row) => page.bytes(row.gathered) },
    { name: "reductions", number: true, show: (row) => page.bytes(row.reduced) },
    { name: "other", number: true, show: (row) => page.bytes(row.other) },
    { name: "read", number: true, show: (row) => page.bytes(row.read) },
    { name: "written", number: true, show: (row) => page.bytes(row.written) },
  ], data.units.slice(0, LISTED_UNITS), "No unit was recorded.");
  const more = data.units.length > LISTED_UNITS ? ` The ${LISTED_UNITS} that are waited for longest, of ${data.units.length}.` : "";
  if (data.units.length) page.at("units-table").append(page.element("p", `Per rank and step, mean; bytes are what gathers, reductions and other messages send, and what is read from and written to tiers.${more}`, "quiet"));
  page.table(page.at("checkpoints-table"), [
    { name: "step", number: true, show: (row) => String(row.step) },
    { name: "at", show: (row) => page.time(row.at) },
    { name: "size", number: true, show: (row) => page.bytes(row.bytes) },
    { name: "took", number: true, show: (row) => page.seconds(row.seconds) },
    { name: "blocked", number: true, show: (row) => page.seconds(row.blocked_s) },
    { name: "path", code: true, show: (row) => row.path },
  ], data.checkpoints, "No checkpoint was written.");
  page.table(page.at("events-table"), [
    { name: "step", number: true, show: (row) => String(row.step) },
    { name: "at", show: (row) => page.time(row.at) },
    { name: "event", show: (row) => row.kind },
    { name: "ranks", show: (row) => (row.ranks.length > 6 ? `${row.ranks.length} ranks` : row.ranks.join(", ")) },
    { name: "", show: (row) => row.text },
  ], data.events, "Nothing out of the ordinary happened.");
  page.table(page.at("totals-table"), [{ name: "all ranks together, over the run", show: (row) => row[0] }, { name: "", number: true, show: (row) => row[1] }], totalRows(data), "Nothing was counted.");
};

const totalRows = (data) => {
  const t = data.totals;
  const exact = (value) => `${page.bytes(value)} (${value.toLocaleString("en")} B)`;
  const share = (value) => `${page.seconds(value)} (${page.percent(value / t.rank_seconds)})`;
  return [
    ["time of all ranks", page.seconds(t.rank_seconds)],
    ["computing", share(t.compute)],
    ...Object.entries(t.waits).map(([name, value]) => [`waiting: ${name.replace("_wait", "").replace("_", " ")}`, share(value)]),
    ["waiting for data", share(t.phases.data)],
    ["blocked by checkpoints", share(t.phases.save)],
    ["sent to other ranks", exact(t.sent_bytes)],
    ["sent to other nodes", exact(t.across_bytes)],
    ["collectives", t.collectives.toLocaleString("en")],
    ["read from tiers", exact(t.read_bytes)],
    ["written to tiers", exact(t.written_bytes)],
    ["process memory, peak of a rank", page.bytes(t.process_bytes)],
    ["device memory, peak of a rank", page.bytes(t.device_bytes)],
    ["steps skipped", t.skipped.toLocaleString("en")],
    ["steps done again after a restart", t.replayed.toLocaleString("en")],
    ...Object.entries(data.versions).map(([name, value]) => [name, String(value)]),
    ...Object.entries(data.machine).map(([name, value]) => [name, String(value)]),
  ];
};

page.showConfiguration = (data) => {
  const filter = page.at("configuration-filter"), defaults = page.at("configuration-defaults");
  const draw = () => {
    const wanted = filter.value.trim().toLowerCase();
    const rows = data.configuration.filter((row) => (defaults.checked || row[2] !== "default") && (!wanted || row.join(" ").toLowerCase().includes(wanted)));
    page.table(page.at("configuration-table"), [
      { name: "key", code: true, show: (row) => row[0] },
      { name: "value", code: true, show: (row) => JSON.stringify(row[1]) },
      { name: "from", show: (row) => row[2] },
      { name: "", show: (row) => row[3] },
    ], rows, data.configuration.length ? "No value matches." : "The record holds no configuration.");
  };
  filter.addEventListener("input", draw);
  defaults.addEventListener("change", draw);
  draw();
};
