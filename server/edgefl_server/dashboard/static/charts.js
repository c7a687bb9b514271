"use strict";
// Charts of the overview. Draws again what changed, at most once per frame; colours are those of the page.
(() => {
  const points = new Map();
  let vitals = [];
  let edition = -1;
  let newest = null;
  const plots = new Map();
  const shapes = new Map();
  const HEIGHT = 190;
  const NARROWEST = 290;
  const SHARES = ["accuracy", "f1", "iou"];
  const WHOLE = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  const BINARY = [...Array(40).keys()].map((power) => 2 ** power);
  const SHARE = {range: [0, 1]};
  const AMOUNT = {range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.05 : 1]};
  const BARS = {time: false, range: (_, low, high) => [low - 0.5, high + 0.5]};
  let jobs = [];
  let asked = false;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const text = (value) => value === null || value === undefined ? "" : Number(value.toPrecision(4)).toLocaleString("en");
  const bytes = (value) => value >= 2 ** 20 ? `${text(value / 2 ** 20)} MiB` : `${text(value / 1024)} KiB`;
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
  const line = (label, at, more) => ({
    label, stroke: colour("--c" + (1 + (at % 6))), width: 2, points: {size: 4}, spanGaps: true, value: (_, value) => text(value), ...more,
  });
  const dots = (label, at) => line(label, at, {width: 0, paths: () => null, points: {show: true, size: 7, fill: colour("--c" + (1 + at))}});
  const bars = (label, at, more) => {
    const fill = colour(at ? "--c" + at : "--line");
    return line(label, 0, {stroke: fill, fill, width: 0, paths: uPlot.paths.bars({size: [0.85, 60]}), points: {show: false}, ...more});
  };

  function axes(x, y, {xs = {}, ys = {}} = {}) {
    const style = {stroke: colour("--dim"), grid: {stroke: colour("--grid")}, ticks: {stroke: colour("--grid")}, labelSize: 18,
      labelGap: 0, labelFont: "12px system-ui, sans-serif"};
    return [{...style, label: x, size: 30, ...xs}, {...style, label: y, size: 54, ...ys}];
  }

  // Without a cursor the legend shows the newest value of each series.
  function showNewest(plot) {
    const last = plot.data.slice(1).map((values) => values.findLastIndex((value) => typeof value === "number"));
    const newest = Math.max(...last);
    if (plot.legend.idx !== null || newest < 0) return;
    plot.setLegend({idxs: [newest, ...last.map((at) => at < 0 ? newest : at)]}, false);
  }

  // Charts are drawn after all are collected: a figure's width depends on how many are shown.
  function draw(name, series, data, options) {
    const figure = document.querySelector(`[data-chart="${name}"]`);
    if (!figure) return;
    figure.hidden = !data[0].length;
    if (!figure.hidden) jobs.push([figure.querySelector(".plot"), name, series, data, options]);
  }

  function drawn(box, name, series, data, options) {
    const shape = series.map((each) => each.label).join("|");
    const plot = plots.get(name);
    const width = Math.max(200, box.clientWidth);
    if (plot && shapes.get(name) === shape) {
      if (plot.width !== width) plot.setSize({width, height: HEIGHT});
      plot.setData(data);
      return;
    }
    if (plot) plot.destroy();
    shapes.set(name, shape);
    const {x = "round", scales, legend = true, ...more} = options;
    box.plot = new uPlot({
      width, height: HEIGHT, cursor: {y: false}, scales: {x: {time: false}, ...scales},
      series: [{label: x, value: (_, value) => scales?.x?.time && value ? clock(value) : text(value)}, ...series], hooks: {setLegend: [showNewest]},
      legend: {show: legend, markers: {dash: (plot, at) => plot.series[at].dash ? "dashed" : "solid"}}, ...more,
    }, data, box);
    plots.set(name, box.plot);
  }

  // Columns that fit, so many that no chart is alone in the last row; if that cannot be, the last one takes the row.
  function arrange() {
    const grid = document.querySelector(".charts");
    const shown = [...grid.children].filter((figure) => !figure.hidden);
    const fit = Math.max(1, Math.floor(grid.clientWidth / NARROWEST));
    let columns = fit;
    while (columns > 1 && shown.length % columns === 1) columns -= 1;
    if (columns === 1) columns = fit;
    grid.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    for (const figure of shown) figure.style.gridColumn = "";
    if (shown.length % columns === 1) shown.at(-1).style.gridColumn = "1 / -1";
  }

  function rounds() {
    const all = [...points.values()].sort((a, b) => a.round - b.round);
    const x = all.map((each) => each.round);
    const of = (read) => all.map((each) => read(each) ?? null);
    const having = (...names) => all.some((each) => names.some((name) => each[name] !== null)) ? x : [];
    const xs = {incrs: WHOLE};
    const marks = [["devices", 2], ["median device", 4], ["worst decile", 1]];
    const evaluated = all.some((each) => each.devices) ? marks : [];
    draw("score", [line(evaluated.length ? `${newest.metric}, test data` : newest.metric, 0), ...evaluated.map(([label, at]) => dots(label, at))],
      [newest.metric === "loss" ? [] : having("score", "devices"), of((each) => each.score),
        ...evaluated.map((_, at) => of((each) => each.devices?.[at]))],
      {axes: axes("round", newest.metric, {xs}), scales: {y: SHARES.includes(newest.metric) ? SHARE : {}}});
    draw("loss", [line("test", 0), line("training", 3, {dash: [5, 4]})],
      [having("loss", "train_loss"), of((each) => each.loss), of((each) => each.train_loss)],
      {axes: axes("round", "loss", {xs}), scales: {y: AMOUNT}});
    // Each bar hides the lower part of the one before it; the legend has the differences.
    const part = (plot, value, at, index) => index === null ? "" : text(value - (plot.data[at + 1]?.[index] ?? 0));
    const parts = [["working", 0], ["without an update", 2], ["late", 4], ["arrived", 3]];
    draw("fates", parts.map(([label, at]) => bars(label, at, {value: part})),
      [x, of((each) => Math.max(each.selected, each.arrived + each.late)),
        of((each) => each.over ? Math.max(each.selected, each.arrived + each.late) : each.arrived + Math.max(each.late, each.lacking)),
        of((each) => each.arrived + each.late), of((each) => each.arrived)],
      {axes: axes("round", "devices", {xs, ys: {incrs: WHOLE}}), scales: {x: BARS, y: AMOUNT}});
    const tiers = [...new Set(all.flatMap((each) => Object.keys(each.tiers)))].sort();
    const trained = (each) => each.over && !each.evaluates;
    const figures = (at) => tiers.map((tier) => of((each) => trained(each) && each.tiers[tier] ? each.tiers[tier][at] : null));
    const lines = (suffix, more) => tiers.map((tier, at) => line((tier || "none") + suffix, at, more));
    draw("time", lines(""), [x, ...figures(0)], {axes: axes("round", "seconds", {xs}), scales: {y: AMOUNT}});
    const sized = {value: (_, value) => value === null ? "" : bytes(value)};
    draw("bytes", [...lines(" up", sized), ...lines(" down", {...sized, dash: [5, 4]})], [x, ...figures(1), ...figures(2)],
      {axes: axes("round", "payload", {xs, ys: {incrs: BINARY, values: (_, marks) => marks.map(bytes), size: 66}}), scales: {y: AMOUNT}});
  }

  function histogram(name, unit, {low, width, counts}) {
    const scales = {x: {time: false, range: [low, low + width * counts.length]}, y: AMOUNT};
    draw(name, [bars("devices", 1)], [counts.map((_, at) => low + width * (at + 0.5)), counts],
      {x: unit, scales, legend: false, axes: axes(unit, "devices", {ys: {incrs: WHOLE}})});
  }

  function all() {
    asked = false;
    if (!newest) return;
    rounds();
    histogram("seconds", "seconds", newest.seconds);
    histogram("step", "milliseconds", newest.step_ms);
    draw("lag", [line("server", 0), line("broker", 3)],
      [vitals.map((each) => each.at), vitals.map((each) => each.server_lag_s),
        vitals.map((each) => each.broker_lag_s < 0 ? null : each.broker_lag_s)],
      {x: "time", axes: axes("time", "seconds", {xs: {space: 70, values: (_, marks) => marks.map(clock)}}), scales: {x: {time: true}, y: AMOUNT}});
    const stale = Object.entries(newest.staleness);
    draw("staleness", [bars("updates", 4)], [stale.map(([key]) => Number(key)), stale.map(([, value]) => value)],
      {x: "versions behind", scales: {x: BARS, y: AMOUNT}, legend: false,
        axes: axes("versions behind", "updates", {xs: {incrs: WHOLE}, ys: {incrs: WHOLE}})});
  }

  function allDrawn() {
    all();
    if (jobs.length) arrange();
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
