// Read the data, then show the sections from the top down.

// Add links to all visible sections to the page's navigation.
const showSections = () => {
  for (const section of document.querySelectorAll("main > section[data-name]")) {
    if (section.hidden) continue;
    const link = page.element("a", section.dataset.name);
    link.href = `#${section.id}`;
    page.at("sections").append(link);
  }
};

const start = async () => {
  page.applyThemeBeforeDrawing();
  const data = await page.readData();
  page.showHead(data);
  page.showVerdict(data);
  page.showFlight(data);
  page.showCurves(data);
  page.showMemoryOfRun(data);
  page.showStrip(data, (step, chosen) => page.showMemoryOfStep(data, step, chosen));
  page.showTables(data);
  page.showRanks(data);
  page.showConfiguration(data);
  page.showComparison(data);
  showSections();
  page.startTheme();
  document.documentElement.dataset.ready = "true";
};

start().catch((error) => {
  page.at("sentence").textContent = `This page could not be shown: ${error.message}`;
  throw error;
});
