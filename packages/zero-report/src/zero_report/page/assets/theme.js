// Light and dark theme: the system's, until the reader chooses one. Charts are drawn again on a change.

const THEMES = ["auto", "light", "dark"];
const DARK = matchMedia("(prefers-color-scheme: dark)");
const redraw = [];

// Call `draw` whenever the theme changes.
page.onTheme = (draw) => { redraw.push(draw); };
page.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

let chosenTheme = "auto";

const applyTheme = () => {
  const dark = chosenTheme === "dark" || (chosenTheme === "auto" && DARK.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  page.at("theme").textContent = `Theme: ${chosenTheme}`;
  for (const draw of redraw) draw();
};

page.startTheme = () => {
  page.at("theme").addEventListener("click", () => {
    chosenTheme = THEMES[(THEMES.indexOf(chosenTheme) + 1) % THEMES.length];
    applyTheme();
  });
  DARK.addEventListener("change", applyTheme);
  applyTheme();
};

page.applyThemeBeforeDrawing = () => {
  document.documentElement.dataset.theme = DARK.matches ? "dark" : "light";
};

// Return a hatched pattern in a colour, for times that were only waited: a difference that does not need colours.
page.hatch = (context, colour) => {
  const tile = document.createElement("canvas");
  const scale = window.devicePixelRatio || 1;
  tile.width = tile.height = Math.round(6 * scale);
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1.4 * scale;
  const size = tile.width;
  pen.beginPath();
  for (const shift of [-size, 0, size]) { pen.moveTo(shift, size); pen.lineTo(shift + size, 0); }
  pen.stroke();
  return context.createPattern(tile, "repeat");
};
