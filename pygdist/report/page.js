"use strict";
// Sorting, folding and copying in tables; drawing of plots, in the page's colours.
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");
  const every = (selector, within = document) => [...within.querySelectorAll(selector)];
  const figures = JSON.parse(document.getElementById("figures").textContent);

  // --- tables

  const valueOf = (body, column) => {
    const cell = body.rows[0].cells[column];
    return (cell.dataset.value ?? cell.textContent).trim();
  };

  // numbers before words, whichever way; what is missing comes last
  const compare = (a, b, way) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
    if (!isNaN(x) && !isNaN(y)) return way * (x - y);
    if (isNaN(x) !== isNaN(y)) return isNaN(x) - isNaN(y);
    return way * a.localeCompare(b, "en", { numeric: true });
  };

  const sort = (header) => {
    const way = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of header.parentElement.cells) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
    const table = header.closest("table");
    const column = header.cellIndex;
    const bodies = [...table.tBodies].map((body) => [valueOf(body, column), body]);
    bodies.sort(([a], [b]) => compare(a, b, way)); // stable: equal rows stay in their order
    table.append(...bodies.map(([, body]) => body));
  };

  const unfold = (button) => {
    const open = button.closest("tbody").querySelector("tr.more").classList.toggle("open");
    button.setAttribute("aria-expanded", open);
    button.textContent = open ? "less" : "more";
  };

  const copy = async (button) => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "copied";
    } catch { // not allowed: leave it selected, for Ctrl-C
      getSelection().selectAllChildren(code);
      button.textContent = "selected";
    }
    setTimeout(() => (button.textContent = "copy"), 2000);
  };

  every("thead button").forEach((button) => button.addEventListener("click", () => sort(button.closest("th"))));
  every(".copy").forEach((button) => button.addEventListener("click", () => copy(button)));
  every(".unfold button").forEach((button) => {
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => unfold(button));
  });

  // --- plots

  const narrow = matchMedia("(max-width: 40rem), (pointer: coarse)");
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const axis = (own, colours) => ({
    automargin: true, gridcolor: colours.line, linecolor: colours.line, zerolinecolor: colours.line,
    tickfont: { color: colours.soft }, fixedrange: narrow.matches, ...own,
    title: { ...own?.title, font: { color: colours.soft, size: 12 }, standoff: 10 },
  });

  // slanted to the left, where words are many and the page is narrow
  const slanted = (own) => (
    narrow.matches && own.categoryarray && own.categoryarray.join("").length > 30 ? { tickangle: -50 } : {});

  const layoutOf = (figure) => {
    const style = getComputedStyle(root);
    const colours = Object.fromEntries(
      ["back", "front", "soft", "line", "band"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    return {
      ...figure.layout,
      xaxis: axis({ ...figure.layout.xaxis, ...slanted(figure.layout.xaxis) }, colours), yaxis: axis(figure.layout.yaxis, colours),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colours.soft, activecolor: colours.front },
      margin: { l: 8, r: 8, t: narrow.matches ? 8 : 26, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style.fontFamily, size: 12, color: colours.front },
      hoverlabel: { bgcolor: colours.back, bordercolor: colours.soft, font: { color: colours.front, size: 12 }, align: "left" },
      hovermode: "closest", dragmode: narrow.matches ? false : "zoom", showlegend: false,
    };
  };

  const hidden = (plot) => new Set(
    every('.legend [aria-pressed="false"]', plot.closest(".box")).map((button) => button.dataset.name));

  const draw = (plot) => {
    const figure = figures[plot.dataset.figure];
    const off = hidden(plot);
    if (figure.lines) plot.style.setProperty("--lines", figure.lines);
    const front = getComputedStyle(root).getPropertyValue("--front").trim();
    const data = figure.data.map((trace) => ({
      ...trace, visible: !off.has(trace.name),
      ...(trace.type === "bar" && trace.error_y ? { error_y: { ...trace.error_y, color: front } } : {}),
    }));
    const config = {
      responsive: true, displaylogo: false, displayModeBar: narrow.matches ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], // and none that sends data elsewhere
    };
    return Plotly.react(plot, data, layoutOf(figure), config);
  };

  const showWords = (figcaption, number) => every(".words[data-of]", figcaption).forEach((words) => {
    words.hidden = words.dataset.of !== number;
  });

  const plots = every(".plot");
  plots.forEach((plot) => showWords(plot.parentElement, plot.dataset.figure));
  every(".choice select").forEach((select) => select.addEventListener("change", () => {
    const plot = select.closest("figure").querySelector(".plot");
    plot.dataset.figure = select.value;
    showWords(plot.parentElement, select.value);
    draw(plot);
  }));
  every(".legend button").forEach((button) => button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    every(".plot", button.closest(".box")).forEach(draw);
  }));

  // one after the other, such that the page can be read meanwhile
  const drawFrom = async (number) => {
    if (number === plots.length) return root.classList.add("drawn");
    await draw(plots[number]);
    setTimeout(() => drawFrom(number + 1));
  };
  drawFrom(0);
  for (const change of [dark, narrow]) change.addEventListener("change", () => plots.forEach(draw));
})();
