// Charts: each `figure[data-chart]` fetches its curves when it comes into view, and again when the run goes on.
import uPlot from "./vendor/uplot/uPlot.esm.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const drawn = new Map(); // figure -> {plot, range}

export function format(value, form) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (form === "percent") return (100 * value).toFixed(Math.abs(value) < 0.1 ? 2 : 1) + "%";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
  if (Math.abs(value) >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (Math.abs(value) >= 1e4) return (value / 1e3).toFixed(0) + "k";
  return String(+value.toPrecision(4));
}

function duration(seconds) {
  if (seconds >= 3600) return +(seconds / 3600).toFixed(1) + " h";
  return seconds >= 60 ? +(seconds / 60).toFixed(1) + " min" : +seconds.toFixed(1) + " s";
}

function assemble(chart) {
  const tables = [], series = [{}], bands = [], shown = [];
  for (const each of chart.series) {
    if (!each.x.length) continue;
    const color = style(`--c${each.color % 8}`);
    const at = series.length;
    if (each.kind === "band") {
      tables.push([each.x, each.y, each.low, each.high]);
      series.push({ stroke: color, width: 1.7, spanGaps: true });
      for (let side = 0; side < 2; side++) series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      bands.push({ series: [at + 2, at + 1], fill: color + "2b" });
    } else {
      tables.push([each.x, each.y]);
      const faint = each.kind === "faint";
      const few = each.x.length < 2;
      series.push({ stroke: faint ? color + "55" : color, width: faint ? 1 : 1.7, spanGaps: true, points: { show: few, size: 5 } });
    }
    if (each.kind !== "faint") shown.push({ at, label: each.label, color: each.color % 8 });
  }
  return { data: tables.length ? uPlot.join(tables) : [[]], series, bands, shown };
}

function legend(box, chart, shown, plot) {
  const place = plot.cursor.idx;
  box.replaceChildren(...shown.slice(0, 8).map(({ at, label, color }) => {
    const values = plot.data[at];
    let value = place == null ? values.findLast((each) => each != null) : values[place];
    for (let back = place; value == null && back > 0; back--) value = values[back];
    const item = document.createElement("span"), swatch = document.createElement("span"), number = document.createElement("b");
    swatch.className = `swatch c${color}`;
    number.textContent = format(value, chart.form);
    item.append(swatch, `${label} `, number);
    return item;
  }));
}

function make(figure, chart) {
  const box = figure.querySelector(".plot"), below = figure.querySelector(".legend");
  const { data, series, bands, shown } = assemble(chart);
  const before = drawn.get(figure);
  const range = before?.zoomed ? { ...before.plot.scales.x } : null;
  before?.plot.destroy();
  box.replaceChildren();
  box.classList.toggle("blank", data[0].length === 0);
  if (!data[0].length) {
    drawn.delete(figure);
    box.textContent = "no values yet";
    return;
  }
  const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const plot = new uPlot({
    width: box.clientWidth, height: box.clientHeight, series, bands, legend: { show: false },
    scales: { x: { time: false }, y: { range: (self, low, high) => span(chart, low, high) } },
    axes: [
      { ...axis, size: 26, values: (self, marks) => marks.map((each) => chart.axis === "time" ? duration(each) : format(each)) },
      { ...axis, size: 52, values: (self, marks) => marks.map((each) => format(each, chart.form)) },
    ],
    cursor: { sync: { key: "charts" }, points: { size: 6 }, y: false },
    hooks: {
      setCursor: [(self) => legend(below, chart, shown, self)],
      setSelect: [() => { drawn.get(figure).zoomed = true; }],
    },
  }, data, box);
  plot.over.addEventListener("dblclick", () => { drawn.get(figure).zoomed = false; });
  drawn.set(figure, { plot, zoomed: Boolean(range) });
  if (range) plot.setScale("x", { min: range.min, max: range.max });
  legend(below, chart, shown, plot);
}

function span(chart, low, high) {
  if (low == null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [chart.least == null ? low - room : Math.min(chart.least, low), high + room];
}

async function load(figure) {
  try {
    const answer = await fetch(figure.dataset.chart);
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    make(figure, await answer.json());
  } catch (error) {
    if (!drawn.has(figure)) figure.querySelector(".plot").textContent = `cannot be loaded: ${error.message}`;
  }
}

const visible = new Set();
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) visible.delete(target);
    else {
      visible.add(target);
      if (!drawn.has(target) || target.dataset.stale) { delete target.dataset.stale; load(target); }
    }
  }
}, { rootMargin: "300px" });
const sized = new ResizeObserver((entries) => {
  for (const { target } of entries) drawn.get(target.parentElement)?.plot.setSize({ width: target.clientWidth, height: target.clientHeight });
});

export function drawCharts(root) {
  for (const figure of root.querySelectorAll("figure[data-chart]")) {
    seen.observe(figure);
    sized.observe(figure.querySelector(".plot"));
  }
}

export function refreshCharts() {
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    if (visible.has(figure)) load(figure);
    else figure.dataset.stale = "1";
  }
}

export function addChart(box, title, source) {
  for (const each of box.children) if (each.dataset.chart === source) return;
  const figure = document.createElement("figure");
  figure.className = "chart";
  figure.dataset.chart = source;
  const head = document.createElement("figcaption"), name = document.createElement("h3");
  name.textContent = title;
  head.append(name);
  const plot = document.createElement("div"), below = document.createElement("div");
  plot.className = "plot";
  below.className = "legend";
  figure.append(head, plot, below);
  box.prepend(figure);
  drawCharts(box);
}
