// The inspection at work: one state (token, layer, head), and everything on the page drawn from it.
(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  document.documentElement.classList.add("gf-busy");
  const data = JSON.parse($("inspection").textContent);
  const length = data.words.length;
  const depths = data.layers.length + 1;
  const state = { ...data.start, shade: "at", measure: "maps" };
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const finite = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
  const percent = (share) => {
    if (share > 0 && share < 0.001) return "< 0.1\u00a0%";
    return `${share && share < 0.0995 ? (100 * share).toPrecision(2) : Math.round(100 * share)}\u00a0%`;
  };
  const depthName = (depth) => (depth ? `layer ${depth - 1}` : "embedding");

  const make = (name, className, words) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (words !== undefined) element.textContent = words;
    return element;
  };
  const bare = (words) => words.trim() || "␣";
  const chip = (words) => make("bdi", "chip", words);

  // --- Arrays: base64, deflated; shares are codes whose square is the value, bfloat16 is half a float32. ---
  const unpack = async () => {
    const text = atob(data.bytes);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    const kinds = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array };
    return Object.fromEntries(Object.entries(data.arrays).map(([name, [kind, first, count]]) => {
      const Kind = kinds[kind];
      return [name, new Kind(buffer.slice(first, first + count * Kind.BYTES_PER_ELEMENT))];
    }));
  };
  const roots = (codes, from, to) => {
    const top = codes.BYTES_PER_ELEMENT === 1 ? 255 : 65535;
    return Float32Array.from(codes.subarray(from, to), (code) => code / top);
  };
  const shareOf = (codes, index) => (codes[index] / (codes.BYTES_PER_ELEMENT === 1 ? 255 : 65535)) ** 2;
  const floats = (halves) => {
    const whole = new Uint32Array(halves.length);
    for (let i = 0; i < halves.length; i++) whole[i] = halves[i] << 16;
    return new Float32Array(whole.buffer);
  };

  // --- Colours: ramps of the stylesheet as 256 shades, read again when light turns dark. `ink` is a shade as the four
  // bytes of a pixel. ---
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ramp = (name) => {
    const stops = style(name).split(",").map((stop) => [1, 3, 5].map((i) => parseInt(stop.trim().slice(i, i + 2), 16)));
    const table = Array.from({ length: 256 }, (_, i) => {
      const place = (i / 255) * (stops.length - 1);
      const low = Math.min(Math.floor(place), stops.length - 2);
      return stops[low].map((value, channel) => Math.round(value + (stops[low + 1][channel] - value) * (place - low)));
    });
    table.ink = new Uint32Array(new Uint8ClampedArray(table.flatMap((colour) => [...colour, 255])).buffer);
    return table;
  };
  let colours = {};
  const readColours = () => {
    colours = { look: ramp("--ramp-look"), lens: ramp("--ramp-lens") };
    for (const name of ["ink", "muted", "line", "paper", "panel", "rule"]) colours[name] = style(`--gf-${name}`);
    colours.mark = style("--mark");
    colours.font = style("--gf-sans");
    pictures.clear();
  };
  const css = (colour) => `rgb(${colour.join(" ")})`;
  const shade = (table, value) => table[Math.round(255 * clamp(value || 0, 0, 1))];
  const drawn = (columns, rows, table, value) => {
    const picture = make("canvas");
    [picture.width, picture.height] = [columns, rows];
    const pixels = new ImageData(columns, rows);
    const inks = new Uint32Array(pixels.data.buffer);
    for (let i = 0; i < inks.length; i++) inks[i] = table.ink[Math.round(255 * clamp(value(i) || 0, 0, 1))];
    picture.getContext("2d").putImageData(pixels, 0, 0);
    return picture;
  };
  const dark = (colour) => colour[0] * 0.299 + colour[1] * 0.587 + colour[2] * 0.114 < 140;

  // --- Attention: square roots of weights, of one head or of the mean over the heads of a layer. ---
  let arrays = {};
  const sizes = {};
  const kept = (store, key, compute, most = 64) => {
    if (!store.has(key)) {
      if (store.size >= most) store.delete(store.keys().next().value);
      store.set(key, compute());
    }
    return store.get(key);
  };
  const means = new Map();
  const pictures = new Map();
  const mapOf = (layer, head) => {
    const { heads, rows, columns } = data.layers[layer];
    const codes = arrays[`map${layer}`];
    const size = rows * columns;
    if (head >= 0) return roots(codes, head * size, (head + 1) * size);
    return kept(means, layer, () => {
      const sum = new Float32Array(size);
      for (let i = 0; i < heads * size; i++) sum[i % size] += shareOf(codes, i);
      return sum.map((value) => Math.sqrt(value / heads));
    }, 8);
  };
  // The weights of a tile are small: many keys share it. A lower power keeps them in sight.
  const visibly = (layer) => (data.layers[layer].tile > 1 ? (root) => root ** 0.6 : (root) => root);
  const pictureOf = (layer, head) => kept(pictures, `${layer} ${head}`, () => {
    const { rows, columns } = data.layers[layer];
    const map = mapOf(layer, head);
    const power = visibly(layer);
    return drawn(columns, rows, colours.look, (i) => power(map[i]));
  }, 600);
  const span = (tile, size) => [tile * size, Math.min((tile + 1) * size, length) - 1];

  // What a token looks at, or what looks at it: a shade for each token, and the strongest by name.
  const LEAST = 0.001;
  const looks = (token, back) => {
    const shades = new Float32Array(length);
    const named = [];
    const layer = data.layers[state.layer];
    if (!layer) return { shades, named };
    const { rows, columns, tile, keep } = layer;
    const map = mapOf(state.layer, state.head);
    const own = Math.floor(token / tile);
    const count = back ? rows : columns;
    for (let i = 0; i < count; i++) {
      const root = back ? map[i * columns + own] : map[own * columns + i];
      const [first, last] = span(i, tile);
      // Each key of a tile has its share of the weight; twice as dark, and never as dark as a key known by name.
      shades.fill(tile > 1 ? Math.min(0.4, (2 * root) / Math.sqrt(tile)) : root, first, last + 1);
      if (root * root >= LEAST) named.push({ first, last, weight: root * root });
    }
    if (keep && state.head >= 0) {
      const keys = arrays[`keys${state.layer}`];
      const weights = arrays[`weights${state.layer}`];
      const base = state.head * length * keep;
      const take = (at, other) => {
        const weight = shareOf(weights, at);
        if (weight < LEAST) return;
        shades[other] = Math.max(shades[other], 0.2 + 0.8 * Math.sqrt(weight));
        named.push({ first: other, last: other, weight, exact: true });
      };
      if (back) {
        for (let i = 0; i < length * keep; i++) if (keys[base + i] === token) take(base + i, Math.floor(i / keep));
      } else {
        for (let i = 0; i < keep; i++) take(base + token * keep + i, keys[base + token * keep + i]);
      }
    }
    named.sort((a, b) => !!b.exact - !!a.exact || b.weight - a.weight);
    return { shades, named };
  };

  // --- The text. ---
  const strip = $("strip");
  const bench = strip.parentElement;
  const tokens = [...strip.querySelectorAll("span")];
  const painted = new Uint8Array(length);
  let marked = -1;
  const paint = (token) => {
    if (state.shade === "surprise") return;
    const { shades } = looks(token, state.shade === "by");
    for (let i = 0; i < length; i++) {
      const level = Math.round(50 * shades[i]);
      if (level === painted[i]) continue;
      painted[i] = level;
      tokens[i].style.setProperty("--a", level / 50);
    }
  };
  const markToken = () => {
    if (marked >= 0) tokens[marked].setAttribute("aria-selected", "false");
    const element = tokens[marked = state.token];
    element.setAttribute("aria-selected", "true");
    strip.setAttribute("aria-activedescendant", element.id);
    const [box, pane] = [element.getBoundingClientRect(), strip.getBoundingClientRect()];
    if (box.top < pane.top + 4) strip.scrollTop += box.top - pane.top - 24;
    else if (box.bottom > pane.bottom - 4) strip.scrollTop += box.bottom - pane.bottom + 24;
  };
  const lossOf = (token) => {
    const place = data.causal ? token - 1 : token;
    return place < 0 ? NaN : arrays.loss[(depths - 1) * length + place];
  };
  const best = (depth, place, rank = 0) => {
    const at = (depth * length + place) * data.k + rank;
    return { word: data.table[arrays.top[at]], id: data.tableIds[arrays.top[at]], share: shareOf(arrays.shares, at) };
  };
  const paid = (token) => {
    const loss = lossOf(token);
    if (!Number.isFinite(loss)) return "nothing came before it";
    return `cost ${loss.toFixed(2)} nats, given ${percent(Math.exp(-loss))}`;
  };

  // --- The read-out that follows the pointer, or the place that the arrow keys chose. ---
  const tip = document.body.appendChild(make("div", "tip"));
  tip.hidden = true;
  tip.setAttribute("role", "status");
  const say = (lines, x, y) => {
    tip.replaceChildren(...lines.map((parts) => {
      const line = make("div");
      line.append(...parts);
      return line;
    }));
    tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tip;
    const right = document.documentElement.clientWidth;
    tip.style.left = `${clamp(x + 14 + width > right ? x - width - 14 : x + 14, 4, Math.max(4, right - width - 4))}px`;
    tip.style.top = `${y + 18 + height > window.innerHeight ? Math.max(4, y - height - 12) : y + 18}px`;
  };
  const hush = () => (tip.hidden = true);
  window.addEventListener("scroll", hush, { passive: true });
  const tokenLines = (token) => {
    const said = best(depths - 1, token);
    return [
      [chip(data.words[token]), ` token ${token}, id ${data.ids[token]}`],
      [paid(token)],
      [data.causal ? "next, it expects " : "it would say ", chip(said.word), ` ${percent(said.share)}`],
    ];
  };
  const named = (first, last) =>
    first === last ? [chip(data.words[first]), ` ${first}`] : [`tokens ${first}–${last}`];

  let hovered = -1;
  const hover = (token) => {
    if (token === hovered) return;
    hovered = token;
    requestAnimationFrame(() => hovered === token && paint(token < 0 ? state.token : token));
  };
  const wireStrip = () => {
    strip.tabIndex = 0;
    strip.setAttribute("role", "listbox");
    tokens.forEach((element, i) => {
      element.index = i;
      element.id = `t${i}`;
      element.setAttribute("role", "option");
    });
    strip.addEventListener("pointerover", (event) => {
      const token = event.target.index;
      if (token === undefined) return;
      const box = event.target.getBoundingClientRect();
      say(tokenLines(token), box.left, box.bottom - 10);
      hover(token);
    });
    strip.addEventListener("pointerleave", () => (hush(), hover(-1)));
    strip.addEventListener("scroll", hush, { passive: true });
    strip.addEventListener("click", (event) => event.target.index !== undefined && pick({ token: event.target.index }));
    strip.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, PageUp: -100, PageDown: 100 };
      const step = steps[event.key];
      const next = { Home: 0, End: length - 1 }[event.key] ?? (step && state.token + step);
      if (next === undefined) return;
      event.preventDefault();
      pick({ token: next });
    });
  };

  // --- Pictures made of cells: the pointer or the arrow keys read one, a click or Enter picks it. ---
  const scaled = (canvas, width, height) => {
    const ratio = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.textBaseline = "middle";
    return pen;
  };
  const place = (element, ...box) =>
    ["left", "top", "width", "height"].forEach((side, i) => (element.style[side] = `${box[i]}px`));
  const cells = (canvas, { grid, lines, pick: chosen, start, moved }) => {
    const holder = canvas.parentElement;
    const cursor = holder.appendChild(make("div", "cursor"));
    cursor.hidden = true;
    let at = null;
    const show = (column, row) => {
      const { left, top, width, height, columns, rows } = grid();
      at = [clamp(column, 0, columns - 1), clamp(row, 0, rows - 1)];
      const [w, h] = [width / columns, height / rows];
      place(cursor, left + at[0] * w, top + at[1] * h, Math.max(w, 3), Math.max(h, 3));
      cursor.hidden = false;
      return cursor.getBoundingClientRect();
    };
    const leave = () => {
      cursor.hidden = true;
      hush();
      hover(-1);
    };
    const under = (event) => {
      const { left, top, width, height, columns, rows } = grid();
      const box = canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left - left, event.clientY - box.top - top];
      return x < 0 || y < 0 || x >= width || y >= height
        ? null : [Math.floor((x / width) * columns), Math.floor((y / height) * rows)];
    };
    canvas.addEventListener("pointermove", (event) => {
      const cell = under(event);
      if (!cell) return leave();
      show(...cell);
      say(lines(...cell), event.clientX, event.clientY);
      moved?.(...cell);
    });
    canvas.addEventListener("pointerleave", leave);
    canvas.addEventListener("blur", leave);
    canvas.addEventListener("click", (event) => {
      const cell = under(event);
      if (cell) chosen(...cell);
    });
    canvas.addEventListener("keydown", (event) => {
      const [x, y] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] || [];
      if (event.key === "Escape") return leave();
      if ((event.key === "Enter" || event.key === " ") && at) {
        event.preventDefault();
        return chosen(...at);
      }
      if (x === undefined) return;
      event.preventDefault();
      const far = event.shiftKey ? 10 : 1;
      const [column, row] = at && !cursor.hidden ? at : start();
      const box = show(column + x * far, row + y * far);
      say(lines(...at), box.right, box.bottom);
      moved?.(...at);
    });
  };

  // --- All heads. ---
  const overview = $("overview");
  let overviewGrid = {};
  const headFacts = new Map(data.heads.map(([layer, head, ...values]) => [`${layer} ${head}`, values]));
  const measureIndex = () => data.measures.findIndex(([name]) => name === state.measure);
  const span01 = (index) => {
    if (index < data.measures.length - 1) return [0, 1];
    const values = data.heads.map((row) => row[2 + index]).filter(Number.isFinite);
    return [Math.min(0, ...values), Math.max(1e-9, ...values)];
  };
  const drawOverview = () => {
    if (!overview) return;
    const columns = data.layers.length;
    const rows = Math.max(...data.layers.map((layer) => layer?.heads ?? 0));
    const [left, top] = [30, 22];
    const room = sizes.overview - left - 2;
    const cell = clamp(Math.min(Math.floor(room / columns), Math.max(14, Math.floor(560 / rows))), 10, 96);
    overviewGrid = { left, top, width: cell * columns, height: cell * rows, columns, rows };
    const pen = scaled(overview, left + cell * columns, top + cell * rows);
    pen.font = `11px ${colours.font}`;
    pen.fillStyle = colours.muted;
    pen.textAlign = "center";
    const every = Math.ceil(20 / cell);
    for (let layer = 0; layer < columns; layer += every) pen.fillText(layer, left + (layer + 0.5) * cell, 10);
    pen.textAlign = "right";
    const skip = Math.ceil(13 / cell);
    for (let head = 0; head < rows; head += skip) pen.fillText(head, left - 8, top + (head + 0.5) * cell);
    const index = measureIndex();
    const [low, high] = index < 0 ? [0, 1] : span01(index);
    const gap = cell > 24 ? 3 : cell > 13 ? 2 : 1;
    data.layers.forEach((layer, l) => {
      for (let head = 0; head < (layer?.heads ?? 0); head++) {
        const place = [left + l * cell, top + head * cell, cell - gap, cell - gap];
        if (index < 0) {
          pen.imageSmoothingEnabled = layer.columns > cell;
          pen.imageSmoothingQuality = "high";
          pen.drawImage(pictureOf(l, head), ...place);
        } else {
          pen.fillStyle = css(shade(colours.look, (headFacts.get(`${l} ${head}`)[index] - low) / (high - low)));
          pen.fillRect(...place);
        }
        pen.strokeStyle = colours.line;
        pen.strokeRect(place[0] + 0.5, place[1] + 0.5, place[2] - 1, place[3] - 1);
      }
    });
    $("scale").textContent = `${index < 0 ? "weight" : data.measures[index][1]}, ${short(low)} to ${short(high)}`;
    markHead();
  };
  const short = (value) => String(Number(value.toPrecision(3)));
  const frame = overview?.parentElement.appendChild(make("div", "frame"));
  const markHead = () => {
    if (!overview) return;
    const { left, top, width, columns } = overviewGrid;
    const cell = width / columns;
    frame.hidden = state.head < 0 && !data.layers[state.layer];
    const heads = data.layers[state.layer]?.heads ?? 0;
    const [row, count] = state.head < 0 ? [0, heads] : [state.head, 1];
    place(frame, left + state.layer * cell - 2, top + row * cell - 2, cell + 1, count * cell + 1);
    for (const button of document.querySelectorAll("button.pick"))
      button.setAttribute("aria-pressed", +button.dataset.layer === state.layer && +button.dataset.head === state.head);
  };
  const facts = (layer, head) => headFacts.get(`${layer} ${head}`)
    .map((value, i) => `${data.measures[i][1]} ${finite(value, i < 4 ? 2 : 1)}`);
  const exists = (layer, head) => head < (data.layers[layer]?.heads ?? 0);
  const wireOverview = () => cells(overview, {
    grid: () => overviewGrid,
    start: () => [state.layer, Math.max(state.head, 0)],
    lines: (layer, head) => {
      if (!exists(layer, head)) return [[`Layer ${layer} has no head ${head} with a map`]];
      return [[make("strong", "", `Layer ${layer}, head ${head}`)], ...facts(layer, head).map((fact) => [fact])];
    },
    pick: (layer, head) => exists(layer, head) && pick({ layer, head }),
  });

  // --- One map. ---
  const map = $("map");
  let mapGrid = {};
  const drawMap = () => {
    if (!map) return;
    const layer = data.layers[state.layer];
    const wordy = length <= 40;
    const room = sizes.map;
    const gutter = wordy ? clamp(room / 6, 46, 92) : 44;
    const side = room - gutter;
    const [rows, columns] = layer ? [layer.rows, layer.columns] : [1, 1];
    mapGrid = { left: gutter, top: gutter, width: side, height: side, columns, rows };
    const pen = scaled(map, room, room);
    pen.font = `12px ${colours.font}`;
    pen.fillStyle = colours.muted;
    if (!layer) {
      pen.fillText("This layer has no map.", gutter, gutter + 20);
      return;
    }
    pen.imageSmoothingEnabled = columns > side;
    pen.drawImage(pictureOf(state.layer, state.head), gutter, gutter, side, side);
    pen.strokeStyle = colours.rule;
    pen.strokeRect(gutter - 0.5, gutter - 0.5, side + 1, side + 1);
    const step = wordy ? Math.ceil(14 / (side / length)) : niceStep(length, side / 56);
    for (let token = 0; token < length; token += step) {
      const place = gutter + ((wordy ? token + 0.5 : token / layer.tile + 0.5) / columns) * side;
      const words = wordy ? fit(pen, bare(data.words[token]), gutter - 10) : String(token);
      const own = wordy && token === state.token;
      pen.fillStyle = own ? colours.mark : colours.muted;
      pen.textAlign = "right";
      pen.fillText(words, gutter - 7, place);
      pen.save();
      pen.translate(place, gutter - 7);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "left";
      pen.fillStyle = colours.muted;
      if (wordy) pen.fillText(words, 0, 0);
      pen.restore();
      if (!wordy) {
        const cut = place + 20 > room;
        pen.textAlign = cut ? "right" : "center";
        pen.fillText(words, cut ? room : place, gutter - 12);
      }
    }
    const row = gutter + (Math.floor(state.token / layer.tile) / rows) * side;
    pen.strokeStyle = colours.mark;
    pen.lineWidth = 2;
    pen.strokeRect(gutter, row, side, Math.max(side / rows, 2));
  };
  const niceStep = (count, most) => {
    const rough = count / Math.max(most, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((m) => m * power).find((value) => value >= rough) || 1;
  };
  const fit = (pen, words, room) => {
    if (pen.measureText(words).width <= room) return words;
    const signs = [...words];
    while (signs.length && pen.measureText(`${signs.join("")}…`).width > room) signs.pop();
    return `${signs.join("")}…`;
  };
  const wireMap = () => cells(map, {
    grid: () => mapGrid,
    start: () => {
      const tile = data.layers[state.layer]?.tile ?? 1;
      return [Math.floor(state.token / tile), Math.floor(state.token / tile)];
    },
    lines: (column, row) => {
      const layer = data.layers[state.layer];
      if (!layer) return [["no map"]];
      const weight = mapOf(state.layer, state.head)[row * layer.columns + column] ** 2;
      const line = [...named(...span(row, layer.tile)), " → ", ...named(...span(column, layer.tile))];
      const whose = layer.tile > 1 ? " of their attention, in the mean" : " of its attention";
      return [line, [make("strong", "", percent(weight)), whose]];
    },
    pick: (column, row) => pick({ token: span(row, data.layers[state.layer]?.tile ?? 1)[0] }),
    moved: (column, row) => hover(span(row, data.layers[state.layer]?.tile ?? 1)[0]),
  });
  const bars = (list, found) => {
    list.replaceChildren(...found.slice(0, 10).map(({ first, last, weight, exact }) => {
      const item = make("li", exact ? "exact" : "");
      const button = make("button", "go");
      button.type = "button";
      button.append(...named(first, last));
      button.addEventListener("click", () => pick({ token: first }));
      const bar = make("span", "bar");
      bar.style.setProperty("--w", weight);
      item.append(button, bar, make("span", "value", percent(weight)));
      return item;
    }));
    if (!found.length) list.append(make("li", "gf-empty", "nothing in particular"));
  };
  const drawPanel = () => {
    if (!map) return;
    const one = state.head >= 0;
    $("chosen").textContent = `Layer ${state.layer}, ${one ? `head ${state.head}` : "mean of its heads"}`;
    $("facts").textContent = one && exists(state.layer, state.head) ? facts(state.layer, state.head).join(" · ") : "";
    for (const [side, words] of [["at", " looks at"], ["by", " is looked at by"]]) {
      $(`${side}-title`).replaceChildren(chip(data.words[state.token]), ` ${state.token}${words}`);
      bars($(side), looks(state.token, side === "by").named);
    }
  };

  // --- The lens. ---
  const lens = $("lens-map");
  let lensGrid = {};
  const known = (depth, place) => Math.exp(-arrays.loss[depth * length + place]);
  const lensPicture = (width) => kept(pictures, "lens", () => {
    const whole = drawn(length, depths, colours.lens, (i) => known(Math.floor(i / length), i % length));
    if (length <= width) return whole;
    const narrow = make("canvas");
    [narrow.width, narrow.height] = [width, depths];
    const pen = narrow.getContext("2d");
    pen.imageSmoothingQuality = "high";
    pen.drawImage(whole, 0, 0, width, depths);
    return narrow;
  }, 600);
  const drawLens = () => {
    const room = sizes.lens;
    const left = room > 560 ? 76 : 30;
    const width = room - left;
    const column = width / length;
    const wordy = column >= 44;
    const line = wordy ? 19 : clamp(Math.floor(300 / depths), 6, 16);
    const top = wordy ? 24 : 4;
    lensGrid = { left, top, width, height: line * depths, columns: length, rows: depths };
    const pen = scaled(lens, room, top + line * depths + 2);
    pen.font = `12px ${colours.font}`;
    pen.fillStyle = colours.muted;
    pen.textAlign = "right";
    for (let depth = 0; depth < depths; depth += Math.ceil(15 / line))
      pen.fillText(left > 60 ? depthName(depth) : depth, left - 8, top + (depth + 0.5) * line);
    if (wordy) {
      pen.fillText(data.causal ? "after" : "at", left - 8, 11);
      pen.textAlign = "left";
      for (let place = 0; place < length; place++) {
        pen.fillStyle = place === state.token ? colours.mark : colours.muted;
        pen.fillText(fit(pen, bare(data.words[place]), column - 8), left + place * column + 4, 11);
      }
      for (let depth = 0; depth < depths; depth++) {
        for (let place = 0; place < length; place++) {
          const value = known(depth, place);
          const colour = shade(colours.lens, Number.isFinite(value) ? value : 0);
          const [x, y] = [left + place * column, top + depth * line];
          pen.fillStyle = css(colour);
          pen.fillRect(x, y, column - 1, line - 1);
          pen.fillStyle = dark(colour) ? "#ffffff" : "#14171b";
          pen.fillText(fit(pen, bare(best(depth, place).word), column - 8), x + 4, y + line / 2);
        }
      }
    } else {
      pen.imageSmoothingEnabled = false;
      pen.drawImage(lensPicture(Math.round(width)), left, top, width, line * depths);
    }
    pen.strokeStyle = colours.mark;
    pen.lineWidth = 2;
    pen.strokeRect(left + state.token * column, top, Math.max(column - (wordy ? 1 : 0), 2), line * depths);
  };
  const wireLens = () => cells(lens, {
    grid: () => lensGrid,
    start: () => [state.token, depths - 1],
    lines: (place, depth) => {
      const said = best(depth, place);
      const value = known(depth, place);
      const target = data.causal ? place + 1 : place;
      const about = [`${depthName(depth)}, `, ...named(place, place)];
      const likeliest = ["says ", chip(said.word), ` ${percent(said.share)}`];
      if (!Number.isFinite(value) || target >= length) return [about, likeliest];
      return [about, likeliest, ["gives ", chip(data.words[target]), ` ${percent(value)}`]];
    },
    pick: (place) => pick({ token: place }),
    moved: (place) => hover(place),
  });
  const drawPredictions = () => {
    const place = state.token;
    const target = data.causal ? place + 1 : place;
    const known_ = target < length;
    const lead = $("after-what");
    lead.replaceChildren(data.causal ? "After " : "For ", ...named(place, place));
    if (data.causal) lead.append(...(known_ ? [", before ", chip(data.words[target])] : [", where the text ends"]));
    const table = $("predictions");
    const head = make("tr");
    const titles = ["depth", ...Array.from({ length: data.k }, (_, i) => (i ? `${i + 1}` : "likeliest"))];
    titles.forEach((words) => head.append(make("th", "", words)));
    if (known_) {
      const cell = make("th", "came");
      cell.append(chip(data.words[target]));
      head.append(cell);
    }
    head.append(make("th", "rms", "RMS"));
    head.querySelectorAll("th").forEach((cell) => (cell.scope = "col"));
    const body = make("tbody");
    for (let depth = 0; depth < depths; depth++) {
      const row = make("tr", depth === state.layer + 1 ? "own" : "");
      const title = make("th", "", depthName(depth));
      title.scope = "row";
      row.append(title);
      for (let rank = 0; rank < data.k; rank++) {
        const said = best(depth, place, rank);
        const cell = make("td", known_ && said.id === data.ids[target] ? "said right" : "said");
        cell.style.setProperty("--p", said.share.toFixed(3));
        cell.title = `id ${said.id}`;
        cell.append(chip(said.word), make("small", "", percent(said.share)));
        row.append(cell);
      }
      if (known_) {
        const cell = make("td", "came");
        const bar = make("span", "bar");
        bar.style.setProperty("--w", known(depth, place));
        cell.append(bar, make("small", "value", percent(known(depth, place))));
        row.append(cell);
      }
      row.append(make("td", "rms", short(arrays.rms[depth * length + place])));
      body.append(row);
    }
    const heading = make("thead");
    heading.append(head);
    table.replaceChildren(heading, body);
  };

  // --- One state; what is drawn from what has changed. ---
  const controls = { layer: $("layer"), head: $("head"), token: $("token") };
  const fillHeads = () => {
    const heads = data.layers[state.layer]?.heads ?? 0;
    controls.head.replaceChildren(...[-1, ...Array(heads).keys()].map((head) => {
      const option = make("option", "", head < 0 ? "mean" : head);
      option.value = head;
      return option;
    }));
  };
  const drawControls = () => {
    controls.layer.value = state.layer;
    controls.head.value = state.head;
    controls.token.value = state.token;
    $("about").replaceChildren(chip(data.words[state.token]), ` ${paid(state.token)}`);
  };
  let waiting = false;
  const pick = (changes) => {
    const layerChanged = changes.layer !== undefined && changes.layer !== state.layer;
    Object.assign(state, changes);
    state.token = clamp(Math.round(state.token) || 0, 0, length - 1);
    state.head = Math.min(state.head, (data.layers[state.layer]?.heads ?? 0) - 1);
    if (layerChanged) fillHeads();
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      strip.classList.toggle("surprise", state.shade === "surprise");
      drawControls();
      markToken();
      paint(state.token);
      markHead();
      drawMap();
      drawPanel();
      drawLens();
      drawPredictions();
    });
  };
  const wireControls = () => {
    data.layers.forEach((_, layer) => {
      const option = make("option", "", layer);
      option.value = layer;
      controls.layer.append(option);
    });
    fillHeads();
    controls.layer.addEventListener("change", () => pick({ layer: +controls.layer.value }));
    controls.head.addEventListener("change", () => pick({ head: +controls.head.value }));
    controls.token.addEventListener("input", () => {
      if (controls.token.value !== "") pick({ token: +controls.token.value });
    });
    $("before").addEventListener("click", () => pick({ token: state.token - 1 }));
    $("after").addEventListener("click", () => pick({ token: state.token + 1 }));
    for (const radio of document.querySelectorAll("input[name=shade]"))
      radio.addEventListener("change", () => pick({ shade: radio.value }));
    for (const radio of document.querySelectorAll("input[name=measure]"))
      radio.addEventListener("change", () => {
        state.measure = radio.value;
        drawOverview();
      });
    for (const button of document.querySelectorAll("button.pick"))
      button.addEventListener("click", () => pick({ layer: +button.dataset.layer, head: +button.dataset.head }));
  };
  const drawAll = () => {
    readColours();
    const free = window.innerHeight - bench.offsetHeight - 70;
    sizes.overview = overview?.closest(".scroll").clientWidth;
    sizes.map = Math.min(map?.parentElement.clientWidth, clamp(free, 380, 640));
    sizes.lens = lens.parentElement.clientWidth;
    document.documentElement.style.scrollPaddingTop = `${bench.offsetHeight + 18}px`;
    drawOverview();
    pick({});
  };

  unpack().then((found) => {
    arrays = { ...found, loss: floats(found.loss), rms: floats(found.rms) };
    readColours();
    wireStrip();
    wireControls();
    if (overview) {
      wireOverview();
      wireMap();
    }
    wireLens();
    let width = 0;
    new ResizeObserver(() => {
      if (document.documentElement.clientWidth === width) return;
      width = document.documentElement.clientWidth;
      drawAll();
    }).observe(document.documentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    document.documentElement.classList.add("ready");
  }).catch((problem) => {
    const words = typeof DecompressionStream === "undefined"
      ? "This browser is too old for the pictures: one from 2023 or later can unpack them."
      : `The pictures cannot be drawn: ${problem.message}`;
    document.querySelector("main").prepend(make("p", "notice", words));
  }).finally(() => document.documentElement.classList.remove("gf-busy"));
})();
