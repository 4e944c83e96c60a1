"use strict";

(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const shown = new Map();
  const isNarrow = () => root.clientWidth < 640;

  // Only colours name variables of the style sheet: a text of the report that looks like one stays a text.
  const COLOR_KEYS = new Set(["color", "fillcolor", "gridcolor", "linecolor", "zerolinecolor", "bgcolor", "bordercolor"]);

  function resolved(value, style, key) {
    if (typeof value === "string") {
      return COLOR_KEYS.has(key) && value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    }
    if (Array.isArray(value)) {
      return typeof value[0] === "number" ? value : value.map((one) => resolved(one, style, key));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, resolved(one, style, name)]));
    }
    return value;
  }

  function layoutOf(view, style) {
    const text = style.getPropertyValue("--text").trim();
    const layout = {
      autosize: true,
      height: view.height,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: isNarrow() ? 11 : 13, color: text },
      hoverlabel: {
        bgcolor: style.getPropertyValue("--paper").trim(),
        bordercolor: style.getPropertyValue("--axis").trim(),
        font: { color: text },
        namelength: 40,
      },
      margin: { l: isNarrow() ? 36 : 60, r: 12, t: 12, b: 44 },
      showlegend: false,
      dragmode: matchMedia("(pointer: coarse)").matches || isNarrow() ? false : "zoom",
      ...resolved(view.layout, style, ""),
    };
    for (const name of Object.keys(layout)) {
      if (name.startsWith("xaxis") && isNarrow()) {
        layout[name] = { nticks: 5, ...layout[name] };
      }
    }
    return layout;
  }

  function draw(chart) {
    const style = getComputedStyle(root);
    const view = chart.views[shown.get(chart.id) || 0];
    const target = document.getElementById(chart.id);
    target.style.height = `${view.height}px`;
    const traces = view.traces.map((place) => resolved(chart.traces[place], style, ""));
    const config = { responsive: true, displayModeBar: false, displaylogo: false, showTips: false };
    return Plotly.react(target, traces, layoutOf(view, style), config).then(() => {
      target.dataset.drawn = "true";
    });
  }

  function showNumbers(chart) {
    for (const one of document.querySelectorAll(`[data-numbers="${chart.id}"]`)) {
      one.hidden = one.dataset.view !== String(shown.get(chart.id) || 0);
    }
  }

  function zoom(chart, action) {
    const target = document.getElementById(chart.id);
    if (action === "reset") {
      Plotly.purge(target);
      return draw(chart);
    }
    const [low, high] = target._fullLayout.xaxis.range;
    const width = high - low;
    const isCut = target._fullLayout.yaxis.visible;
    const changes = {
      in: { "xaxis.range": [low + width / 4, high - width / 4] },
      // Farther out than all of it: the whole height as well, which may be cut at first.
      out: { "xaxis.range": [low - width / 2, high + width / 2], ...(isCut ? { "yaxis.autorange": true } : {}) },
      left: { "xaxis.range": [low - width / 4, high - width / 4] },
      right: { "xaxis.range": [low + width / 4, high + width / 4] },
    };
    return Plotly.relayout(target, changes[action]);
  }

  function byId(ident) {
    return charts.find((chart) => chart.id === ident);
  }

  function remembered() {
    try {
      return localStorage.getItem("lucid-theme") || "system";
    } catch {
      return "system";
    }
  }

  function remember(name) {
    try {
      localStorage.setItem("lucid-theme", name);
    } catch {
      // Without storage the choice lasts as long as the page.
    }
  }

  function paint(name) {
    if (name === "system") {
      delete root.dataset.theme;
    } else {
      root.dataset.theme = name;
    }
  }

  async function drawAll() {
    for (const chart of charts) {
      await draw(chart);
      await new Promise((done) => setTimeout(done, 0));
    }
    root.dataset.ready = "true";
  }

  theme.value = remembered();
  paint(theme.value);
  theme.addEventListener("change", () => {
    remember(theme.value);
    paint(theme.value);
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("(max-width: 639px)").addEventListener("change", drawAll);

  for (const select of document.querySelectorAll("select[data-chart]")) {
    select.value = "0";
    select.addEventListener("change", () => {
      const chart = byId(select.dataset.chart);
      shown.set(chart.id, Number(select.value));
      Plotly.purge(document.getElementById(chart.id));
      draw(chart);
      showNumbers(chart);
    });
  }
  for (const button of document.querySelectorAll("button[data-zoom]")) {
    button.addEventListener("click", () => zoom(byId(button.dataset.chart), button.dataset.zoom));
  }
  charts.forEach(showNumbers);
  drawAll();
})();
