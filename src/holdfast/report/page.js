// Draws the curves of the page from the JSON in it, and replaces the page's content with what the server of a live page sends.
"use strict";
(() => {
  const state = JSON.parse(document.getElementById("data").textContent);
  const box = document.getElementById("charts"), form = document.getElementById("controls"), control = form.elements;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const column = (name) => state.columns.indexOf(name);
  const axes = { iteration: "steps", consumed_tokens: "tokens", time: "wall time" };
  let plots = [], range = null, toggling = false;

  const short = (value) => {
    const size = Math.abs(value);
    for (const [limit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= limit) return `${+(value / (letter === "k" ? 1e3 : limit)).toPrecision(4)}${letter}`;
    return `${+value.toPrecision(5)}`;
  };
  const duration = (seconds) => {
    const whole = Math.round(seconds), [d, h, m, s] = [whole / 86400, (whole / 3600) % 24, (whole / 60) % 60, whole % 60].map(Math.floor);
    if (d) return h ? `${d}d ${h}h` : `${d}d`;
    if (h) return m ? `${h}h ${m}m` : `${h}h`;
    if (m) return s ? `${m}m ${s}s` : `${m}m`;
    return `${+seconds.toFixed(1)}s`;
  };
  // From 0 to 100 the slider gives means over 1 to about 2,000 points.
  const weight = () => 1 - 10 ** ((-3 * control.smoothing.value) / 100);
  const onAxis = (value) => (control.x.value === "time" ? duration(value) : short(value));
  const shown = (value) => (value == null ? "–" : short(value));

  // The rows of each run that have a place on the axis, and all places of the axis in order.
  function placed() {
    const x = column(control.x.value), log = control.logx.checked;
    const rows = state.runs.map((run) => run.rows.filter((row) => row[x] !== null && (!log || row[x] > 0)));
    const places = Float64Array.from(new Set(rows.flatMap((found) => found.map((row) => row[x])))).sort();
    const index = new Map();
    places.forEach((place, number) => index.set(place, number));
    return { rows, places, index: rows.map((found) => found.map((row) => index.get(row[x]))) };
  }

  // Exponential mean, corrected for the bias of its start; weight 0 gives the values themselves.
  function smoothed(values, keep) {
    let sum = 0, total = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * keep + value;
      total = total * keep + 1;
      return sum / total;
    });
  }

  function series(chart, on) {
    const log = control.logy.checked, share = chart.column === "lr" ? 0 : weight();
    const spread = (values, index) => {
      const found = new Array(on.places.length).fill(null);
      values.forEach((value, number) => { if (value !== null && (!log || value > 0)) found[index[number]] = value; });
      return found;
    };
    const data = [on.places];
    on.rows.forEach((rows, run) => {
      const values = rows.map((row) => row[column(chart.column)]);
      data.push(spread(values, on.index[run]), spread(smoothed(values, share), on.index[run]));
      if (chart.second) data.push(spread(rows.map((row) => row[column(chart.second)]), on.index[run]));
    });
    return data;
  }

  function options(chart, width) {
    const several = state.runs.length > 1, smooth = () => chart.column !== "lr" && weight() > 0;
    const lines = state.runs.flatMap((run, number) => {
      const colour = style(`--run-${number % 8}`), name = several ? run.name : chart.second ? "training" : chart.title.toLowerCase();
      const common = { run: number, spanGaps: true, value: (u, value) => shown(value), points: { show: false } };
      const found = [
        { ...common, label: "", class: "raw", stroke: () => colour + (smooth() ? "55" : "00"), width: 1 },
        { ...common, label: name, stroke: colour, width: 2, points: { show: run.rows.length < 3 } },
      ];
      if (chart.second) {
        const second = several ? colour : style("--second"), label = several ? `${run.name}, validation` : "validation";
        found.push({ ...common, label, second: true, stroke: second, width: several ? 1 : 1.5, dash: several ? [4, 4] : undefined,
          points: { show: true, size: 6, fill: second } });
      }
      return found;
    });
    const axis = { stroke: style("--soft"), grid: { stroke: style("--rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const logx = control.logx.checked, logy = control.logy.checked;  // uPlot never returns if the range of a log scale has 0 in it
    const low = (min) => (chart.from_zero && !logy ? Math.min(0, min) : min);
    return {
      width, height: chart.second ? 340 : 240, series: [{ label: axes[control.x.value], value: (u, value) => (value == null ? "–" : onAxis(value)) }, ...lines],
      legend: { live: true },
      cursor: {
        sync: { key: "page" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, dataIdx: nearest,
        bind: { dblclick: () => () => { zoom(null); return null; } },
      },
      scales: {
        x: { time: false, distr: logx ? 3 : 1, range: (u, min, max) => [min, max] },
        y: { distr: logy ? 3 : 1, range: (u, min, max) => span(low(min), max, logy) },
      },
      axes: [
        { ...axis, values: (u, values) => values.map((value) => (value === null ? "" : onAxis(value))), space: 64, size: 30 },
        { ...axis, values: (u, values) => values.map((value) => (value === null ? "" : short(value))), size: 58, label: chart.axis,
          labelSize: 18, labelFont: "11px system-ui, sans-serif", filter: (u, values) => (logy ? values.map((value) => (isRound(value) ? value : null)) : values) },
      ],
      hooks: { ready: [onTouch], setSelect: [select], draw: [drawMarks], setCursor: [showMark], setSeries: [toggle] },
    };
  }

  // 1, 2 or 5 times a power of ten: the labels of a log axis.
  const isRound = (value) => [1, 2, 5, 10].includes(+(value / 10 ** Math.floor(Math.log10(value))).toPrecision(3));

  function span(min, max, log) {
    if (min == null || max == null) return log ? [1, 10] : [0, 1];
    if (log) return [[5, 2, 1].map((digit) => digit * 10 ** Math.floor(Math.log10(min))).find((round) => round <= min), max * 1.1];
    const room = (max - min || Math.abs(max) || 1) * 0.05;
    return [min === 0 ? 0 : min - room, max + room];
  }

  // The point of a series that is nearest to the pointer: runs have their points at different places.
  function nearest(u, number, index) {
    const values = u.data[number];
    if (!number || values[index] != null) return index;
    for (let away = 1; away < values.length; away++) {
      if (values[index - away] != null) return index - away;
      if (values[index + away] != null) return index + away;
    }
    return index;
  }

  function select(u) {
    const { left, width } = u.select;
    if (width > 4) zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  // Two fingers zoom: the values under them stay under them. One finger moves a zoomed chart; up and down scrolls the page.
  function onTouch(u) {
    const fingers = new Map(), log = control.logx.checked, to = log ? Math.log : (value) => value, from = log ? Math.exp : (value) => value;
    const hold = () => fingers.forEach((finger) => { finger.value = to(u.posToVal(finger.left, "x")); });
    const left = (event) => event.clientX - u.over.getBoundingClientRect().left;
    const lift = (event) => { if (fingers.delete(event.pointerId)) hold(); };
    u.over.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") return;
      fingers.set(event.pointerId, { left: left(event) });
      hold();
    });
    u.over.addEventListener("pointermove", (event) => {
      const finger = fingers.get(event.pointerId);
      if (!finger || (fingers.size === 1 && !range)) return;
      finger.left = left(event);
      soon(() => { if (fingers.size) move(u, [...fingers.values()], to, from); });
    });
    for (const name of ["pointerup", "pointercancel"]) u.over.addEventListener(name, lift);
  }

  function move(u, [one, other], to, from) {
    const places = u.data[0], whole = [to(places[0]), to(places[places.length - 1])], all = u.over.clientWidth;
    let slope = (to(u.scales.x.max) - to(u.scales.x.min)) / all;
    if (other && Math.abs(other.left - one.left) > 10) slope = (other.value - one.value) / (other.left - one.left);
    const size = Math.min(slope * all, whole[1] - whole[0]);
    if (!(size > 0)) return;
    const first = Math.min(Math.max(one.value - slope * one.left, whole[0]), whole[1] - size);
    zoom(size < whole[1] - whole[0] ? [from(first), from(first + size)] : null);
  }

  function zoom(to) {
    range = to;
    control.reset.disabled = !to;
    plots.forEach(({ plot }) => scale(plot));
  }

  function scale(plot) {
    const places = plot.data[0];
    showNewest(plot);
    if (places.length) plot.setScale("x", range ? { min: range[0], max: range[1] } : { min: places[0], max: places[places.length - 1] });
  }

  // A click on a name in one legend hides or shows that run in every chart.
  function toggle(u, number, change) {
    if (toggling || number == null || change.show == null || u.series[number].second) return;
    toggling = true;
    for (const { plot } of plots)
      plot.series.forEach((one, at) => { if (one.run === u.series[number].run && !one.second) plot.setSeries(at, { show: change.show }); });
    toggling = false;
  }

  function marks(u) {
    const key = control.x.value, x = column(key), step = column("iteration");
    const at = (rows, number) => (rows.find((row) => row[step] >= number) ?? [])[x] ?? null;  // the tokens of a step
    return state.runs.flatMap((run) => run.marks.map((mark) => {
      const value = key === "time" ? mark.time : key === "iteration" ? mark.step : at(run.rows, mark.step);
      return { text: state.runs.length > 1 ? `${run.name}: ${mark.text}` : mark.text, value };
    })).filter(({ value }) => value !== null && value >= u.scales.x.min && value <= u.scales.x.max);
  }

  function drawMarks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = style("--good");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { value } of marks(u)) {
      const x = Math.round(u.valToPos(value, "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // Without a pointer on the chart the legend shows the newest values.
  function showNewest(u) {
    const end = u.data[0].length - 1;
    if (end >= 0 && u.cursor.idx == null) u.setLegend({ idxs: u.data.map((_, number) => nearest(u, number, end)) });
  }

  function showMark(u) {
    showNewest(u);
    const near = marks(u).filter(({ value }) => Math.abs(u.valToPos(value, "x") - u.cursor.left) < 6);
    u.over.title = near.map(({ text }) => text).join("\n");
  }

  const width = (card) => Math.max(200, card.clientWidth - 24);

  function build() {
    plots.forEach(({ plot }) => plot.destroy());
    const on = placed();
    control.reset.disabled = !range;
    control.x.querySelector("[value=time]").disabled = !state.runs.some((run) => run.rows.some((row) => row[column("time")] !== null));
    const missing = state.runs.filter((run, number) => run.rows.length && !on.rows[number].length).map((run) => run.name);
    box.replaceChildren();
    if (missing.length) box.append(element("p", `no ${axes[control.x.value]} recorded by ${missing.join(", ")}`, "empty wide"));
    if (!on.places.length) box.append(element("p", "nothing logged yet", "empty wide"));
    plots = on.places.length ? state.charts.map((chart) => {
      const card = element("div", "", chart.second ? "card wide" : "card"), heading = element("h2", chart.title);
      if (chart.hint) heading.append(element("small", chart.hint));
      card.append(heading);
      box.append(card);
      return { chart, card, plot: new uPlot(options(chart, width(card)), series(chart, on), card) };
    }) : [];
    plots.forEach(({ plot }) => scale(plot));
  }

  function element(tag, text, name = "") {
    return Object.assign(document.createElement(tag), { textContent: text, className: name });
  }

  function refresh() {
    if (!plots.length) return build();
    const on = placed();
    for (const { plot, chart } of plots) {
      plot.setData(series(chart, on), false);
      scale(plot);
    }
  }

  let waiting = false;
  function soon(action) {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; action(); });
  }

  function setSmoothing(slider) {
    control.smoothing.value = slider;
    control.span.value = weight() ? `over ${short(Math.round(2 / (1 - weight()) - 1))} points` : "off";
  }

  const longest = Math.max(0, ...state.runs.map((run) => run.rows.length));
  setSmoothing(longest > 60 ? (100 / 3) * Math.log10((Math.max(8, longest / 100) + 1) / 2) : 0);
  form.addEventListener("submit", (event) => event.preventDefault());
  control.smoothing.addEventListener("input", () => { setSmoothing(control.smoothing.value); soon(refresh); });
  for (const name of ["x", "logx", "logy"]) control[name].addEventListener("change", () => { range = null; build(); });
  control.reset.addEventListener("click", () => zoom(null));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  new ResizeObserver(() => soon(() => plots.forEach(({ plot, card }) => {
    if (plot.width !== width(card)) plot.setSize({ width: width(card), height: plot.height });
  }))).observe(box);
  build();

  // The server escapes all text, and the content security policy refuses scripts in it.
  function replace(id, html) {
    const part = document.getElementById(id), open = [...part.querySelectorAll("details")].map((fold) => fold.open);
    part.innerHTML = html;
    part.querySelectorAll("details").forEach((fold, number) => { fold.open = !!open[number]; });
  }

  function update(message) {
    for (const [id, html] of Object.entries(message.parts)) replace(id, html);
    message.runs.forEach((change, number) => {
      const run = state.runs[number];
      Object.assign(run, { marks: change.marks, rows: run.rows.slice(0, change.keep).concat(change.rows) });
    });
    const same = JSON.stringify(message.charts) === JSON.stringify(state.charts);
    state.charts = message.charts;
    if (same) refresh();
    else build();
  }

  if (document.body.dataset.live) {
    const label = document.getElementById("connection"), source = new EventSource(document.body.dataset.live);
    const show = (text, name) => Object.assign(label, { hidden: false, textContent: text, className: `state ${name}` });
    source.onopen = () => show("live", "finished");
    source.onerror = () => (source.readyState === EventSource.CLOSED ? show("the server has ended", "failed") : show("reconnecting", "under"));
    source.onmessage = (event) => update(JSON.parse(event.data));
  }
})();
