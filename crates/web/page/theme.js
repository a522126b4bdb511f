// Dark and light: as the system says, unless it is chosen here. The choice is kept in the browser.

import { forgetColors } from "./plot.js";

const NEXT = { auto: "light", light: "dark", dark: "auto" };
const WORDS = { auto: "Colours: system", light: "Colours: light", dark: "Colours: dark" };
let chosen = "auto";

function kept() {
  try {
    return localStorage.getItem("colours");
  } catch {
    return null;
  }
}

function apply(button, changed) {
  document.documentElement.dataset.colours = chosen;
  button.textContent = WORDS[chosen];
  forgetColors();
  changed();
}

export function startTheme(button, changed) {
  const before = kept();
  if (before in NEXT) chosen = before;
  apply(button, () => {});
  button.addEventListener("click", () => {
    chosen = NEXT[chosen];
    try {
      localStorage.setItem("colours", chosen);
    } catch {
      // A browser that keeps nothing: the choice lasts as long as the page.
    }
    apply(button, changed);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(button, changed));
}
