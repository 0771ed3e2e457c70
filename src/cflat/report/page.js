"use strict";
(() => {
  const root = document.documentElement;
  const darkColors = JSON.parse(document.getElementById("dark-colors").textContent);
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")];
  const MANY = 8;
  const NARROW = 560;

  // A page opened as a file may be refused storage; the choice then lasts as long as the page.
  const memory = {
    read() { try { return localStorage.getItem("cflat-theme"); } catch { return null; } },
    write(value) { try { localStorage.setItem("cflat-theme", value); } catch { /* not remembered */ } },
  };
  const remembered = memory.read();
  if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);

  // Charts: the stored colours are those of a light page.
  const themed = (text) => {
    if (!isDark()) return text;
    return text.replace(/#[0-9a-f]{6}/g, (color) => darkColors[color] ?? color);
  };
  const sources = new Map(plots.map((plot) => [
    plot, [...document.querySelectorAll(`script[data-figure="${plot.id}"]`)].map((script) => script.textContent),
  ]));
  const config = {
    displaylogo: false, responsive: true, displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };
  const drawn = new Set();
  const count = () => {
    document.body.dataset.charts = plots.length;
    document.body.dataset.drawn = drawn.size;
  };
  const isNarrow = (plot) => plot.clientWidth < NARROW;
  const draw = (plot) => {
    const figure = JSON.parse(themed(sources.get(plot)[Number(plot.dataset.choice ?? 0)]));
    plot.dataset.narrow = isNarrow(plot);
    const layout = isNarrow(plot) ? figure.narrow : figure.wide;
    return Plotly.react(plot, figure.data, layout, config).then(() => { drawn.add(plot); count(); });
  };
  const drawAll = () => Promise.all(plots.map(draw));
  const redraw = () => drawn.forEach(draw);
  count();
  if (plots.length <= MANY) {
    plots.forEach(draw);
  } else {
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries.filter((entry) => entry.isIntersecting)) {
        seen.unobserve(entry.target);
        draw(entry.target);
      }
    }, { rootMargin: "400px" });
    plots.forEach((plot) => seen.observe(plot));
  }
  addEventListener("beforeprint", drawAll);
  addEventListener("resize", () => drawn.forEach((plot) => {
    if (String(isNarrow(plot)) !== plot.dataset.narrow) draw(plot);
  }));
  document.querySelectorAll("select[data-chart]").forEach((select) => select.addEventListener("change", () => {
    const plot = document.getElementById(select.dataset.chart);
    plot.dataset.choice = select.value;
    draw(plot);
  }));

  // Light and dark.
  const button = document.getElementById("theme");
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  label();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    memory.write(root.dataset.theme);
    label();
    redraw();
  });
  systemDark.addEventListener("change", () => { label(); redraw(); });

  // Tables: a click sorts, the next turns the order round.
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  const order = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a === typeof b) return a.localeCompare(b, undefined, { numeric: true });
    return typeof a === "number" ? -1 : 1;
  };
  document.querySelectorAll("table").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort((a, b) => sign * order(key(a, column), key(b, column))));
    }));
  });

  // The filter hides rows of runs, and their commands, that lack one of the words.
  const input = document.querySelector(".filter input");
  input?.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const items = [...document.querySelectorAll("table[data-filtered] tbody tr, [data-filter]")];
    for (const item of items) {
      const text = item.textContent.toLowerCase();
      item.hidden = !words.every((word) => text.includes(word));
    }
    const rows = items.filter((item) => item.matches("tr"));
    const shown = rows.filter((row) => !row.hidden).length;
    document.querySelector("[data-count]").textContent = words.length ? `${shown} of ${rows.length}` : "";
  });

  // Copying; without the clipboard of a secure page, the text is selected and copied the old way.
  document.querySelectorAll(".copy").forEach((copy) => copy.addEventListener("click", async () => {
    const code = copy.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  }));

  window.cflatReport = { drawAll, numPlots: plots.length };
})();
