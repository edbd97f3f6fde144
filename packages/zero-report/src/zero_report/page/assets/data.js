// The page's data: compressed, in base64, in an element that no browser runs.

page.readData = async () => {
  const packed = Uint8Array.from(atob(page.at("data").textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

// Return the spans of a rank in one step as objects, from their six numbers each. A unit's span gets the phase around it.
page.spansOf = (rank, names) => {
  const found = [], running = new Set(rank.under_way);
  for (let at = 0; at < rank.spans.length; at += 6) {
    const [kind, name, begin, duration, waited, bytes] = rank.spans.slice(at, at + 6);
    found.push({ kind, name: names[name], begin, duration, waited, bytes, end: begin + duration, rank: rank.rank, running: running.has(at / 6) });
  }
  const phases = found.filter((span) => span.kind >= 1 && span.kind <= 3);
  for (const span of found) {
    if (span.kind !== 12) continue;
    const middle = (span.begin + span.end) / 2;
    const around = phases.find((phase) => phase.begin <= middle && middle <= phase.end);
    span.phase = around ? ["", "forward", "backward", "update"][around.kind] : "update";
  }
  return found;
};

// Return the ranks of a list such as "0-3,7" as a set; null for "all" or nothing. Throws if it is not such a list.
page.parseRanks = (text) => {
  const trimmed = text.trim();
  if (!trimmed || trimmed === "all") return null;
  const chosen = new Set();
  for (const part of trimmed.split(",")) {
    const match = /^\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?$/.exec(part);
    if (!match) throw new Error(`Expected ranks as in 0-3,7, got “${part.trim()}”.`);
    const last = Number(match[2] ?? match[1]);
    for (let rank = Number(match[1]); rank <= last; rank += 1) chosen.add(rank);
  }
  return chosen;
};
