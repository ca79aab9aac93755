// Runs before the page is drawn, so that it does not flash in the other theme.
const kept = localStorage.getItem("antiphon-theme");
if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
