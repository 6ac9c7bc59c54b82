"use strict";
// The curves: one chart for each of TensorBoard's. A step of a curve leads to the episodes of that step.

const WIDTH = 400, HEIGHT = 180, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;

async function showCurves() {
  const run = await load("run");
  const categories = [...new Set(run.charts.map((chart) => chart.category))];
  const sections = categories.map((category) =>
    make("section", {}, make("h2", {}, category), make("div", {class: "charts"},
      ...run.charts.filter((chart) => chart.category === category).map(chartOf))));
  if (!sections.length) sections.push(make("p", {}, "No curve has a point yet."));
  return [tiles(run), ...sections];
}

function tiles(run) {
  const last = (name) => {
    const curve = run.charts.flatMap((chart) => chart.curves).find((each) => each.name === name);
    return curve ? curve.points[curve.points.length - 1] : null;
  };
  const trained = last("reward/mean");
  const steps = trained ? `${number(trained[0] + 1)} of ${number(run.steps)}` : number(run.steps);
  const facts = [
    ["state", run.finished ? "finished" : "not finished"],
    ["mode", run.mode],
    [trained ? "steps" : "planned steps", run.mode === "eval" ? "" : steps],
    ["episodes", `${number(run.episodes)}, ${number(run.whole)} whole`],
    ["last reward", trained ? number(trained[1], 3) : ""],
    ...evaluated(run),
    ["model", run.model],
    ["written", run.written],
  ];
  return make("dl", {class: "tiles"}, ...facts.filter(([, value]) => value).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function evaluated(run) {
  const chart = run.charts.find((each) => each.curves.some((curve) => curve.interval));
  return (chart ? chart.curves.filter((curve) => curve.interval) : []).map((curve) => {
    const [, rate] = curve.points[curve.points.length - 1];
    const [, low, high] = curve.interval[curve.interval.length - 1];
    return [curve.name, `${number(rate, 3)} [${number(low, 3)}, ${number(high, 3)}]`];
  });
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function chartOf(chart) {
  const steps = [...new Set(chart.curves.flatMap((c) => c.points.map(([step]) => step)))].sort((a, b) => a - b);
  const values = chart.curves.flatMap((c) => [
    ...c.points.map(([, value]) => value), ...(c.interval || []).flatMap(([, low, high]) => [low, high])]);
  const x = scale(steps[0], steps[steps.length - 1], LEFT, WIDTH - RIGHT);
  const ticks = roundTicks(values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b)));
  const y = scale(ticks[0], ticks[ticks.length - 1], HEIGHT - BOTTOM, TOP);
  const cursor = svg("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
  const picture = svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title},
    ...grid(steps, ticks, y, x), ...chart.curves.flatMap((curve, n) => drawn(curve, n % 8, x, y)), cursor);
  const readout = make("div", {class: "readout"}, "\u00a0");
  const stepAt = (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    return steps.reduce((best, step) => (Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best));
  };
  const point = (event) => {
    const step = stepAt(event);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(step));
    cursor.setAttribute("visibility", "visible");
    readout.replaceChildren(...read(chart, step));
  };
  picture.addEventListener("pointermove", point);
  picture.addEventListener("click", (event) => {
    if (event.pointerType === "touch") point(event); // a finger cannot hover; the readout has the link
    else location.hash = episodesOf(chart, stepAt(event));
  });
  return make("figure", {}, make("figcaption", {}, chart.title), picture, legend(chart), readout);
}

// A linear map from values to pixels; a single value stands in the middle.
function scale(low, high, from, to) {
  const pad = low === high ? Math.abs(low) / 10 || 0.5 : 0;
  const factor = (to - from) / (high - low + 2 * pad);
  return (value) => from + (value - low + pad) * factor;
}

// At most five multiples of 1, 2 or 5 times a power of ten that enclose the values.
function roundTicks(low, high) {
  const pad = low === high ? Math.abs(low) / 10 || 0.5 : 0;
  const from = low - pad, to = high + pad, least = (to - from) / 4;
  const power = 10 ** Math.floor(Math.log10(least));
  const sizes = [1, 2, 5, 10, 20].map((factor) => factor * power);
  const below = (size) => Math.floor(from / size + 1e-9);
  const count = (size) => Math.ceil(to / size - 1e-9) - below(size);
  const size = sizes.find((each) => each >= least && count(each) <= 4) || sizes[sizes.length - 1];
  const digits = Math.max(0, -Math.floor(Math.log10(size)));
  const first = below(size);
  return Array.from({length: count(size) + 1}, (_, n) => Number(((first + n) * size).toFixed(Math.min(digits, 99))));
}

function grid(steps, ticks, y, x) {
  const first = steps[0], last = steps[steps.length - 1];
  const marks = [...new Set([first, steps[Math.floor(steps.length / 2)], last])];
  return [
    ...ticks.map((at) => svg("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at)})),
    ...ticks.map((at) => svg("text", {x: LEFT - 4, y: y(at) + 3, "text-anchor": "end"}, number(at, 12))),
    ...marks.map((step) => svg("text", {
      x: x(step), y: HEIGHT - 6,
      "text-anchor": step === first && marks.length > 1 ? "start" : step === last ? "end" : "middle",
    }, String(step))),
  ];
}

function drawn(curve, colour, x, y) {
  const parts = [];
  if (curve.interval) {
    const band = [...curve.interval.map(([step, low]) => [step, low]),
      ...curve.interval.map(([step, , high]) => [step, high]).reverse()];
    parts.push(svg("polygon", {class: `c${colour} band`, points: joined(band, x, y)}));
    parts.push(...curve.interval.map(([step, low, high]) =>
      svg("line", {class: `c${colour} whisker`, x1: x(step), x2: x(step), y1: y(low), y2: y(high)})));
  }
  parts.push(svg("polyline", {class: `c${colour}`, points: joined(curve.points, x, y)}));
  if (curve.points.length < 40) {
    parts.push(...curve.points.map(([step, value]) =>
      svg("circle", {class: `c${colour}`, cx: x(step), cy: y(value), r: 2.2})));
  }
  return parts;
}

function joined(points, x, y) {
  return points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
}

function legend(chart) {
  return make("ul", {class: "legend"}, ...chart.curves.map((curve, n) =>
    make("li", {title: curve.meaning}, make("i", {class: `c${n % 8}`}), curve.name)));
}

function read(chart, step) {
  const found = chart.curves.flatMap((curve) => {
    const point = curve.points.find(([at]) => at === step);
    const interval = (curve.interval || []).find(([at]) => at === step);
    const ends = interval ? ` [${number(interval[1], 3)}, ${number(interval[2], 3)}]` : "";
    return point ? [`${curve.name.split("/").slice(1).join("/")} ${number(point[1])}${ends}`] : [];
  });
  return [make("a", {href: episodesOf(chart, step)}, `step ${step}`), `: ${found.join(", ")}`];
}

function episodesOf(chart, step) {
  const isEvaluation = chart.curves.every((curve) => curve.name.includes("/eval"));
  return address("episodes", {step, split: isEvaluation ? "eval" : ""});
}
