// What the pages gain by JavaScript: charts that zoom, live updates, keys, a theme. All of them can be read without.
import { drawCharts, refreshCharts, addChart } from "./charts.js";
import { watch } from "./live.js";
import { listenToKeys, toggleTheme } from "./keys.js";
import { brush } from "./timeline.js";

for (const each of document.querySelectorAll("[data-theme-toggle], [data-needs-script], [data-keys]")) each.hidden = false;
for (const each of document.querySelectorAll("[data-no-script]")) each.hidden = true;
document.querySelector("[data-theme-toggle]")?.addEventListener("click", () => { toggleTheme(); refreshCharts(); });
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-metric]");
  if (!link) return;
  event.preventDefault();
  addChart(document.querySelector("[data-more]"), link.textContent, link.dataset.metric);
});
drawCharts(document);
if (document.querySelector("[data-retry]")) setTimeout(() => location.reload(), 2000);
watch(refreshCharts);
listenToKeys(refreshCharts);
brush();
