"use strict";
// The charts of the overview. Draws again what changed, once for each frame at most; colours are those of the page.
(() => {
  const points = new Map();
  let vitals = [];
  let edition = -1;
  let newest = null;
  const plots = new Map();
  const shapes = new Map();
  const HEIGHT = 170;
  const FROM_0 = {x: {time: false}, y: {range: (_, __, most) => [0, most * 1.1 || 1]}};
  let jobs = [];
  let asked = false;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const line = (label, at, more) => ({
    label, stroke: colour("--c" + (1 + (at % 6))), width: 2, points: {size: 4}, ...more,
    value: (_, value) => value === null || value === undefined ? "" : Number(value.toPrecision(4)).toLocaleString("en"),
  });
  const bytes = (value) => value >= 2 ** 20 ? (value / 2 ** 20).toFixed(1) + " MiB" : Math.round(value / 1024) + " KiB";

  function axes(x, y, more) {
    const style = {stroke: colour("--dim"), grid: {stroke: colour("--grid")}, ticks: {stroke: colour("--grid")}};
    return [{...style, ...x}, {...style, size: 62, ...y}, ...(more || []).map((each) => ({...style, ...each}))];
  }

  // What is to be drawn is noted first: a figure's width is known once all that have something are shown.
  function draw(name, series, data, options) {
    const figure = document.querySelector(`[data-chart="${name}"]`);
    if (!figure) return;
    figure.hidden = !data[0].length;
    if (!figure.hidden) jobs.push([figure.querySelector(".plot"), name, series, data, options]);
  }

  function drawn(box, name, series, data, options) {
    const shape = series.map((each) => each.label).join("|");
    const plot = plots.get(name);
    if (plot && shapes.get(name) === shape) {
      plot.setData(data);
      return;
    }
    if (plot) plot.destroy();
    shapes.set(name, shape);
    const made = new uPlot({
      width: Math.max(200, box.clientWidth), height: HEIGHT,
      scales: {x: {time: false}}, series: [{label: "round"}, ...series], axes: axes(), cursor: {y: false}, ...options,
    }, data, box);
    plots.set(name, made);
  }

  function rounds() {
    const all = [...points.values()].sort((a, b) => a.round - b.round);
    const x = all.map((each) => each.round);
    const whole = {values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? tick : "")};
    const scored = all.some((each) => each.score !== null || each.loss !== null || each.train_loss !== null);
    draw("score", [line(newest.metric, 0, {spanGaps: true}), line("loss", 1, {scale: "loss", spanGaps: true}),
      line("training loss", 3, {scale: "loss", spanGaps: true, dash: [5, 4]})],
      [scored ? x : [], all.map((each) => each.score), all.map((each) => each.loss), all.map((each) => each.train_loss)],
      {axes: axes(whole, {}, [{side: 1, scale: "loss", size: 50, grid: {show: false}}])});
    draw("fates", [line("selected", 0), line("arrived", 2), line("without", 1), line("late", 3)],
      [x, all.map((each) => each.selected),
        ...["arrived", "lacking", "late"].map((name) => all.map((each) => each.over ? each[name] : null))],
      {axes: axes(whole)});
    const tiers = [...new Set(all.flatMap((each) => Object.keys(each.tiers)))].sort();
    const of = (tier, at) => all.map((each) => each.over && each.tiers[tier] ? each.tiers[tier][at] : null);
    draw("time", tiers.map((tier, at) => line(tier || "none", at, {spanGaps: true})),
      [x, ...tiers.map((tier) => of(tier, 0))], {axes: axes(whole)});
    const up = tiers.map((tier, at) => line(`${tier || "none"} up`, at));
    const down = tiers.map((tier, at) => line(`${tier || "none"} down`, at, {dash: [5, 4]}));
    draw("bytes", [...up, ...down], [x, ...tiers.map((tier) => of(tier, 1)), ...tiers.map((tier) => of(tier, 2))],
      {axes: axes(whole, {values: (_, ticks) => ticks.map(bytes), size: 74})});
  }

  function bars(name, label, histogram) {
    const x = histogram.counts.map((_, at) => histogram.low + histogram.width * (at + 0.5));
    const filled = {fill: colour("--c1") + "66", paths: uPlot.paths.bars({size: [0.95, 60]}), points: {show: false}};
    draw(name, [line("devices", 0, filled)], [x, histogram.counts],
      {series: [{label}, line("devices", 0, filled)], axes: axes({}, {}), scales: FROM_0});
  }

  function all() {
    asked = false;
    if (!newest) return;
    rounds();
    bars("seconds", "seconds", newest.seconds);
    bars("step", "milliseconds", newest.step_ms);
    const stale = Object.entries(newest.staleness);
    const filled = {fill: colour("--c4") + "66", paths: uPlot.paths.bars({size: [0.6, 60]}), points: {show: false}};
    draw("staleness", [line("updates", 3, filled)], [stale.map(([key]) => Number(key)), stale.map(([, value]) => value)],
      {series: [{label: "versions"}, line("updates", 3, filled)], scales: FROM_0});
    draw("lag", [line("server", 0), line("broker", 3, {spanGaps: true})],
      [vitals.map((each) => each.at), vitals.map((each) => each.server_lag_s),
        vitals.map((each) => each.broker_lag_s < 0 ? null : each.broker_lag_s)],
      {scales: {x: {time: true}}, series: [{label: "time"}, line("server", 0), line("broker", 3, {spanGaps: true})]});
  }

  function allDrawn() {
    all();
    for (const job of jobs) drawn(...job);
    jobs = [];
  }

  function soon() {
    if (!asked) requestAnimationFrame(allDrawn);
    asked = true;
  }

  function anew() {
    for (const plot of plots.values()) plot.destroy();
    plots.clear();
    shapes.clear();
    soon();
  }

  window.edgeflCharts = (charts) => {
    if (charts.edition !== edition) {
      points.clear();
      vitals = [];
      edition = charts.edition;
    }
    for (const point of charts.points) points.set(point.round, point);
    vitals = [...vitals, ...charts.vitals].slice(-720);
    newest = charts;
    soon();
  };

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", anew);
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) {
      width = document.body.clientWidth;
      anew();
    }
  }).observe(document.body);
})();
