// What a figure gains on a screen: values under the pointer or the arrow keys, arms switched off in a legend,
// tables sorted by a column, embedded data saved as a file. Without this script every figure is still complete.
(() => {
  "use strict";
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  document.documentElement.classList.add("gf-js");

  // --- Legends: a button hides and shows its arm in every chart of the same figure. ---
  for (const button of all(".gf-legend button[data-arm]")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      const figure = button.closest("figure") || document;
      for (const part of all(`svg [data-arm="${button.dataset.arm}"]`, figure)) part.classList.toggle("gf-off", !on);
    });
  }

  // --- Read-outs: the line that is drawn is the data; pixels are turned back into values. ---
  const short = (value) => {
    const size = Math.abs(value);
    for (const [scale, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (size >= scale) return Number((value / scale).toPrecision(3)) + suffix;
    return String(Number(value.toPrecision(3)));
  };
  const value = (axis, share) => axis.log
    ? axis.low * Math.pow(axis.high / axis.low, share)
    : axis.low + share * (axis.high - axis.low);
  const vertices = (path) => {
    const numbers = (path.getAttribute("d").match(/-?[\d.]+/g) || []).map(Number);
    return numbers.flatMap((x, i) => (i % 2 ? [] : [[x, numbers[i + 1]]]));
  };
  const nearest = (points, x) => points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best));

  for (const chart of all("svg.gf-chart[data-frame]")) {
    const frame = JSON.parse(chart.dataset.frame);
    const holder = chart.parentElement;
    holder.classList.add("gf-holder");
    const tip = holder.appendChild(document.createElement("div"));
    tip.className = "gf-tip";
    tip.hidden = true;
    tip.setAttribute("aria-live", "polite");
    const cross = chart.appendChild(document.createElementNS(chart.namespaceURI, "path"));
    cross.setAttribute("class", "gf-cross");
    const lines = all(".gf-series", chart).filter((g) => g.querySelector(".gf-mean")).map((group) => ({
      group, points: vertices(group.querySelector(".gf-mean")),
    }));
    const stops = [...new Set(lines.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
    if (!stops.length) continue;
    let at = -1;

    const show = (index) => {
      at = Math.max(0, Math.min(stops.length - 1, index));
      const x = stops[at];
      cross.setAttribute("d", `M${x},${frame.top}V${frame.bottom}`);
      tip.replaceChildren();
      const head = tip.appendChild(document.createElement("strong"));
      head.textContent = `${short(value(frame.x, (x - frame.left) / (frame.right - frame.left)))} ${frame.x.unit}`;
      const rows = [];
      for (const { group, points } of lines) {
        if (group.classList.contains("gf-off") || !points.length) continue;
        const reach = points.length > 1 ? (frame.right - frame.left) / 40 : 4;
        const p = nearest(points, x);
        if (Math.abs(p[0] - x) > reach && (x > points[points.length - 1][0] || x < points[0][0])) continue;
        rows.push([value(frame.y, (frame.bottom - p[1]) / (frame.bottom - frame.top)), group]);
      }
      for (const [y, group] of rows.sort((a, b) => a[0] - b[0])) {
        const row = tip.appendChild(document.createElement("div"));
        row.className = [...group.classList].filter((name) => /^gf-c\d/.test(name)).join(" ");
        row.appendChild(document.createElement("span")).textContent = group.dataset.label;
        row.appendChild(document.createElement("b")).textContent = y.toFixed(frame.y.decimals).replace("-", "−");
      }
      tip.hidden = false;
      const place = chart.getBoundingClientRect();
      const left = (x / chart.viewBox.baseVal.width) * place.width;
      tip.style.left = left < place.width / 2
        ? `${left + 14}px`
        : `${Math.max(0, left - 14 - tip.offsetWidth)}px`;
    };
    const hide = () => {
      tip.hidden = true;
      cross.removeAttribute("d");
    };

    chart.addEventListener("pointermove", (event) => {
      const place = chart.getBoundingClientRect();
      const x = ((event.clientX - place.left) / place.width) * chart.viewBox.baseVal.width;
      if (x < frame.left - 10 || x > frame.right + 10) return hide();
      show(stops.indexOf(nearest(stops.map((s) => [s]), x)[0]));
    });
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.setAttribute("tabindex", "0");
    chart.setAttribute("aria-description", "Left and right arrow keys read the values; Escape closes the read-out.");
    chart.addEventListener("keydown", (event) => {
      const step = event.shiftKey ? 10 : 1;
      const next = { ArrowRight: at + step, ArrowLeft: at - step, Home: 0, End: stops.length - 1 }[event.key];
      if (event.key === "Escape") hide();
      if (next === undefined) return;
      event.preventDefault();
      show(next);
    });
  }

  // --- Tables: a click on a heading sorts by it; what has no number stays at the end. ---
  for (const table of all("table.gf-sortable")) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.sort ?? "";
        const order = (a, b) => {
          const [left, right] = [key(a), key(b)];
          if (left === "" || right === "") return (left === "") - (right === "");
          const difference = Number.isNaN(+left) || Number.isNaN(+right) ? left.localeCompare(right) : left - right;
          return down ? -difference : difference;
        };
        const body = table.tBodies[0];
        body.append(...[...body.rows].sort(order));
      });
    });
  }

  // --- Commands: a button copies the command beside it, and says so. ---
  for (const button of all("button[data-copy]")) {
    const copy = async () => {
      if (navigator.clipboard) return navigator.clipboard.writeText(button.dataset.copy);
      getSelection().selectAllChildren(button.previousElementSibling);
      if (!document.execCommand("copy")) throw new Error("the browser does not copy");
    };
    const say = (words) => {
      button.textContent = words;
      setTimeout(() => (button.textContent = "Copy"), 2000);
    };
    button.setAttribute("aria-live", "polite");
    button.addEventListener("click", () => copy().then(() => say("Copied"), () => say("Press Ctrl+C")));
    button.hidden = false;
  }

  // --- Wide tables: a line above says that there is more to the side. ---
  for (const box of all(".gf-scroll")) {
    const hint = document.createElement("p");
    hint.className = "gf-more";
    hint.setAttribute("aria-hidden", "true");
    box.before(hint);
    const look = () => {
      hint.hidden = box.scrollWidth <= box.clientWidth + 1;
      hint.textContent = box.scrollLeft + box.clientWidth >= box.scrollWidth - 1 ? "← Scroll back" : "Scroll for more columns →";
    };
    box.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(box);
    look();
  }

  // --- Contents: the section that is being read is marked. ---
  const links = all("nav a[href^='#']").filter((a) => document.getElementById(a.hash.slice(1)));
  if (links.length && window.IntersectionObserver) {
    const seen = new Set();
    const mark = () => {
      const first = links.find((a) => seen.has(a.hash));
      if (!first) return;
      for (const a of links) a === first ? a.setAttribute("aria-current", "true") : a.removeAttribute("aria-current");
    };
    const observer = new IntersectionObserver((entries) => {
      for (const e of entries) seen[e.isIntersecting ? "add" : "delete"](`#${e.target.querySelector("h2").id}`);
      mark();
    }, { rootMargin: "-70px 0px -40% 0px" });
    for (const a of links) observer.observe(document.getElementById(a.hash.slice(1)).closest("section"));
  }

  // --- Downloads: a link that offers the JSON embedded in the page. ---
  for (const link of all("a[data-download]")) {
    const source = document.getElementById(link.dataset.download);
    if (!source) continue;
    link.href = URL.createObjectURL(new Blob([source.textContent], { type: "application/json" }));
    link.hidden = false;
  }
})();
