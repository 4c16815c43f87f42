// Draws the interactive charts and, on a live page, replaces the parts that changed. Everything that comes from the
// log arrives as HTML that the server has escaped, or as numbers; nothing here builds markup out of text.

const live = document.body.dataset.mode === "live";
const dark = matchMedia("(prefers-color-scheme: dark)");
const byId = (id) => document.getElementById(id);
const charts = { loss: null, rate: null };
let data = JSON.parse(byId("data").textContent);
let axis = "step";

document.documentElement.classList.add("js");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function faint(hex, share) {
  const part = (at) => parseInt(hex.slice(at, at + 2), 16);
  return `rgba(${part(1)}, ${part(3)}, ${part(5)}, ${share})`;
}

// The height left beside the legend.
const room = (box) => box.clientHeight - parseInt(getComputedStyle(box).getPropertyValue("--key"), 10);

function clock(seconds) {
  if (seconds == null) return "–";
  const whole = Math.round(seconds);
  const pad = (n) => String(n).padStart(2, "0");
  if (seconds < 10 && seconds !== whole) return `${seconds.toFixed(1)} s`;
  if (whole < 60) return `${whole} s`;
  const minutes = `${Math.floor((whole % 3600) / 60)}:${pad(whole % 60)}`;
  return whole < 3600 ? minutes : `${Math.floor(whole / 3600)}:${minutes.padStart(5, "0")}`;
}

const times = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 604800];
const onAxis = (value) => (axis === "step" ? (value == null ? "–" : value.toLocaleString("en")) : clock(value));
const figure = (digits) => (_, value) => (value == null ? "–" : value.toFixed(digits));
const short = (value) => (value == null ? "–" : value === 0 ? "0" : Number(value.toPrecision(3)).toString());

// x must grow strictly: of rows at the same instant the last one stands.
function rising(x, ...columns) {
  const keep = x.map((value, i) => i).filter((i) => i + 1 === x.length || x[i + 1] > x[i]);
  return [x, ...columns].map((column) => keep.map((i) => column[i]));
}

function lossData() {
  const { curve, held_out } = data;
  const band = curve.low ? [curve.high, curve.low] : []; // replicas that step by themselves have losses of their own
  const train = rising(curve[axis], curve.loss, curve.smooth, ...band);
  const lines = train.length - 1;
  const order = ([x, ...rest]) => [x, rest[0], rest[1], rest[lines], ...rest.slice(2, lines)];
  if (!held_out.step.length) return order([...train, train[0].map(() => null)]);
  if (!train[0].length) return order([held_out[axis], ...Array(lines).fill(held_out.loss.map(() => null)), held_out.loss]);
  return order(uPlot.join([train, rising(held_out[axis], held_out.loss)]));
}

const rateData = () => rising(data.curve[axis], data.curve.learning_rate, data.curve.gradient_norm);

function axes(extra) {
  const common = {
    stroke: colour("--quiet"),
    font: '12px system-ui, -apple-system, "Segoe UI", sans-serif',
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
  };
  const format = (_, values) => values.map((value) => (axis === "step" && value % 1 ? "" : onAxis(value)));
  return [{ ...common, grid: { show: false }, values: format, space: 70, size: 30, ...(axis === "step" ? {} : { incrs: times }) }, ...extra.map((one) => ({ ...common, ...one }))];
}

function options(box, series, scales, extra, more = {}) {
  return {
    ...more,
    width: Math.max(box.clientWidth, 200),
    height: room(box),
    padding: [10, 12, 0, 0],
    legend: { live: true },
    cursor: { points: { size: 7 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, ...scales },
    axes: axes(extra),
    series: [{ label: axis === "step" ? "step" : "time", value: (_, value) => onAxis(value) }, ...series],
  };
}

function lossChart(box) {
  const [train, held] = [colour("--loss"), colour("--held")];
  const plain = { spanGaps: true, points: { show: false } };
  const series = [
    { ...plain, label: data.curve.low ? "mean" : "each step", stroke: faint(train, 0.4), width: 1, value: figure(3) },
    { ...plain, label: "smoothed", stroke: train, width: 2.25, value: figure(3) },
    { ...plain, label: "held out", stroke: held, width: 1.5, dash: [5, 4], value: figure(3),
      points: { show: true, size: 7, fill: colour("--card"), stroke: held, width: 2 } },
  ];
  const values = (_, list) => list.map(short);
  if (!data.curve.low) return new uPlot(options(box, series, {}, [{ size: 48, values }]), lossData(), box);
  for (const label of ["worst", "best"]) series.push({ ...plain, label, stroke: faint(train, 0.16), width: 1, value: figure(3) });
  const bands = [{ series: [4, 5], fill: faint(train, 0.16) }];
  return new uPlot(options(box, series, {}, [{ size: 48, values }], { bands }), lossData(), box);
}

function rateChart(box) {
  const [rate, norm] = [colour("--rate"), colour("--norm")];
  const plain = { spanGaps: true, points: { show: false } };
  const series = [
    { ...plain, label: "learning rate", scale: "rate", stroke: rate, width: 2, value: (_, value) => short(value) },
    { ...plain, label: "gradient norm", scale: "norm", stroke: norm, width: 1.25, value: (_, value) => short(value) },
  ];
  const values = (_, list) => list.map(short);
  const sides = [
    { scale: "rate", size: 60, values },
    { scale: "norm", side: 1, size: 48, values, grid: { show: false } },
  ];
  return new uPlot(options(box, series, {}, sides), rateData(), box);
}

function build() {
  if (!data.curve.step.length) return;
  for (const [id, make] of [["loss", lossChart], ["rate", rateChart]]) {
    const box = byId(id);
    charts[id]?.destroy();
    box.classList.add("drawn");
    charts[id] = make(box);
    charts[id].root.setAttribute("role", "img");
    charts[id].root.setAttribute("aria-label", id === "loss" ? "Loss" : "Learning rate and gradient norm");
  }
}

function refresh() {
  if (!charts.loss) {
    build();
    return;
  }
  charts.loss.setData(lossData());
  charts.rate.setData(rateData());
}

function fit() {
  for (const [id, chart] of Object.entries(charts)) {
    const box = byId(id);
    if (chart && box.clientWidth && (box.clientWidth !== chart.width || room(box) !== chart.height)) {
      chart.setSize({ width: box.clientWidth, height: room(box) });
    }
  }
}

function listen() {
  const link = byId("link");
  const say = (state, words) => {
    if (link.dataset.state !== state) {
      link.dataset.state = state;
      link.textContent = words;
    }
  };
  const source = new EventSource("/api/events");
  source.addEventListener("open", () => say("live", "live"));
  source.addEventListener("error", () => say("gone", "connection lost, trying again"));
  source.addEventListener("update", (event) => {
    const update = JSON.parse(event.data);
    for (const [id, html] of Object.entries(update.fragments)) byId(id).innerHTML = html;
    if (update.title) document.title = update.title;
    if (update.data) {
      data = update.data;
      refresh();
    }
    say("live", "live");
  });
  addEventListener("pagehide", () => source.close());
  say("wait", "connecting");
}

for (const input of document.querySelectorAll("input[name=axis]")) {
  input.addEventListener("change", () => {
    axis = input.value;
    build();
  });
}
dark.addEventListener("change", build);
build();
new ResizeObserver(fit).observe(byId("loss"));
if (live) listen();
