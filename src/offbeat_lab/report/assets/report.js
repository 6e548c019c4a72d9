"use strict";
// Draws what the page's data say, at the width there is. Colours are the style sheet's, so light and dark need no redrawing.
(() => {
  const page = document.documentElement;
  const failures = [];
  const fail = (message) => {
    failures.push(String(message));
    page.dataset.failed = failures.join("\n");
  };
  addEventListener("error", (event) => fail(event.message));

  const data = JSON.parse(document.getElementById("data").textContent);
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "12 4", "1 4", "6 2 1 2 1 2"];
  const MARKERS = ["M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z", "M-3-3H3V3H-3z", "M0-4L4 3H-4z", "M0-4.3L4.3 0L0 4.3L-4.3 0z",
    "M0 4L4-3H-4z", "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5", "M-4 0H4M0-4V4", "M-4-1.5H4V1.5H-4z"];
  const PHASES = { compute: "computing", padded: "asleep (emulated)", encode: "encoding", waiting: "waiting for others", transfer: "transfer" };

  const make = (parent, name, attributes = {}, text = null) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  };
  const clear = (svg, width, height) => {
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  };
  const finite = (value) => value !== null && Number.isFinite(value);

  // Numbers: the unit is that of the axis' end, or each number's own on a logarithmic axis.
  const scaleOf = (unit, value) => {
    const fitting = unit.filter(([from]) => from <= Math.abs(value));
    return fitting.length ? fitting[fitting.length - 1] : value ? unit[0] : unit.find(([, divisor]) => divisor === 1) ?? unit[0];
  };
  const digits = (value, decimals) => (value + 0).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  const written = (unit, value) => {
    const [, divisor, name] = scaleOf(unit, value), plain = unit.length === 1 && name === "";
    const number = (value / divisor).toLocaleString("en", { maximumSignificantDigits: Math.abs(value / divisor) < 1000 ? (plain ? 4 : 3) : 5 });
    return number + (name === "" || name === "%" ? name : " " + name);
  };

  const niceStep = (span, count) => {
    const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  };
  const linearTicks = (low, high, count, unit) => {
    const [, divisor, name] = scaleOf(unit, Math.max(Math.abs(low), Math.abs(high)));
    const step = niceStep((high - low) / divisor, count), ticks = [];
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let k = Math.ceil(low / divisor / step - 1e-9); k * step <= (high / divisor) * (1 + 1e-9) + 1e-12; k++)
      ticks.push([k * step * divisor, digits(k * step, decimals)]);
    return { ticks, name };
  };
  const logTicks = (low, high, count, unit) => {
    const decimal = unit.filter(([, divisor]) => Number.isInteger(Math.round(Math.log10(divisor) * 1e6) / 1e6));
    const ticks = [], decades = Math.log10(high / low);
    const factors = decades < 1.2 ? [1, 2, 3, 5] : decades < count / 2 ? [1, 3] : [1];
    const every = Math.max(1, Math.ceil(decades / count));
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      if (power % every === 0)
        for (const factor of factors) {
          const value = factor * 10 ** power;
          if (value >= low * 0.999 && value <= high * 1.001) ticks.push([value, written(decimal, value)]);
        }
    return ticks.length > (decades < 0.7 ? 2 : 1) ? { ticks, name: "" } : linearTicks(low, high, count, unit);
  };

  // Values near their best: what is missing halves and halves again. Round values first, and as many as there is room for.
  const missingTicks = (axis, most, least, room) => {
    const at = (missing) => Math.log(most / missing) / Math.log(most / least), ticks = [];
    for (const [factor, apart] of [[1, 17], [5, 17], [2, 17], [3, 34], [7, 34], [4, 34]])
      for (let power = 1; power >= Math.floor(Math.log10(least)); power--) {
        const missing = factor * 10 ** power;
        if (missing > most * 1.001 || missing < least * 0.999) continue;
        if (ticks.every(([other]) => Math.abs(at(axis.whole - other) - at(missing)) * room >= apart))
          ticks.push([axis.whole - missing, (axis.whole - missing).toLocaleString("en", { maximumFractionDigits: 8 })]);
      }
    return { ticks, name: "" };
  };

  const makeScale = (axis, values, from, to, count, rounded = false) => {
    let low = Math.min(...values), high = Math.max(...values);
    if (finite(axis.whole)) {
      const least = axis.least_missing, missing = (value) => Math.max(axis.whole - value, least);
      const most = Math.max(missing(low), 2 * least), deepest = Math.min(missing(high), most / 2);
      const at = (value) => from + ((to - from) * Math.log(most / missing(value))) / Math.log(most / deepest);
      return { at, ...missingTicks(axis, most, deepest, Math.abs(to - from)) };
    }
    if (axis.log) {
      if (low === high) [low, high] = [low / 2, high * 2];
      const span = Math.log(high / low);
      return { at: (value) => from + ((to - from) * Math.log(value / low)) / span, ...logTicks(low, high, count, axis.unit) };
    }
    if (axis.zero) low = Math.min(0, low);
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    if (rounded) {
      const step = niceStep(high - low, count);
      [low, high] = [Math.floor(low / step + 1e-6) * step, Math.ceil(high / step - 1e-6) * step];
    }
    return { at: (value) => from + ((to - from) * (value - low)) / (high - low), ...linearTicks(low, high, count, axis.unit) };
  };

  // Numbers below an axis; one that would touch its neighbour is left out.
  const drawTicks = (svg, ticks, at, bottom, left, right) => {
    let free = -Infinity;
    for (const [value, text] of ticks) {
      const x = at(value), width = 7 * text.length, from = Math.min(Math.max(x - width / 2, left - 12), right - width + 10);
      make(svg, "line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 });
      if (from < free) continue;
      free = from + width + 8;
      make(svg, "text", { x: from + width / 2, y: bottom + 17, "text-anchor": "middle" }, text);
    }
  };

  // The pointer's label.
  const tip = document.getElementById("tip");
  const showTip = (event, text) => {
    tip.hidden = false;
    tip.textContent = text;
    const left = Math.min(event.pageX + 14, scrollX + page.clientWidth - tip.offsetWidth - 6);
    tip.style.left = `${Math.max(6, left)}px`;
    tip.style.top = `${Math.max(scrollY + 4, event.pageY - tip.offsetHeight - 12)}px`;
  };
  const hideTip = () => { tip.hidden = true; };

  const hidden = new Set();

  const pathOf = (series, x, y) => {
    let path = "", pen = "M";
    series.x.forEach((value, k) => {
      if (!finite(value) || !finite(series.y[k])) { pen = "M"; return; }
      path += `${pen}${x(value).toFixed(1)} ${y(series.y[k]).toFixed(1)}`;
      pen = "L";
    });
    return path;
  };
  const bandOf = (series, x, y) => {
    const known = series.x.map((_, k) => k).filter((k) => finite(series.low[k]) && finite(series.high[k]));
    const there = known.map((k) => `${x(series.x[k]).toFixed(1)} ${y(series.high[k]).toFixed(1)}`);
    const back = known.map((k) => `${x(series.x[k]).toFixed(1)} ${y(series.low[k]).toFixed(1)}`).reverse();
    return known.length ? `M${there.join("L")}L${back.join("L")}Z` : "";
  };

  const drawLines = (figure) => {
    const chart = data.charts[figure.dataset.chart], svg = figure.querySelector(":scope > svg");
    const width = Math.max(200, Math.round(figure.clientWidth)), height = Math.round(Math.min(360, Math.max(230, width * 0.56)));
    clear(svg, width, height);
    const all = chart.series.filter((series) => chart.apart || !hidden.has(series.strategy));
    const usable = (axis) => (value) => finite(value) && (!axis.log || value > 0);
    const xs = all.flatMap((series) => series.x).filter(usable(chart.x));
    const ys = all.flatMap((series) => [series.y, series.low ?? [], series.high ?? []].flat()).filter(usable(chart.y));
    if (!xs.length || !ys.length) return;
    if (finite(chart.target)) ys.push(chart.target);
    const top = 24, bottom = height - 38;
    const y = makeScale(chart.y, ys, bottom, top, Math.max(5, Math.floor(height / 50)), true);
    const left = 10 + 6.8 * Math.max(3, ...y.ticks.map(([, text]) => text.length)), right = width - 14;
    const x = makeScale(chart.x, xs, left, right, Math.max(2, Math.floor((right - left) / (chart.x.log ? 62 : 75))));
    for (const [value, text] of y.ticks) {
      make(svg, "line", { class: "grid", x1: left, x2: right, y1: y.at(value), y2: y.at(value) });
      make(svg, "text", { x: left - 7, y: y.at(value) + 4, "text-anchor": "end" }, text);
    }
    make(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
    drawTicks(svg, x.ticks, x.at, bottom, left, right);
    const scaled = (axis) => axis.log ? " (logarithmic)" : finite(axis.whole) ? (width < 500 ? " (logarithmic)" : ` (logarithmic in ${axis.whole} − ${axis.title})`) : "";
    const titled = (axis, name) => axis.title + (name ? `, ${name}` : "") + scaled(axis);
    make(svg, "text", { x: 0, y: 11 }, titled(chart.y, y.name));
    make(svg, "text", { x: right, y: height - 4, "text-anchor": "end" }, titled(chart.x, x.name));
    if (finite(chart.target)) {
      make(svg, "line", { class: "target", x1: left, x2: right, y1: y.at(chart.target), y2: y.at(chart.target) });
      const label = make(svg, "text", { class: "target-label", x: right, y: 11, "text-anchor": "end" }, `target ${written(chart.y.unit, chart.target)}`);
      const from = right - 7.4 * label.textContent.length - 6;
      make(svg, "line", { class: "target", x1: from - 22, x2: from, y1: 7, y2: 7 });
    }
    for (const [step, name] of chart.changes) {
      const at = x.at(step);
      make(svg, "line", { class: "target", x1: at, x2: at, y1: top, y2: bottom });
      make(svg, "text", { class: "target-label", x: Math.min(at + 4, right), y: top + 10, "text-anchor": at > right - 90 ? "end" : "start" }, name);
    }
    for (const series of [...all].sort((a, b) => Number(b.thin) - Number(a.thin))) drawSeries(svg, series, x.at, y.at);
    const cross = make(svg, "circle", { r: 4, class: "halo", visibility: "hidden" });
    svg.onpointerleave = () => { hideTip(); cross.setAttribute("visibility", "hidden"); };
    svg.onpointermove = svg.onpointerdown = (event) => {
      const found = nearest(svg, event, all, x.at, y.at, width);
      if (!found) return;
      const { series, k } = found;
      cross.setAttribute("class", `halo c${series.strategy % 8}`);
      cross.setAttribute("cx", x.at(series.x[k]));
      cross.setAttribute("cy", y.at(series.y[k]));
      cross.setAttribute("visibility", "visible");
      const range = series.low ? ` (${written(chart.y.unit, series.low[k])} to ${written(chart.y.unit, series.high[k])})` : "";
      const where = `${chart.x.title} ${written(chart.x.unit, series.x[k])}`;
      showTip(event, `${series.name}\n${chart.y.title} ${written(chart.y.unit, series.y[k])}${range}\n${where}`);
    };
  };

  const drawSeries = (svg, series, x, y) => {
    const group = make(svg, "g", { class: `c${series.strategy % 8}` });
    if (series.low) make(group, "path", { class: "band", d: bandOf(series, x, y) });
    const dash = series.thin ? null : DASHES[series.strategy % 8] || null;
    make(group, "path", { class: series.thin ? "line thin" : "line", d: pathOf(series, x, y), "stroke-dasharray": dash });
    if (series.thin || series.low) return;
    const known = series.x.map((_, k) => k).filter((k) => finite(series.x[k]) && finite(series.y[k]));
    const end = x(series.x[known[known.length - 1]]);
    let drawnAt = -Infinity;
    for (const k of known) {
      const cx = x(series.x[k]);
      if (cx !== end && (cx - drawnAt < 46 || end - cx < 20)) continue;
      drawnAt = cx;
      make(group, "path", { class: "marker", d: MARKERS[series.strategy % 8], transform: `translate(${cx.toFixed(1)} ${y(series.y[k]).toFixed(1)})` });
    }
  };

  const nearest = (svg, event, all, x, y, width) => {
    const box = svg.getBoundingClientRect(), zoom = width / box.width;
    const px = (event.clientX - box.left) * zoom, py = (event.clientY - box.top) * zoom;
    let best = null, least = Infinity;
    for (const series of all)
      series.x.forEach((value, k) => {
        if (!finite(value) || !finite(series.y[k])) return;
        const distance = Math.hypot(x(value) - px, (y(series.y[k]) - py) * 0.6) + (series.thin ? 4 : 0);
        if (distance < least) [best, least] = [{ series, k }, distance];
      });
    return best;
  };

  // Line, dash and marker of a strategy, wherever its name stands.
  const drawKeys = () => {
    for (const svg of document.querySelectorAll("svg[data-key]")) {
      clear(svg, 26, 12);
      const number = Number(svg.dataset.key) % 8;
      make(svg, "line", { class: "line", x1: 0, x2: 26, y1: 6, y2: 6, "stroke-dasharray": DASHES[number] || null });
      make(svg, "path", { class: "marker", d: MARKERS[number], transform: "translate(13 6)" });
    }
  };

  // The timeline.
  const figure = document.getElementById("timeline");
  const chosen = { strategy: 0, run: 0, count: 12, from: 0 };
  const field = (name) => document.getElementById(`timeline-${name}`);
  const seconds = [[0, 1e-6, "µs"], [0.9995e-3, 1e-3, "ms"], [0.9995, 1, "s"]];

  const offer = (select, options, value) => {
    if (!select) return;
    select.replaceChildren(...options.map(([key, text]) => new Option(text, key, false, key === value)));
  };
  const offerRuns = () => {
    const mine = data.timelines.filter((one) => one.strategy === chosen.strategy);
    if (!mine.some((one) => one.run === chosen.run)) chosen.run = mine[0].run;
    offer(field("run"), mine.map((one) => [one.run, data.seeds[one.strategy][one.run]]), chosen.run);
    const window_ = mine.find((one) => one.run === chosen.run);
    const have = window_.apart ? window_.cells[window_.reference].filter((cell) => cell).length : window_.last.length;
    const counts = [1, 3, 6, 12, 20, 40].filter((count) => count < have);
    counts.push(have);
    if (!counts.includes(chosen.count)) chosen.count = counts.findLast((count) => count <= chosen.count) ?? counts[0];
    offer(field("count"), counts.map((count) => [count, count]), chosen.count);
    field("from").max = Math.max(0, have - chosen.count);
    chosen.from = Math.min(chosen.from, have - chosen.count);
    field("from").value = chosen.from;
    field("from").parentElement.hidden = have === chosen.count;
  };

  const drawTimeline = () => {
    const svg = figure.querySelector(":scope > svg");
    const window_ = data.timelines.find((one) => one.strategy === chosen.strategy && one.run === chosen.run);
    const first = chosen.from, last = chosen.from + chosen.count, workers = window_.cells.length;
    const row = workers <= 16 ? 20 : 11, gap = workers <= 16 ? 9 : 4, top = 26;
    const width = Math.max(240, Math.round(figure.clientWidth)), right = width - 10, narrow = width < 600;
    const left = (narrow ? 22 : 58) + 7.5 * String(workers - 1).length;
    const height = top + workers * (row + gap) + 40;
    clear(svg, width, height);
    drawHatch(svg);
    const sum = (cell) => cell.reduce((total, value) => total + value, 0);
    const chosenCells = (window_.apart ? [window_.cells[window_.reference]] : window_.cells)
      .flatMap((cells) => cells.slice(first, last)).filter((cell) => cell);
    const start = Math.min(...chosenCells.map((cell) => cell[0])), end = Math.max(...chosenCells.map(sum));
    // Workers that do not keep step are shown for the time that the chosen steps of one of them take.
    const isShown = (cell, k) => cell && (window_.apart ? sum(cell) > start && cell[0] < end : first <= k && k < last);
    const axis = { log: false, unit: seconds };
    const x = makeScale(axis, [0, (end - start) / 1e6], left, right, Math.max(2, Math.floor((right - left) / 80)));
    const at = (microseconds) => x.at((microseconds - start) / 1e6);
    const bottom = top + workers * (row + gap);
    drawStepMarks(svg, window_, window_.cells[window_.reference].slice(first, last), first, at, top, bottom);
    window_.cells.forEach((cells, worker) => {
      const y = top + worker * (row + gap);
      make(svg, "text", { x: left - 8, y: y + row / 2 + 4, "text-anchor": "end" }, (narrow ? "w" : "worker ") + worker);
      cells.forEach((cell, k) => isShown(cell, k) && drawCell(svg, window_, cell, worker, k, y, row, at, left, right));
    });
    for (const [worker, when] of window_.gone) {
      if (when < start || when > end) continue;
      const cx = Math.min(at(when) + 8, right - 5), cy = top + worker * (row + gap) + row / 2;
      make(svg, "path", { class: "gone", d: `M${(cx - 4).toFixed(1)} ${cy - 4}l8 8m0 -8l-8 8` });
    }
    for (let k = first; k < last; k++) {
      const worker = window_.last[k];
      if (worker < 0) continue;
      const cx = at(window_.ready[k]), cy = top + worker * (row + gap) - 1;
      make(svg, "path", { class: "last", d: `M${(cx - 4.5).toFixed(1)} ${cy - 6}h9L${cx.toFixed(1)} ${cy + 1}z` });
    }
    make(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
    drawTicks(svg, x.ticks, x.at, bottom, left, right);
    make(svg, "text", { x: right, y: height - 4, "text-anchor": "end" }, `time, ${x.name}`);
    const whose = data.strategies.length > 1 ? `${data.strategies[chosen.strategy]}, seed ${data.seeds[chosen.strategy][chosen.run]}: steps` : "Steps";
    const numbers = window_.steps[window_.reference].slice(first, last).filter((number) => number);
    field("says").textContent = `${whose} ${numbers[0]} to ${numbers[numbers.length - 1]} of ${workers === 1 ? "the one worker" : `${workers} workers`}. `
      + "Where a step begins and ends, when a worker was ready, and how long each phase took are as recorded; the order of phases in between is schematic.";
  };

  const drawHatch = (svg) => {
    const pattern = make(make(svg, "defs"), "pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    make(pattern, "rect", { class: "hatch-page", width: 5, height: 5 });
    make(pattern, "line", { class: "hatch-line", x1: 0, x2: 0, y1: 0, y2: 5 });
  };

  const drawStepMarks = (svg, window_, cells, first, at, top, bottom) => {
    let drawnAt = -Infinity;
    cells.forEach((cell, k) => {
      if (!cell) return;
      const x = at(cell[0]);
      make(svg, "line", { class: "boundary", x1: x, x2: x, y1: top - 6, y2: bottom });
      const text = `${drawnAt === -Infinity ? "step " : ""}${window_.steps[window_.reference][first + k]}`;
      if (x - drawnAt < 14 + 7 * text.length) return;
      drawnAt = x + (drawnAt === -Infinity ? 26 : 0);
      make(svg, "text", { x, y: 10 }, text);
    });
  };

  const drawCell = (svg, window_, cell, worker, k, y, row, at, left, right) => {
    let from = cell[0];
    window_.phases.forEach((phase, place) => {
      const length = cell[place + 1], x1 = Math.max(left, at(from)), x2 = Math.min(right, at(from + length));
      from += length;
      if (x2 - x1 < 0.15) return;
      const bar = make(svg, "rect", { class: `phase-${phase}`, x: x1.toFixed(2), y, width: (x2 - x1).toFixed(2), height: row });
      const who = phase === "waiting" && window_.last[k] >= 0 ? `waiting for others, the last of them worker ${window_.last[k]}` : PHASES[phase];
      const say = (event) => showTip(event, `worker ${worker}, step ${window_.steps[worker][k]}\n${who}: ${written(seconds, length / 1e6)}`);
      bar.onpointermove = bar.onpointerdown = say;
      bar.onpointerleave = hideTip;
    });
    if (at(cell[0]) >= left) make(svg, "line", { class: "begin", x1: at(cell[0]), x2: at(cell[0]), y1: y, y2: y + row });
  };

  const startTimeline = () => {
    const present = [...new Set(data.timelines.map((one) => one.strategy))];
    chosen.strategy = present.includes(data.advised) ? data.advised : present[0];
    chosen.count = page.clientWidth < 600 ? 6 : 12;
    offer(field("strategy"), present.map((number) => [number, data.strategies[number]]), chosen.strategy);
    for (const name of ["strategy", "run", "count", "from"])
      field(name)?.addEventListener("input", (event) => {
        chosen[name] = Number(event.target.value);
        offerRuns();
        drawTimeline();
      });
    offerRuns();
  };

  const draw = () => {
    const charts = document.querySelectorAll("figure[data-chart]");
    for (const one of charts) drawLines(one);
    if (figure) drawTimeline();
    page.dataset.drawn = charts.length + (figure ? 1 : 0);
  };

  drawKeys();
  if (figure) startTimeline();
  for (const box of document.querySelectorAll("#shown input"))
    box.addEventListener("change", () => {
      hidden[box.checked ? "delete" : "add"](Number(box.value));
      draw();
    });
  for (const choice of document.querySelectorAll("#step-scale input"))
    choice.addEventListener("change", () => {
      for (const bars of document.querySelectorAll(".bars.stacked")) bars.dataset.scale = choice.value;
    });
  draw();
  let drawnFor = page.clientWidth;
  addEventListener("resize", () => {
    if (page.clientWidth === drawnFor) return;
    drawnFor = page.clientWidth;
    requestAnimationFrame(draw);
  });
})();
