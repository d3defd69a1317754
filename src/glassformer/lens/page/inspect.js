// The inspection at work: one state (token, layer, head), and everything on the page drawn from it.
(() => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  document.documentElement.classList.add("gf-busy");
  const data = JSON.parse($("inspection").textContent);
  const length = data.words.length;
  const depths = data.layers.length + 1;
  const state = { ...data.start, shade: "at", measure: "maps", other: -1 };
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const finite = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
  const percent = (share) => {
    if (share > 0 && share < 0.001) return "< 0.1\u00a0%";
    return `${share && share < 0.0995 ? (100 * share).toPrecision(2) : Math.round(100 * share)}\u00a0%`;
  };
  const SHEET = 680;  // pixels between the margins of A4
  let paper = 0;  // the width of the sheet, while the page is printed
  const depthName = (depth) => (depth ? `layer ${depth - 1}` : "embedding");

  const make = (name, className, words) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (words !== undefined) element.textContent = words;
    return element;
  };
  const bare = (words) => words.trim();
  const sideways = () => window.innerWidth <= 640 && !paper;  // a phone: layers run down
  const chip = (words) => make("bdi", "chip", words);

  // --- Arrays: base64, deflated; shares are codes whose square is the value, bfloat16 is half a float32. ---
  const unpack = async () => {
    const text = atob(data.bytes);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    const kinds = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float32: Float32Array };
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
    const [from, of] = paper ? ["--light", "--light"] : ["--ramp", "--gf"];  // a sheet is light, whatever the screen is
    colours = { look: ramp(`${from}-look`), lens: ramp(`${from}-lens`) };
    for (const name of ["ink", "muted", "line", "rule"]) colours[name] = style(`${of}-${name}`);
    colours.mark = style(paper ? "--light-mark" : "--mark");
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
  // Black or white, whichever is read better on a colour: at least 4.5 times as light or as dark (WCAG 2).
  const luminance = (colour) => colour
    .map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const inkOn = (colour) => (luminance(colour) > 0.179 ? "#000000" : "#ffffff");

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

  // What a token looks at, or what looks at it: a shade for each token, and the strongest by name with exact weights;
  // `rest` is what all other tokens get, or give it in the mean. The mean of the heads is the last row.
  const MOST = 8;
  const looks = (token, back) => {
    const shades = new Float32Array(length);
    const named = [];
    const layer = data.layers[state.layer];
    if (!layer) return { shades, named, rest: NaN, others: 0 };
    const { heads, rows, columns, tile, keep } = layer;
    const map = mapOf(state.layer, state.head);
    const own = Math.floor(token / tile);
    const count = back ? rows : columns;
    for (let i = 0; i < count; i++) {
      const root = back ? map[i * columns + own] : map[own * columns + i];
      const [first, last] = span(i, tile);
      // Each key of a tile has its share of the weight; twice as dark, and never as dark as a key known by name.
      shades.fill(tile > 1 ? Math.min(0.4, (2 * root) / Math.sqrt(tile)) : root, first, last + 1);
    }
    const [keys, weights, rest, received, seen] =
      ["keys", "weights", "rest", "received", "seen"].map((name) => arrays[`${name}${state.layer}`]);
    const row = state.head < 0 ? heads : state.head;
    const base = row * length * keep;
    const take = (at, other) => {
      const weight = shareOf(weights, at);
      if (!weight) return;
      if (tile > 1) shades[other] = Math.max(shades[other], 0.2 + 0.8 * Math.sqrt(weight));
      named.push({ token: other, weight });
    };
    if (!back) {
      for (let i = 0; i < keep; i++) take(base + token * keep + i, keys[base + token * keep + i]);
      return { shades, named, rest: shareOf(rest, row * length + token), others: 0 };
    }
    for (let i = 0; i < length * keep; i++) if (keys[base + i] === token) take(base + i, Math.floor(i / keep));
    named.sort((a, b) => b.weight - a.weight);
    named.splice(MOST);
    const others = seen[row * length + token] - named.length;
    const left = received[row * length + token] - named.reduce((sum, one) => sum + one.weight, 0);
    return { shades, named, rest: Math.max(0, left) / Math.max(others, 1), others };
  };

  // The weight that each head gives from one token to another, the largest first. Of a long text, whose maps are pooled,
  // weights that are not among the largest of their token are `about` the mean of their tile.
  const between = (from, to) => {
    const found = [];
    data.layers.forEach((layer, l) => {
      for (let head = 0; head < (layer?.heads ?? 0); head++) {
        const { rows, columns, tile, keep } = layer;
        const base = (head * length + from) * keep;
        const place = tile > 1 ? arrays[`keys${l}`].subarray(base, base + keep).indexOf(to) : -1;
        const cell = (head * rows + Math.floor(from / tile)) * columns + Math.floor(to / tile);
        const known = place >= 0 && shareOf(arrays[`weights${l}`], base + place);
        const weight = known || shareOf(arrays[`map${l}`], cell) / tile;
        found.push({ layer: l, head, weight, about: tile > 1 && !known });
      }
    });
    return found.filter(({ weight }) => weight > 0).sort((a, b) => b.weight - a.weight);
  };
  // The two tokens: the one that looks, and the one that is looked at.
  const ends = () => {
    const { token, other } = state;
    return data.causal ? [Math.max(token, other), Math.min(token, other)] : [other, token];
  };
  const strongest = (token) => {  // what the chosen head looks at most, but for the first token and itself
    const { named } = looks(token, false);
    return (named.find((one) => one.token && one.token !== token) ?? named[0])?.token ?? 0;
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
    tokens.forEach((one, i) => one.classList.toggle("other", i === state.other));
    const element = tokens[marked = state.token];
    element.setAttribute("aria-selected", "true");
    strip.setAttribute("aria-activedescendant", element.id);
    const [box, pane] = [element.getClientRects()[0], strip.getBoundingClientRect()];
    if (bench.classList.contains("stuck")) strip.scrollTop += box.top - pane.top - (pane.height - box.height) / 2;
    else if (box.top < pane.top + 4) strip.scrollTop += box.top - pane.top - 24;
    else if (box.bottom > pane.bottom - 4) strip.scrollTop += box.bottom - pane.bottom + 24;
  };
  const lossOf = (token) => {
    const place = data.causal ? token - 1 : token;
    return place < 0 ? NaN : arrays.loss[(depths - 1) * length + place];
  };
  const best = (depth, place, rank = 0) => {
    const at = (depth * length + place) * data.k + rank;
    // No token is impossible: a code of 0 stands for less than it can hold.
    const share = Math.max(shareOf(arrays.shares, at), Number.MIN_VALUE);
    return { word: data.table[arrays.top[at]], id: data.tableIds[arrays.top[at]], share };
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
    strip.setAttribute("aria-label", "Tokens of the text");
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
    strip.addEventListener("click", (event) => {
      const token = event.target.index;
      if (token !== undefined) pick(token === state.token ? {} : { token, other: state.token });
    });
    strip.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, PageUp: -100, PageDown: 100 };
      const step = steps[event.key];
      const next = { Home: 0, End: length - 1 }[event.key] ?? (step && state.token + step);
      if (next === undefined) return;
      event.preventDefault();
      pick({ token: next });
    });
  };

  // --- The text stays in sight: what is scrolled past shrinks it to the lines around the token. A spacer keeps what
  // follows in its place. ---
  const spacer = make("div");
  const stick = (stuck) => {
    const before = bench.offsetHeight + spacer.offsetHeight;
    bench.classList.toggle("stuck", stuck);
    spacer.style.height = stuck ? `${Math.max(0, before - bench.offsetHeight)}px` : "0";
    document.documentElement.style.scrollPaddingTop = `${bench.offsetHeight + 18}px`;
    markToken();
  };
  const wireBench = () => {
    const sentinel = make("div");
    bench.before(sentinel);
    bench.after(spacer);
    // What is below the window counts as seen, so that a jump from above the text to below it is noticed.
    new IntersectionObserver(
      ([entry]) => stick(!entry.isIntersecting && entry.boundingClientRect.top < 0), { rootMargin: "0px 0px 1000000px 0px" },
    ).observe(sentinel);
  };

  // --- Pictures made of cells: the pointer reads one, a click picks it. A table says the same by keyboard. ---
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
  const cells = (canvas, { grid, lines, pick: chosen, moved }) => {
    const cursor = canvas.parentElement.appendChild(make("div", "cursor"));
    cursor.hidden = true;
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
      const { left, top, width, height, columns, rows } = grid();
      const [w, h] = [width / columns, height / rows];
      place(cursor, left + cell[0] * w, top + cell[1] * h, Math.max(w, 3), Math.max(h, 3));
      cursor.hidden = false;
      say(lines(...cell), event.clientX, event.clientY);
      moved(...cell);
    });
    canvas.addEventListener("pointerleave", leave);
    canvas.addEventListener("click", (event) => {
      const cell = under(event);
      if (cell) chosen(...cell);
    });
  };

  // --- A grid: a table of which one cell has the focus. Arrow keys move it, Enter, space or a click picks. Cells know
  // their place as `row` and `column`, and `find` knows the cell of a place. ---
  const wireGrid = (table, { find, lines, pick: chosen, moved }) => {
    const at = (event) => event.target.closest("[role=gridcell]");
    const read = (cell) => {
      const box = cell.getBoundingClientRect();
      say(lines(cell), box.right - 10, box.bottom - 8);
      moved?.(cell);
    };
    const leave = () => (hush(), hover(-1));
    table.addEventListener("pointerover", (event) => (at(event) ? read(at(event)) : leave()));
    table.addEventListener("pointerleave", leave);
    table.addEventListener("focusin", (event) => at(event)?.matches(":focus-visible") && read(at(event)));
    table.addEventListener("focusout", leave);
    table.addEventListener("click", (event) => at(event) && chosen(at(event)));
    table.addEventListener("keydown", (event) => {
      const cell = at(event);
      if (!cell) return;
      if (event.key === "Escape") return leave();
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        return chosen(cell);
      }
      const [x, y] = {
        ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
        Home: [-Infinity, 0], End: [Infinity, 0], PageUp: [0, -Infinity], PageDown: [0, Infinity],
      }[event.key] || [];
      if (x === undefined) return;
      event.preventDefault();
      const next = find(cell, x, y);
      if (!next || next === cell) return;
      for (const other of table.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  };
  const headCell = (words, title) => {
    const cell = make("th", "", words);
    if (title) cell.title = title;
    return cell;
  };

  // --- All heads: a column is a layer; on a phone, a row. The table has the words, the canvas under it the picture. ---
  const overview = $("overview");
  const headGrid = $("head-grid");
  const headFacts = new Map(data.heads.map(([layer, head, ...values]) => [`${layer} ${head}`, values]));
  const measureIndex = () => data.measures.findIndex(([name]) => name === state.measure);
  const most = Math.max(0, ...data.layers.map((layer) => layer?.heads ?? 0));
  const mixed = new Set(data.mixers).size > 1;
  const exists = (layer, head) => head < (data.layers[layer]?.heads ?? 0);
  const short = (value) => String(Number(value.toPrecision(3)));
  const figures = (value) => (value >= 0.001 && value < 999.5 ? value.toPrecision(3) : short(value));
  const shares = 4;  // the entropy and the three weights, from 0 to 1; then measures of any size
  const ofMeasure = (index, value) => {
    if (!Number.isFinite(value)) return "–";
    return index === 0 ? value.toFixed(2) : index < shares ? percent(value) : value.toFixed(1);
  };
  const facts = (layer, head) => headFacts.get(`${layer} ${head}`)
    .map((value, i) => `${data.measures[i][1]} ${ofMeasure(i, value)}`);
  const span01 = (index) => {
    if (index < shares) return [0, 1];
    const values = data.heads.map((row) => row[2 + index]).filter(Number.isFinite);
    return [Math.min(0, ...values), Math.max(1e-9, ...values)];
  };
  const keyHead = (layer, head) => {
    const { heads, keyHeads } = data.layers[layer];
    return keyHeads < heads ? Math.floor((head * keyHeads) / heads) : null;
  };
  const headName = (layer, head) => {
    const key = keyHead(layer, head);
    return `Layer ${layer}, head ${head}${key === null ? "" : `, on KV head ${key}`}`;
  };
  let built = "";
  const buildHeads = (down, cell) => {
    if (built === `${down} ${cell}`) return;
    built = `${down} ${cell}`;
    headGrid.style.setProperty("--cell", `${cell}px`);
    headGrid.classList.toggle("down", down);
    const [layers, heads] = [[...data.layers.keys()], [...Array(most).keys()]];
    const [across, downwards] = down ? [heads, layers] : [layers, heads];
    const head = make("thead");
    if (mixed && !down) {  // one heading for each run of layers of one kind
      const row = make("tr", "kinds");
      row.append(make("td"));
      for (let first = 0, last; first < layers.length; first = last) {
        for (last = first + 1; data.mixers[last] === data.mixers[first]; ) last++;
        const kind = headCell("", `${data.mixers[first]}: layers ${first} to ${last - 1}`);
        kind.append(make("span", (last - first) * cell < 72 ? "upright" : "", data.mixers[first]));
        kind.colSpan = last - first;
        kind.scope = "colgroup";
        row.append(kind);
      }
      head.append(row);
    }
    const numbers = make("tr");
    const corner = make("td", "corner", down ? "head" : "layer");
    if (down && mixed) corner.colSpan = 2;
    numbers.append(corner, ...across.map((i) => {
      const title = down ? `head ${i}` : `layer ${i}: ${data.mixers[i]}`;
      const shown = cell * (i % 2 ? 1 : 2) < 22 ? "" : i;
      const number = headCell(i % Math.ceil(20 / cell) ? "" : shown, title);
      number.scope = "col";
      return number;
    }));
    head.append(numbers);
    const body = make("tbody");
    for (const i of downwards) {
      const row = make("tr");
      const number = headCell(down ? `layer ${i}` : `head ${i}`, down ? data.mixers[i] : "");
      number.scope = "row";
      row.append(number);
      if (down && mixed) row.append(make("td", "kind", data.mixers[i]));
      for (const j of across) {
        const [layer, head] = down ? [i, j] : [j, i];
        const one = make("td", exists(layer, head) ? "" : "none");
        if (exists(layer, head)) {
          one.setAttribute("role", "gridcell");
          one.setAttribute("aria-label", `${headName(layer, head)}: ${facts(layer, head).join(", ")}`);
          one.tabIndex = -1;
        }
        Object.assign(one, { layer, head });
        row.append(one);
      }
      body.append(row);
    }
    headGrid.replaceChildren(head, body);
  };
  const headCells = () => [...headGrid.querySelectorAll("[role=gridcell]")];
  const drawOverview = () => {
    if (!overview) return;
    const [down, room] = [sideways(), sizes.overview];
    const [side, count] = down ? [mixed ? 112 : 48, most] : [50, data.layers.length];
    const least = paper ? 8 : 24;
    const cell = clamp(Math.min(Math.floor((room - side) / count), Math.floor(560 / most)), least, 96);
    buildHeads(down, cell);
    const holder = overview.parentElement.getBoundingClientRect();
    const first = headGrid.tBodies[0].querySelector("td:not(.kind)").getBoundingClientRect();
    const [left, top] = [first.left - holder.left, first.top - holder.top];
    const pen = scaled(overview, headGrid.offsetWidth, headGrid.offsetHeight);
    const index = measureIndex();
    const [low, high] = index < 0 ? [0, 1] : span01(index);
    const bracket = data.layers.some((layer) => layer && layer.keyHeads < layer.heads) ? 5 : 0;
    const gap = cell > 24 ? 3 : cell > 13 ? 2 : 1;
    const at = (layer, head) => (down ? [left + head * cell, top + layer * cell] : [left + layer * cell, top + head * cell]);
    const inset = down ? [0, bracket] : [bracket, 0];
    data.layers.forEach((layer, l) => {
      for (let head = 0; head < (layer?.heads ?? 0); head++) {
        const [x, y] = at(l, head);
        const box = [x + inset[0], y + inset[1], cell - gap - inset[0], cell - gap - inset[1]];
        if (index < 0) {
          pen.imageSmoothingEnabled = layer.columns > cell;
          pen.imageSmoothingQuality = "high";
          pen.drawImage(pictureOf(l, head), ...box);
        } else {
          pen.fillStyle = css(shade(colours.look, (headFacts.get(`${l} ${head}`)[index] - low) / (high - low)));
          pen.fillRect(...box);
        }
        pen.strokeStyle = colours.line;
        pen.strokeRect(box[0] + 0.5, box[1] + 0.5, box[2] - 1, box[3] - 1);
      }
      const size = layer ? layer.heads / layer.keyHeads : 1;
      pen.strokeStyle = colours.muted;
      for (let from = 0; size > 1 && from < layer.heads; from += size) {  // [ along the heads that share keys
        const [[x, y], [u, v]] = [at(l, from), at(l, from + size - 1)];
        pen.beginPath();
        if (down) {
          pen.moveTo(x + 1.5, y + 4.5), pen.lineTo(x + 1.5, y + 1.5);
          pen.lineTo(u + cell - gap - 1.5, y + 1.5), pen.lineTo(u + cell - gap - 1.5, y + 4.5);
        } else {
          pen.moveTo(x + 4.5, y + 1.5), pen.lineTo(x + 1.5, y + 1.5);
          pen.lineTo(x + 1.5, v + cell - gap - 1.5), pen.lineTo(x + 4.5, v + cell - gap - 1.5);
        }
        pen.stroke();
      }
    });
    const what = index < 0 ? "weight in a map" : data.measures[index][1];
    const [from, to] = index > 0 && index < shares ? ["0\u00a0%", "100\u00a0%"] : [short(low), short(high)];
    $("scale").textContent = `${what}, ${from} to ${to}`;
    markHead();
  };
  const markHead = () => {
    if (!overview) return;
    let focusable = null;
    for (const cell of headCells()) {
      const chosen = cell.layer === state.layer && (state.head < 0 || cell.head === state.head);
      cell.setAttribute("aria-selected", chosen);
      cell.tabIndex = -1;
      if (chosen) focusable ??= cell;
    }
    (focusable ?? headCells()[0]).tabIndex = 0;
    for (const button of document.querySelectorAll("button.pick"))
      button.setAttribute("aria-pressed", +button.dataset.layer === state.layer && +button.dataset.head === state.head);
  };
  const wireOverview = () => wireGrid(headGrid, {
    // The next head in a direction: layers without maps are passed over.
    find: ({ layer, head }, x, y) => {
      const [l, h] = sideways() ? [y, x] : [x, y];
      const found = headCells().filter((cell) => (l ? cell.head === head : cell.layer === layer)
        && (cell.layer - layer) * Math.sign(l) >= 0 && (cell.head - head) * Math.sign(h) >= 0 && (cell.layer !== layer || cell.head !== head));
      const far = (cell) => Math.abs(cell.layer - layer) + Math.abs(cell.head - head);
      found.sort((a, b) => far(a) - far(b));
      return Number.isFinite(x + y) ? found[0] : found[found.length - 1];
    },
    lines: ({ layer, head }) =>
      [[make("strong", "", headName(layer, head))], ...facts(layer, head).map((fact) => [fact])],
    pick: ({ layer, head }) => pick({ layer, head }),
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
      pen.fillText(`Layer ${state.layer} has no map: its mixer is ${data.mixers[state.layer] || "of another kind"}.`, 0, 20);
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
    lines: (column, row) => {
      const layer = data.layers[state.layer];
      if (!layer) return [["no map"]];
      const weight = mapOf(state.layer, state.head)[row * layer.columns + column] ** 2;
      const line = [...named(...span(row, layer.tile)), " → ", ...named(...span(column, layer.tile))];
      const whose = layer.tile > 1 ? " of their attention, on average" : " of its attention";
      return [line, [make("strong", "", percent(weight)), whose]];
    },
    pick: (column, row) => pick({ token: span(row, data.layers[state.layer]?.tile ?? 1)[0] }),
    moved: (column, row) => hover(span(row, data.layers[state.layer]?.tile ?? 1)[0]),
  });
  const bar = (words, weight, value) => {
    const item = make("li");
    const line = make("span", "bar");
    line.style.setProperty("--w", weight);
    item.append(words, line, make("span", "value", value));
    return item;
  };
  const bars = (list, { named: found, rest, others }, back) => {
    list.replaceChildren(...found.map(({ token, weight }) => {
      const button = make("button", "go");
      button.type = "button";
      button.append(...named(token, token));
      button.addEventListener("click", () => pick({ token }));
      return bar(button, weight, percent(weight));
    }));
    if (!Number.isFinite(rest)) list.append(make("li", "gf-empty", "no map"));
    else if (!back && rest >= 0.0005) list.append(bar(make("span", "rest", "all else"), rest, percent(rest)));
    else if (back && others > 0)
      list.append(bar(make("span", "rest", others > 1 ? `${others.toLocaleString("en")} others, on average` : "1 other"), rest, percent(rest)));
  };
  const drawPanel = () => {
    if (!map) return;
    const one = state.head >= 0 && exists(state.layer, state.head);
    $("chosen").textContent = one ? headName(state.layer, state.head) : `Layer ${state.layer}, mean of its heads`;
    $("facts").textContent = one ? facts(state.layer, state.head).join(" · ") : "";
    for (const [side, words] of [["at", " attends to"], ["by", " is attended to by"]]) {
      $(`${side}-title`).replaceChildren(chip(data.words[state.token]), ` ${state.token}${words}`);
      bars($(side), looks(state.token, side === "by"), side === "by");
    }
  };
  const SHOWN = 12;
  const drawPair = () => {
    const list = $("pair-heads");
    if (!list || state.other < 0 || state.other === state.token) return;
    const [from, to] = ends();
    const found = between(from, to);
    $("pair-words").replaceChildren("From ", ...named(from, from), " to ", ...named(to, to),
      found.length ? "" : ": no head looks there.");
    list.replaceChildren(...found.slice(0, SHOWN).map(({ layer, head, weight, about }) => {
      const button = make("button", "go", `layer ${layer}, head ${head}`);
      button.type = "button";
      button.addEventListener("click", () => pick({ layer, head }));
      return bar(button, weight, `${about ? "≈ " : ""}${percent(weight)}`);
    }));
  };
  const values = $("map-values");
  const drawValues = () => {
    if (!values?.open) return;
    const layer = data.layers[state.layer];
    const table = $("map-table");
    table.replaceChildren();
    if (!layer) return;
    const weights = mapOf(state.layer, state.head);
    const title = (tile) => {
      const [first, last] = span(tile, layer.tile);
      return first === last ? `${first} ${bare(data.words[first])}` : `${first}–${last}`;
    };
    const head = make("tr");
    head.append(make("td", "", "looks \\ at"));
    for (let column = 0; column < layer.columns; column++) head.append(headCell(title(column)));
    for (const cell of head.querySelectorAll("th")) cell.scope = "col";
    const rows = Array.from({ length: layer.rows }, (_, row) => {
      const line = make("tr");
      const first = headCell(title(row));
      first.scope = "row";
      line.append(first);
      for (let column = 0; column < layer.columns; column++) {
        const weight = weights[row * layer.columns + column] ** 2;
        line.append(make("td", "value", weight ? percent(weight) : ""));
      }
      return line;
    });
    const [top, body] = [make("thead"), make("tbody")];
    top.append(head);
    body.append(...rows);
    table.append(top, body);
  };

  // --- Layers without softmax: each map of a layer as a picture of its own. ---
  const drawAnswers = () => {
    for (const canvas of document.querySelectorAll("canvas.answer")) {
      const { layer, map: index } = canvas.dataset;
      const [rows, columns] = data.answers[layer];
      const codes = roots(arrays[`answers${layer}`], index * rows * columns, (index + 1) * rows * columns);
      const side = Math.min(220, canvas.parentElement.clientWidth || 220);
      const pen = scaled(canvas, side, side);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(drawn(columns, rows, colours.look, (i) => codes[i]), 0, 0, side, side);
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
  // The words of some tokens as a table, around the chosen one; above it the whole text as a picture where it is longer.
  const lensTable = $("lens-grid");
  let shown = { first: 0, count: 0 };
  const windowed = () => {
    const side = sizes.lens > 560 ? 84 : 40;
    const count = Math.min(length, Math.max(3, Math.floor((sizes.lens - side) / (sizes.lens > 560 ? 62 : 58))));
    const inside = state.token >= shown.first && state.token < shown.first + count && shown.count === count;
    const first = inside ? shown.first : clamp(state.token - Math.floor(count / 2), 0, length - count);
    return { first, count, side };
  };
  const drawLens = () => {
    shown = windowed();
    const whole = shown.count === length;
    lens.parentElement.hidden = whole;
    if (!whole) {
      const [width, line, top] = [sizes.lens, clamp(Math.floor(150 / depths), 3, 10), 16];
      const column = width / length;
      lensGrid = { left: 0, top, width, height: line * depths, columns: length, rows: depths };
      const pen = scaled(lens, width, top + line * depths + 2);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(lensPicture(Math.round(width)), 0, top, width, line * depths);
      pen.strokeStyle = colours.ink;
      pen.strokeRect(shown.first * column + 0.5, top + 0.5, shown.count * column - 1, line * depths - 1);
      pen.strokeStyle = colours.mark;
      pen.lineWidth = 2;
      pen.strokeRect(state.token * column, top, Math.max(column, 2), line * depths);
      pen.font = `12px ${colours.font}`;
      pen.fillStyle = colours.muted;
      const words = `tokens ${shown.first} to ${shown.first + shown.count - 1} of ${length}, below in words`;
      const centre = (shown.first + shown.count / 2) * column;
      const half = pen.measureText(words).width / 2;
      pen.textAlign = "center";
      pen.fillText(words, clamp(centre, half, Math.max(half, width - half)), 7);
    }
    const read = lensTable.contains(document.activeElement) ? document.activeElement : null;  // whose focus is kept
    const places = Array.from({ length: shown.count }, (_, i) => shown.first + i);
    const head = make("tr");
    head.append(make("td", "", data.causal ? "after" : "at"), ...places.map((place) => {
      const cell = headCell(bare(data.words[place]), `token ${place}`);
      cell.scope = "col";
      if (place === state.token) cell.className = "own";
      return cell;
    }));
    const focus = { place: places.includes(read?.place) ? read.place : state.token, depth: read?.depth ?? depths - 1 };
    const rows = Array.from({ length: depths }, (_, depth) => {
      const row = make("tr");
      const title = headCell(sizes.lens > 560 ? depthName(depth) : depth ? depth - 1 : "emb.", depthName(depth));
      title.scope = "row";
      row.append(title, ...places.map((place) => {
        const [said, value] = [best(depth, place), known(depth, place)];
        const colour = shade(colours.lens, Number.isFinite(value) ? value : 0);
        const cell = make("td", place === state.token ? "own" : "", bare(said.word));
        cell.style.background = css(colour);
        cell.style.color = inkOn(colour);
        cell.setAttribute("role", "gridcell");
        cell.tabIndex = place === focus.place && depth === focus.depth ? 0 : -1;
        return Object.assign(cell, { place, depth });
      }));
      return row;
    });
    const [top, body] = [make("thead"), make("tbody")];
    top.append(head);
    body.append(...rows);
    lensTable.style.setProperty("--side", `${shown.side}px`);
    lensTable.replaceChildren(top, body);
    if (read) lensTable.querySelector("[tabindex='0']").focus();
  };
  const lensLines = (place, depth) => {
    const said = best(depth, place);
    const value = known(depth, place);
    const target = data.causal ? place + 1 : place;
    const about = [`${depthName(depth)}, `, ...named(place, place)];
    const likeliest = ["says ", chip(said.word), ` ${percent(said.share)}`];
    if (!Number.isFinite(value) || target >= length) return [about, likeliest];
    return [about, likeliest, ["gives ", chip(data.words[target]), ` ${percent(value)}`]];
  };
  const wireLens = () => {
    cells(lens, {
      grid: () => lensGrid,
      lines: (place, depth) => lensLines(place, depth),
      pick: (place) => pick({ token: place }),
      moved: (place) => hover(place),
    });
    const cellOf = (place, depth) => [...lensTable.querySelectorAll("[role=gridcell]")]
      .find((cell) => cell.place === place && cell.depth === depth);
    wireGrid(lensTable, {
      find: ({ place, depth }, x, y) => {
        const next = clamp(place + x, 0, length - 1);
        if (!cellOf(next, depth)) {  // beyond the words that are shown
          state.token = next;
          drawLens();
          pick({ token: next });
          return cellOf(next, depth);
        }
        return cellOf(next, clamp(depth + y, 0, depths - 1));
      },
      lines: ({ place, depth }) => lensLines(place, depth),
      pick: ({ place }) => pick({ token: place }),
      moved: ({ place }) => hover(place),
    });
  };
  const drawPredictions = () => {
    const place = state.token;
    const target = data.causal ? place + 1 : place;
    const known_ = target < length;
    const lead = $("after-what");
    lead.replaceChildren(data.causal ? "After " : "For ", ...named(place, place));
    if (data.causal) lead.append(...(known_ ? [", before ", chip(data.words[target])] : [", where the text ends"]));
    const table = $("predictions");
    const head = make("tr");
    const titles = ["depth", ...Array.from({ length: data.k }, (_, i) => (i ? `${i + 1}.` : "most likely"))];
    titles.forEach((words) => head.append(make("th", "", words)));
    if (known_) {
      const cell = make("th", "came");
      cell.append("gives ", chip(data.words[target]));
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
      row.append(make("td", "rms", figures(arrays.rms[depth * length + place])));
      body.append(row);
    }
    const heading = make("thead");
    heading.append(head);
    table.replaceChildren(heading, body);
  };

  // --- What is read of a source: one table, of a layer and a head or their mean. ---
  const crossing = (part) => document.querySelector(`#cross-${part}`);  // a page without a source has none
  const cross = { layer: crossing("layer"), head: crossing("head"), table: crossing("map") };
  const crossWords = (part) => [...crossing(part).children];
  const drawCross = () => {
    const at = +cross.layer.value;
    const { heads, rows, columns } = data.crossings[at];
    const [codes, size, head] = [arrays[`cross${at}`], rows * columns, +cross.head.value];
    const weights = new Float32Array(size);
    for (let i = 0; i < size; i++)
      if (head >= 0) weights[i] = shareOf(codes, head * size + i);
      else for (let n = 0; n < heads; n++) weights[i] += shareOf(codes, n * size + i) / heads;
    [...cross.table.tBodies[0].rows].forEach((row, i) => [...row.cells].slice(1).forEach((cell, j) => {
      cell.style.setProperty("--a", Math.sqrt(weights[i * columns + j]).toFixed(2));
      cell.title = percent(weights[i * columns + j]);
    }));
    const shadeWords = (words, weight) => words.forEach((word, i) => word.style.setProperty("--a", Math.sqrt(weight(i)).toFixed(2)));
    const [source, text] = [crossWords("source"), crossWords("text")];
    const mark = (row, column) => {
      shadeWords(source, (j) => (row < 0 ? 0 : weights[row * columns + j]));
      shadeWords(text, (i) => (column < 0 ? 0 : weights[i * columns + column]));
    };
    cross.mark = mark;
    mark(rows - 1, -1);
  };
  const wireCross = () => {
    const option = (select, value, words) => {
      const one = make("option", "", words);
      one.value = value;
      select.append(one);
    };
    data.crossings.forEach(({ layer }, i) => option(cross.layer, i, layer));
    cross.layer.value = data.crossings.length - 1;
    const fill = () => {
      cross.head.replaceChildren();
      for (let n = -1; n < data.crossings[+cross.layer.value].heads; n++) option(cross.head, n, n < 0 ? "mean" : n);
    };
    fill();
    cross.layer.addEventListener("change", () => (fill(), drawCross()));
    cross.head.addEventListener("change", drawCross);
    crossWords("source").forEach((word, j) => word.addEventListener("pointerenter", () => cross.mark(-1, j)));
    crossWords("text").forEach((word, i) => word.addEventListener("pointerenter", () => cross.mark(i, -1)));
    cross.table.addEventListener("pointerover", ({ target }) => {
      const row = target.closest("tbody tr");
      if (row) cross.mark(row.rowIndex - 1, target.tagName === "TD" ? target.cellIndex - 1 : -1);
    });
    drawCross();
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
  const pick = (changes, now = false) => {
    if (state.other < 0 && length > 1 && data.layers[state.layer]) state.other = strongest(state.token);
    const layerChanged = changes.layer !== undefined && changes.layer !== state.layer;
    Object.assign(state, changes);
    state.token = clamp(Math.round(state.token) || 0, 0, length - 1);
    state.head = Math.min(state.head, (data.layers[state.layer]?.heads ?? 0) - 1);
    if (layerChanged) fillHeads();
    const draw = () => {
      waiting = false;
      strip.classList.toggle("surprise", state.shade === "surprise");
      drawControls();
      markToken();
      paint(state.token);
      markHead();
      drawMap();
      drawPanel();
      drawPair();
      drawValues();
      drawLens();
      drawPredictions();
    };
    if (now) return draw();
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
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
    const free = window.innerHeight - 240;
    sizes.overview = paper || overview?.closest(".scroll").clientWidth;
    sizes.map = Math.min(paper || map?.closest(".beside").clientWidth, paper ? 420 : clamp(free, 380, 640));
    sizes.lens = paper || lens.closest("section").clientWidth;
    shown = { first: 0, count: 0 };
    drawOverview();
    drawAnswers();
    pick({}, paper > 0);
  };
  const print = (width) => {
    paper = width;
    drawAll();
  };

  unpack().then((found) => {
    arrays = { ...found, loss: floats(found.loss), rms: floats(found.rms) };
    readColours();
    wireStrip();
    wireControls();
    if (overview) {
      wireOverview();
      wireMap();
      values.addEventListener("toggle", drawValues);
    }
    wireLens();
    if (cross.table) wireCross();
    wireBench();
    addEventListener("beforeprint", () => print(SHEET));
    addEventListener("afterprint", () => print(0));
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
