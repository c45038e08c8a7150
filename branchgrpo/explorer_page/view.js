"use strict";
// What the page shows and what a hand changes. All numbers come from Plan; every change draws the page anew.

const $ = (id) => document.getElementById(id);
const copyOf = (x) => JSON.parse(JSON.stringify(x));
const recipes = Object.fromEntries([...DATA.recipes, ...DATA.shapes].map((r) => [r.name, r])); // what a tree starts from
const comma = (n) => Math.round(n).toLocaleString("en-US");
const short = (n) => (n >= 100 ? comma(n) : Number(n.toFixed(n >= 10 ? 1 : 2)).toString());
const SVG = "http://www.w3.org/2000/svg";
const MOST_DRAWN = 6000; // edges; larger trees are counted, not drawn

let base = DATA.recipe; // the recipe that the page started from
let state = copyOf(DATA.start ?? recipes[base].state);
let chosen = 0; // the step whose numbers are open below the tree
let seed = 1; // of the stand-in rewards
let other = "dancegrpo";
let shown = null; // what Plan makes of the state
let refusal = ""; // why the last change was not made
let focus = null; // [row, step] of the grid

// ---- small helpers for elements ------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect", "circle", "text", "title", "line", "g"].includes(tag);
  const e = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) e.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) e.setAttribute(name, value === true ? "" : value);
  }
  e.append(...children);
  return e;
}

function fill(element, ...children) {
  element.replaceChildren(...children);
  return element;
}

// ---- changes of the state ----------------------------------------------------------------------------------------------

// A change that contradicts itself is said in one line, and taken back.
function change(edit) {
  const before = copyOf(state);
  edit(state);
  try {
    shown = Plan.outcome(state, seed);
    refusal = "";
  } catch (error) {
    [state, refusal] = [before, error.message];
  }
  render();
}

function byHand(name, set) {
  const { plan } = shown;
  if (name === "splits" && set.split_at !== "hand") [set.split_at, set.splits] = ["hand", { ...plan.splits }];
  if (name === "side" && set.side_at !== "hand") [set.side_at, set.side] = ["hand", { ...plan.side }];
  if (name === "noise" && set.noise !== "hand") [set.noise, set.stochastic] = ["hand", [...plan.stochastic]];
  if (name === "gradient" && set.gradient === null) set.gradient = [...plan.trained];
}

const toggled = (list, i) => (list.includes(i) ? list.filter((x) => x !== i) : Plan.ascending([...list, i]));

function setTable(name, i, value) {
  change((s) => {
    if (name !== "prune_at") byHand(name, s);
    const table = { ...s[name] };
    if (value >= (name === "splits" ? 2 : 1)) table[i] = value;
    else delete table[i];
    s[name] = table;
    if (name === "side") [s.noise, s.stochastic] = ["all", null];
    else s.fans = without(s.fans, i);
  });
}

function without(table, i) {
  const { [i]: _, ...rest } = table;
  return rest;
}

// Nodes with their own numbers of children; none: all alike again.
function setFan(i, children) {
  change((s) => {
    byHand("splits", s);
    s.splits = without(s.splits, i);
    s.prune_at = without(s.prune_at, i);
    s.fans = children.length ? { ...s.fans, [i]: children } : without(s.fans, i);
  });
}

function setNoise(i) {
  change((s) => {
    byHand("noise", s);
    s.stochastic = toggled(s.stochastic, i);
    if (s.gradient && !s.stochastic.includes(i)) s.gradient = s.gradient.filter((x) => x !== i);
  });
}

function setGradient(i) {
  change((s) => {
    byHand("gradient", s);
    s.gradient = toggled(s.gradient, i);
  });
}

// Fewer steps: what was by hand beyond the last one is gone, and the window moves in.
function setSteps(n) {
  change((s) => {
    s.steps = n;
    const within = (table, most) => Object.fromEntries(Object.entries(table).filter(([i]) => Number(i) < most));
    s.splits = within(s.splits, n - 1);
    s.side = within(s.side, n - 1);
    s.fans = within(s.fans, n - 1);
    s.prune_at = within(s.prune_at, n);
    s.preview_table = within(s.preview_table, n);
    s.preview_depths = s.preview_depths.filter((d) => d < n);
    if (s.stochastic) s.stochastic = s.stochastic.filter((i) => i < n);
    if (s.gradient) s.gradient = s.gradient.filter((i) => i < n - (s.noisy_last ? 0 : 1));
    s.window_size = Math.min(s.window_size, n);
    s.window_start = Math.min(s.window_start, n - s.window_size);
    chosen = Math.min(chosen, n - 1);
  });
}

function setChildren(k) {
  change((s) => {
    for (const i of Plan.keys(s.splits)) if (s.splits[i] === s.children) s.splits[i] = k;
    for (const i of Plan.keys(s.side)) if (s.side[i] === s.children) s.side[i] = k;
    s.children = k;
  });
}

function begin(name) {
  base = name;
  state = copyOf(recipes[name].state);
  if (name === other) other = name === "dancegrpo" ? "branchgrpo" : "dancegrpo";
  chosen = Math.min(chosen, state.steps - 1);
  change(() => {});
}

// ---- where a node is -------------------------------------------------------------------------------------------------

// Children share the room of their parent. Where nodes are kept several times, the new ones share the whole height.
function heightsFromRoots(plan, parents) {
  const even = (width) => Plan.range(width).map((n) => (n + 0.5) / width);
  const heights = [even(plan.roots)];
  let share = 1 / plan.roots;
  parents.slice(1).forEach((up, i) => {
    const counts = {};
    const order = up.map((n) => (counts[n] = (counts[n] ?? -1) + 1));
    const most = Math.max(...Object.values(counts)) + 1;
    if (i in plan.prune_at && most > (plan.splits[i] ?? 1)) {
      heights.push(even(up.length));
      share = 1 / up.length;
      return;
    }
    heights.push(up.map((n, c) => heights.at(-1)[n] + (most > 1 ? share * ((order[c] + 0.5) / most - 0.5) : 0)));
    if (most > 1) share /= most;
  });
  return heights;
}

function heightsFromTrunk(plan) {
  const total = Plan.sum(Object.values(plan.side));
  let left = total;
  const trunk = Plan.range(plan.roots).map((n) => (n + 1) / plan.roots);
  const heights = [trunk];
  for (const i of Plan.range(plan.steps)) {
    let now = heights.at(-1);
    if (i in plan.side) {
      left -= plan.side[i];
      const k = plan.side[i];
      const fresh = trunk.flatMap((y) => Plan.range(k).map((n) => y - (left + 1 + n) / (total + 1) / plan.roots));
      now = [...now.slice(now.length + fresh.length - plan.populations[i + 1]), ...fresh];
    }
    heights.push(now);
  }
  return heights;
}

// ---- the tree ----------------------------------------------------------------------------------------------------------

const gutter = () => (innerWidth < 640 ? 66 : 92);

function layout(plan) {
  const left = gutter();
  const room = $("sheet").clientWidth - left - 16;
  const column = Math.max(25, Math.min(90, room / plan.steps));
  return { left, column, width: left + column * plan.steps + 16, x: (d) => left + d * column };
}

const dot = (x, y, r) => `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`;
const square = (x, y, r) => `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`;
const cross = (x, y, r) => `M${x - r},${y - r}l${2 * r},${2 * r}m0,${-2 * r}l${-2 * r},${2 * r}`;

function edgePaths(o, x, y, alive) {
  const paths = {};
  o.tree.parents.slice(1).forEach((up, i) => {
    up.forEach((n, c) => {
      const noise = o.tree.drawn[i + 1][c];
      const kind = o.mask[i + 1][c] ? "trained" : noise ? "noise" : "plain";
      const name = `${kind}${alive[i + 1][c] ? "" : " gone"}`;
      const [x0, x1, y0, y1] = [x(i), x(i + 1), y[i][n], y[i + 1][c]];
      const xm = (x0 + x1) / 2;
      const line = Math.abs(y0 - y1) < 0.3 ? `H${x1}` : `C${xm},${y0} ${xm},${y1} ${x1},${y1}`;
      (paths[name] ??= []).push(`M${x0.toFixed(1)},${y0.toFixed(1)}${line}`);
    });
  });
  return paths;
}

function nodePaths(o, x, y, size) {
  const { plan, tree } = o;
  const marks = { scored: [], branch: [], root: [], leaf: [], pruned: [] };
  for (const n of Plan.range(plan.roots)) marks.root.push(dot(x(0), y[0][n], size));
  for (const i of Plan.range(plan.steps)) {
    const going = new Set(tree.parents[i + 1]);
    const noisy = Array(plan.populations[i]).fill(0); // edges of each node that draw noise
    tree.parents[i + 1].forEach((n, c) => (noisy[n] += tree.drawn[i + 1][c]));
    y[i].forEach((h, n) => {
      if (noisy[n] > 1 || (i in plan.side && noisy[n])) marks.branch.push(dot(x(i), h, i in plan.side ? Math.max(3, size) : size * 1.15));
      if (i in plan.prune_at && !going.has(n)) marks.pruned.push(cross(x(i), h, size * 0.8));
    });
  }
  for (const d of Plan.keys(plan.previews)) {
    const { first, count } = Plan.previewNodes(plan, d);
    for (const n of Plan.range(count)) marks.scored.push(dot(x(d), y[d][first + n], size * 0.75));
  }
  for (const h of y[plan.steps]) marks.leaf.push(square(x(plan.steps), h, size * 0.8));
  return marks;
}

function drawTree(o) {
  const { plan, tree } = o;
  const { width, x, column } = layout(plan);
  const most = Math.max(...plan.populations);
  const room = innerWidth < 640 ? 300 : 430;
  const height = Math.max(140, Math.min(room, most * 24));
  const svg = $("tree");
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  const summary = `A tree of ${plan.steps} steps with ${comma(o.cost.leaves)} images; ${comma(o.cost.trained_edges)} of ${comma(o.cost.edges)} edges get a gradient`;
  svg.setAttribute("aria-label", summary);
  const columns = Plan.range(plan.steps).map((i) =>
    make("rect", {
      class: `column${i === chosen ? " chosen" : ""}`, x: x(i), y: 0, width: column, height, rx: 5, onclick: () => choose(i),
    }),
  );
  if (o.cost.edges > MOST_DRAWN) {
    const text = make("text", { x: x(0) + 12, y: height / 2 }, `${comma(o.cost.edges)} edges: counted, but too many to draw`);
    fill(svg, ...columns, text);
    return;
  }
  const unit = Plan.keys(plan.side).length ? heightsFromTrunk(plan) : heightsFromRoots(plan, tree.parents);
  const y = unit.map((hs) => hs.map((h) => 8 + h * (height - 16)));
  const alive = [tree.rewards.map(() => true)];
  for (let d = plan.steps; d > 0; d--) {
    const above = Array(plan.populations[d - 1]).fill(false);
    tree.parents[d].forEach((n, c) => alive[0][c] && (above[n] = true));
    alive.unshift(above);
  }
  svg.style.setProperty("--thin", Math.max(0.35, Math.min(1, (height / most) * 0.14)).toFixed(2)); // edges of a crowd are thin
  const edges = edgePaths(o, x, y, alive);
  const order = ["plain gone", "noise gone", "trained gone", "plain", "noise", "trained"].filter((kind) => edges[kind]);
  const size = Math.max(1.3, Math.min(4.2, (height / most) * 0.36));
  const marks = nodePaths(o, x, y, size);
  fill(
    svg,
    ...columns,
    ...order.map((kind) => make("path", { class: `edge ${kind}`, d: edges[kind].join("") })),
    ...Object.keys(marks).map((kind) => make("path", { class: `node ${kind}`, d: marks[kind].join("") })),
  );
}

function drawBars(o) {
  const { plan } = o;
  const { width, x, column } = layout(plan);
  const extra = Plan.range(plan.steps).map((d) => {
    const steps = plan.previews[d] ?? [];
    return Plan.previewNodes(plan, d).count * Plan.sum(steps.map((n) => n - 1));
  });
  const totals = extra.map((n, i) => n + plan.populations[i]);
  const [height, most] = [58, Math.max(...totals)];
  const svg = $("bars");
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  const w = Math.min(30, column * 0.62);
  const rect = (i, from, n, name) => {
    const [h, y0] = [(n / most) * height, height - (from / most) * height];
    return make("rect", { class: name, x: x(i) + (column - w) / 2, y: y0 - h, width: w, height: h, rx: 2 });
  };
  const bars = Plan.range(plan.steps).flatMap((i) => [
    rect(i, 0, plan.populations[i], "bar"),
    ...(extra[i] ? [rect(i, plan.populations[i], extra[i], "node scored")] : []),
    rect(i, 0, o.by_step[i], "bar trained"),
  ]);
  fill(svg, ...bars);
  return totals;
}

const KEY = [
  ["edge trained", "noise, and a gradient"],
  ["edge noise", "noise, no gradient"],
  ["edge plain", "no noise"],
  ["node branch", "branches"],
  ["node pruned", "pruned in the rollout"],
  ["node scored", "completed and scored"],
];

function drawKey() {
  const sample = (name) => {
    const d = { edge: "M0,6H26", pruned: cross(13, 6, 4), branch: dot(13, 6, 4.5), scored: dot(13, 6, 3.5) };
    return make("path", { class: name, d: d[name.startsWith("edge") ? "edge" : name.split(" ")[1]] });
  };
  const item = ([name, text]) => make("span", {}, fill(make("svg", { "aria-hidden": "true" }), sample(name)), text);
  fill($("key"), ...KEY.map(item));
}

// ---- what each step does ---------------------------------------------------------------------------------------------

function rowsOf(o) {
  const { plan } = o;
  const half = (i) => Math.max(1, Math.floor(plan.populations[i] / 2));
  const children = (i) => (i in plan.fans ? `${Math.min(...plan.fans[i])}–${Math.max(...plan.fans[i])}` : plan.splits[i]);
  const cut = (name, i, value) => setTable(name, i, i in plan[name] ? 0 : value);
  const rows = {
    branch: {
      name: "children", on: (i) => i in plan.fans || (plan.splits[i] ?? 1) > 1, text: children,
      click: (i) => (i in plan.fans ? setFan(i, []) : cut("splits", i, state.children)),
      add: (i, n) => setTable("splits", i, (plan.splits[i] ?? 1) + n), off: (i) => i === plan.steps - 1,
    },
    side: {
      name: "side", on: (i) => i in plan.side, text: (i) => plan.side[i], click: (i) => cut("side", i, state.children),
      add: (i, n) => setTable("side", i, (plan.side[i] ?? 0) + n), off: (i) => i === plan.steps - 1,
    },
    noise: { name: "noise", on: (i) => plan.drawn.has(i), click: setNoise, off: (i) => i === plan.steps - 1 && !plan.noisy_last },
    gradient: { name: "gradient", on: (i) => plan.trained.has(i), click: setGradient, off: (i) => !plan.drawn.has(i) },
    survivors: {
      name: "survivors", on: (i) => i in plan.prune_at, text: (i) => plan.prune_at[i], click: (i) => cut("prune_at", i, half(i)),
      add: (i, n) => i in plan.prune_at && setTable("prune_at", i, Math.max(1, plan.prune_at[i] + n)), off: () => false,
    },
  };
  if (!sided(plan)) delete rows.side;
  else for (const name of ["branch", "survivors"]) delete rows[name];
  return rows;
}

const sided = (plan) => Plan.keys(plan.side).length > 0;

function drawGrid(o, totals) {
  const { plan } = o;
  const { left, column, width } = layout(plan);
  const grid = $("grid");
  const rows = rowsOf(o);
  const kinds = Object.keys(rows);
  grid.style.gridTemplateColumns = `${left}px repeat(${plan.steps}, ${column}px)`;
  grid.style.width = `${width}px`;
  if (focus && !kinds.includes(focus[0])) focus = null;
  const [at, when] = focus ?? [kinds[0], chosen];
  const button = (kind, i) => {
    const row = rows[kind];
    const on = row.on(i);
    const text = on && row.text ? row.text(i) : "";
    return make("button", {
      type: "button", class: `${kind}${on ? " on" : ""}`, disabled: row.off(i), "aria-pressed": String(on),
      "aria-label": `step ${i}, ${row.name}${text ? ` ${text}` : ""}`, tabindex: kind === at && i === when ? 0 : -1,
      "data-row": kind, "data-step": i, onclick: () => ((chosen = i), (focus = [kind, i]), row.click(i)),
    }, String(text));
  };
  const numbers = (name, of) =>
    make("div", { role: "row" }, make("div", { class: "name", role: "rowheader" }, name),
      ...Plan.range(plan.steps).map((i) => {
        const n = of(i);
        const size = String(n).length > 3 ? "font-size:0.68rem" : null;
        return make("div", { class: `number${i === chosen ? " chosen" : ""}`, role: "gridcell", style: size }, String(n));
      }));
  const buttons = kinds.map((kind) =>
    make("div", { role: "row" }, make("div", { class: "name", role: "rowheader" }, rows[kind].name),
      ...Plan.range(plan.steps).map((i) => fill(make("div", { role: "gridcell", style: "display:grid" }), button(kind, i)))));
  const held = grid.contains(document.activeElement);
  fill(grid, numbers("step", (i) => i), ...buttons, numbers("calls", (i) => totals[i]), numbers("trained", (i) => o.by_step[i]));
  if (held && focus) grid.querySelector(`[data-row="${at}"][data-step="${when}"]`)?.focus({ preventScroll: true });
}

function moveInGrid(event) {
  const cell = event.target.closest("button[data-row]");
  if (!cell) return;
  const [row, i] = [cell.dataset.row, Number(cell.dataset.step)];
  const kinds = Object.keys(rowsOf(shown));
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -i], End: [0, 999] };
  const number = { "+": 1, "=": 1, "-": -1 }[event.key];
  if (number && rowsOf(shown)[row].add) {
    [chosen, focus] = [i, [row, i]];
    rowsOf(shown)[row].add(i, number);
  } else if (moves[event.key]) {
    const [down, right] = moves[event.key];
    const to = Math.max(0, Math.min(shown.plan.steps - 1, i + right));
    const kind = kinds[Math.max(0, Math.min(kinds.length - 1, kinds.indexOf(row) + down))];
    [chosen, focus] = [to, [kind, to]];
    render();
    $("grid").querySelector(`[data-row="${kind}"][data-step="${to}"]`).focus();
  } else return;
  event.preventDefault();
}

function choose(i) {
  chosen = i;
  render();
}

// ---- controls: each is made once and follows the state ---------------------------------------------------------------

const followers = []; // called at every change

function follow(input, value, write) {
  followers.push(() => {
    if (document.activeElement !== input || input.type === "range") write(value());
  });
}

function labelled(text, input) {
  return [make("span", {}, text), input];
}

function number(text, value, set, most = 9999, least = 1) {
  const input = make("input", { type: "number", min: least, max: most, "aria-label": text });
  input.addEventListener("input", () => {
    const n = Math.round(Number(input.value));
    if (input.value !== "" && n >= least && n <= most) set(n);
  });
  input.addEventListener("blur", () => (input.value = value()));
  follow(input, value, (n) => (input.value = n));
  return fill(make("label", { class: "row" }), ...labelled(text, input));
}

// A list of whole numbers, such as 4, 2, 1.
function numbers(text, value, set) {
  const input = make("input", { type: "text", inputmode: "numeric", "aria-label": text, style: "width: 9em" });
  input.onchange = () => set((input.value.match(/\d+/g) ?? []).map(Number));
  follow(input, () => value().join(", "), (words) => (input.value = words));
  return fill(make("label", { class: "row" }), ...labelled(text, input));
}

function slider(text, value, set, bounds, unit = (n) => n) {
  const input = make("input", { type: "range", "aria-label": text });
  const out = make("output", {});
  input.addEventListener("input", () => set(Number(input.value)));
  follow(input, value, (n) => {
    const [least, most, step] = bounds();
    Object.assign(input, { min: least, max: most, step: step ?? 1 });
    input.value = n;
    out.textContent = unit(n);
  });
  return fill(make("label", { class: "row" }), make("span", {}, text), out, input);
}

function pick(text, options, value, set) {
  const items = Object.entries(options).map(([key, name]) => make("option", { value: key }, name));
  const input = fill(make("select", { "aria-label": text, onchange: () => set(input.value) }), ...items);
  follow(input, value, (key) => (input.value = key));
  return fill(make("label", { class: "row" }), ...labelled(text, input));
}

function check(text, value, set) {
  const input = make("input", { type: "checkbox", onchange: () => set(input.checked) });
  followers.push(() => (input.checked = value()));
  return fill(make("label", { class: "row" }), ...labelled(text, input));
}

function when(condition, element) {
  followers.push(() => element.classList.toggle("off", !condition()));
  return element;
}

function press(text, click) {
  return make("button", { type: "button", onclick: click }, text);
}

const put = (name) => (value) => change((s) => (s[name] = value));
const get = (name) => () => state[name];
const usesWindow = () =>
  state.noise.includes("window") || state.split_at !== "hand" || state.side_at === "window" || state.prune === "depth-window";

function buildControls() {
  const fields = (title, ...parts) => fill(make("fieldset"), make("legend", {}, title), ...parts);
  const by = { hand: "by hand", window: "all of the window" };
  fill(
    $("controls"),
    fields(
      "The tree",
      slider("steps T", get("steps"), setSteps, () => [2, Math.max(60, state.steps)]),
      number("roots: first noises", get("roots"), put("roots"), 512),
      when(() => state.roots > 1, check("all roots start from one noise", get("same_root"), put("same_root"))),
      number("children K at a split", get("children"), setChildren, 64, 2),
      pick("splits", { ...by, "window-start": "the window's first" }, get("split_at"), put("split_at")),
      pick("side branches", { hand: "none, or by hand", window: "in the window", all: "at every step" }, get("side_at"), setSideAt),
      when(() => state.side_at === "hand", fill(make("div", { class: "row" }), make("span", {}, "side branch at the chosen step"), press("Add", () => addSide()))),
    ),
    fields(
      "Noise",
      pick("steps with noise", { all: "all", window: "the window", "splits+window": "splits and window", hand: "by hand" }, get("noise"), setNoiseMode),
      check("the last step draws noise", get("noisy_last"), put("noisy_last")),
    ),
    when(usesWindow, fields(
      "The window",
      slider("first step", get("window_start"), put("window_start"), () => [0, state.steps - state.window_size]),
      slider("steps inside", get("window_size"), setWindowSize, () => [1, state.steps]),
    )),
    fields(
      "Pruned while they are made",
      make("p", { class: "note", style: "margin:0 0 6px" }, "Set them in the row survivors, or for the chosen step."),
      pick("keep", { ovf: "most spread (ovf)", best: "the best", random: "any (random)", diverse: "ovf and looks",
        "re-root": "only the best (re-root)", resample: "drawn by reward (resample)" }, get("selection"), put("selection")),
      when(() => Plan.keys(state.prune_at).length, press("Remove all pruning steps", () => change((s) => (s.prune_at = {})))),
    ),
    fields(
      "Gradient: pruned afterwards",
      pick("edges", { none: "all with noise", "parent-top1": "best of each family", extreme: "best and worst", "depth-window": "all but the window" }, get("prune"), put("prune")),
      when(() => state.prune === "extreme", number("best and worst: b", get("prune_keep"), put("prune_keep"), 4096)),
      pick("images that count", { all: "all", ovf: "most spread (ovf)", best: "the best", random: "any (random)", diverse: "ovf and looks" }, get("group_selection"), setGroup),
      when(() => state.group_selection !== "all", number("how many", get("group_keep"), put("group_keep"), 4096)),
      slider("steps of each image", get("train_fraction"), put("train_fraction"), () => [0.1, 1, 0.05], (x) => `${Math.round(100 * x)} %`),
      check("KL to a reference model", get("reference"), put("reference")),
      when(() => state.gradient !== null, press("Train every step with noise", () => change((s) => (s.gradient = null)))),
    ),
    fields(
      "Previews",
      pick("complete and score", { none: "nothing", x0: "x̂₀: one step", ode: "all steps left", "ode/2": "half the steps", hand: "as the recipe" }, previewWord, setPreviews),
      when(() => !["none", "hand"].includes(previewWord()), pick("latents", { drawn: "around steps with noise", after: "after steps with noise", hand: "depths by hand" }, get("preview_at"), put("preview_at"))),
    ),
    fields("Rewards", press("Draw other rewards", () => change(() => (seed += 1)))),
  );
}

const SIMPLE = ["none", "x0", "ode", "ode/2"];
const previewWord = () => (SIMPLE.includes(state.previews) ? state.previews : "hand");

function setPreviews(word) {
  change((s) => {
    if (word === "hand") [s.previews, s.preview_table] = ["hand", copyOf(recipes[base].table)];
    else s.previews = word;
  });
}

function setGroup(rule) {
  change((s) => {
    s.group_selection = rule;
    if (rule !== "all" && !s.group_keep) s.group_keep = Math.max(1, Math.floor(shown.cost.leaves / 2));
  });
}

function setWindowSize(n) {
  change((s) => {
    s.window_size = n;
    s.window_start = Math.min(s.window_start, s.steps - n);
  });
}

function setNoiseMode(mode) {
  change((s) => {
    if (mode === "hand") byHand("noise", s);
    s.noise = mode;
    s.gradient = null;
  });
}

const clean = (s) => Object.assign(s, { splits: {}, fans: {}, split_at: "hand", prune_at: {}, noisy_last: false, noise: "all", gradient: null, prune: "none" });

function setSideAt(where) {
  change((s) => {
    if (where === "hand") Object.assign(s, { side: {}, side_at: "hand", noise: "all", gradient: null });
    else Object.assign(clean(s), { side_at: where });
  });
}

function addSide() {
  const i = Math.min(chosen, state.steps - 2);
  change((s) => Object.assign(Object.keys(s.side).length ? s : clean(s), { side: { ...s.side, [i]: s.children } }));
}

function buildStep() {
  const title = make("b", {});
  followers.push(() => (title.textContent = `Step ${chosen}`));
  const table = (name) => () => shown.plan[name][chosen] ?? (name === "splits" ? 1 : 0);
  const fan = () => shown.plan.fans[chosen] ?? [];
  const unless = (condition, element) => when(() => !condition(), element);
  fill(
    $("step"),
    title,
    unless(() => sided(shown.plan) || chosen === state.steps - 1, number("children", table("splits"), (n) => setTable("splits", chosen, n), 64)),
    unless(() => sided(shown.plan) || chosen === state.steps - 1 || shown.plan.populations[chosen] > 32, numbers("children of each node", fan, (list) => setFan(chosen, list))),
    when(() => sided(shown.plan) && chosen < state.steps - 1, number("side branches", table("side"), (n) => setTable("side", chosen, n), 64, 0)),
    unless(() => sided(shown.plan), number("survivors (0: no pruning here)", table("prune_at"), (n) => setTable("prune_at", chosen, n), 4096, 0)),
    unless(() => sided(shown.plan), check("noise", () => shown.plan.drawn.has(chosen), () => setNoise(chosen))),
    when(() => shown.plan.drawn.has(chosen), check("gradient", () => shown.plan.trained.has(chosen), () => setGradient(chosen))),
  );
}

// ---- numbers -------------------------------------------------------------------------------------------------------------

const COSTS = {}; // of every recipe, counted once

function costOf(name) {
  return (COSTS[name] ??= Plan.outcome(recipes[name].state, 1).cost);
}

const ROWS = {
  "images": (c) => c.leaves,
  "rollout calls": (c) => c.calls,
  "trained calls": (c) => c.trained_calls,
  "cost": (c) => c.flops,
  "cost per image": (c) => c.flops / c.leaves,
};

function percent(a, b) {
  const change = Math.round(100 * (a / b - 1));
  return change ? `${change > 0 ? "+" : "−"}${Math.abs(change)} %` : "the same";
}

function drawTiles(o) {
  const their = costOf(other);
  const tile = (name, value, note, kind = "") =>
    make("div", { class: `tile ${kind}` }, make("i", {}, note), make("b", {}, value), make("span", {}, name));
  const c = o.cost;
  const against = (name) => percent(ROWS[name](c), ROWS[name](their));
  fill(
    $("tiles"),
    tile("images", comma(c.leaves), ""),
    tile("rollout calls", comma(c.calls), against("rollout calls")),
    tile("trained calls", comma(c.trained_calls), against("trained calls")),
    tile(`of ${comma(c.edges)} edges trained`, comma(c.trained_edges), ""),
    tile("cost", comma(c.flops), against("cost")),
    tile("cost per image", short(c.flops / c.leaves), against("cost per image"), "main"),
  );
}

function drawTable(o) {
  const their = costOf(other);
  const head = ["", "this plan", other, "", ""].map((text, n) => make("th", { class: n && n < 4 ? "n" : null }, text));
  const rows = Object.entries(ROWS).map(([name, of]) => {
    const [a, b] = [of(o.cost), of(their)];
    const length = (n) => `width:${(100 * n) / Math.max(a, b)}%`;
    const pair = make("div", { class: "pair" }, make("i", { class: "mine", style: length(a) }), make("i", { style: length(b) }));
    const good = name !== "images" && a !== b ? (a < b ? " less" : " more") : "";
    return make("tr", {}, make("td", {}, name), make("td", { class: "n" }, short(a)), make("td", { class: "n" }, short(b)),
      make("td", { class: `ratio${good}` }, a === b ? "the same" : `× ${short(a / b)}`), fill(make("td"), pair));
  });
  fill($("table"), fill(make("table"), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
}

function drawStrip(o) {
  const width = Math.max(280, $("strip").clientWidth);
  const of = (c) => c.flops / c.leaves;
  const all = DATA.recipes.map((r) => [r, of(costOf(r.name))]);
  const mine = of(o.cost);
  const values = [...all.map(([, v]) => v), mine];
  const [low, high] = [Math.log(Math.min(...values)) - 0.1, Math.log(Math.max(...values)) + 0.1];
  const x = (v) => 12 + ((Math.log(v) - low) / (high - low)) * (width - 24);
  const taken = [];
  const spot = (v) => {
    let level = 0;
    while (taken.some(([tx, tl]) => tl === level && Math.abs(tx - x(v)) < 13)) level += 1;
    taken.push([x(v), level]);
    return level;
  };
  const placed = all.sort((a, b) => a[1] - b[1]).map(([r, v]) => [r, v, spot(v)]);
  const tall = Math.max(...placed.map(([, , level]) => level));
  const floor = 14 + 13 * tall + 10;
  const ticks = [5, 10, 20, 50, 100, 200, 500, 1000, 2000].filter((v) => Math.log(v) > low && Math.log(v) < high);
  const svg = make("svg", { height: floor + 24, role: "img", "aria-label": "Every recipe by its cost per image" });
  svg.append(make("line", { class: "axis", x1: 0, x2: width, y1: floor, y2: floor }));
  for (const v of ticks) svg.append(make("text", { x: x(v), y: floor + 16, "text-anchor": "middle" }, String(v)));
  svg.append(make("line", { class: "mine", x1: x(mine), x2: x(mine), y1: 0, y2: floor + 4 }));
  for (const [r, v, level] of placed) {
    const circle = make("circle", { cx: x(v), cy: floor - 9 - 13 * level, r: r.name === other ? 7 : 5.5, fill: r.colour, onclick: () => compareWith(r.name) });
    circle.append(make("title", {}, `${r.name}: ${short(v)} per image`));
    svg.append(circle);
  }
  fill($("strip"), svg);
}

function compareWith(name) {
  other = name;
  render();
}

function pythonOf(plan) {
  const table = (t) => `{${Plan.keys(t).map((i) => `${i}: ${t[i]}`).join(", ")}}`;
  const set = (steps) => `{${[...steps].join(", ")}}`;
  const given = [String(plan.steps)];
  if (plan.roots > 1) given.push(`roots=${plan.roots}`);
  if (plan.same_root) given.push("same_root=True");
  const lists = (t) => `{${Plan.keys(t).map((i) => `${i}: (${t[i].join(", ")}${t[i].length > 1 ? "" : ","})`).join(", ")}}`;
  for (const name of ["splits", "prune_at", "side"]) if (Plan.keys(plan[name]).length) given.push(`${name}=${table(plan[name])}`);
  if (Plan.keys(plan.fans).length) given.push(`fans=${lists(plan.fans)}`);
  const usual = sided(plan) ? Plan.keys(plan.side) : Plan.range(plan.steps);
  if (String([...plan.stochastic]) !== String(usual)) given.push(`stochastic=${set(plan.stochastic)}`);
  if (String([...plan.trained]) !== String([...plan.drawn])) given.push(`trained=${plan.trained.size ? set(plan.trained) : "set()"}`);
  if (plan.noisy_last) given.push("noisy_last=True");
  if (Plan.keys(plan.previews).length) {
    given.push(`previews={${Plan.keys(plan.previews).map((d) => `${d}: (${plan.previews[d].join(", ")},)`).join(", ")}}`);
    if (plan.preview_levels !== "grid") given.push(`preview_levels="${plan.preview_levels}"`);
  }
  return `from branchgrpo import RolloutPlan\nfrom branchgrpo.plan import plan_cost\nfrom branchgrpo.site.explorer import explore\n\nplan = RolloutPlan(${given.join(", ")})\nplan_cost(plan)  # the same counts, before pruning\nexplore(plan)  # this page in a notebook`;
}

// ---- the page ------------------------------------------------------------------------------------------------------------

function drawAbout() {
  const recipe = recipes[base];
  const same = JSON.stringify(state) === JSON.stringify(recipe.state);
  const paper = recipe.paper ? ` (${recipe.paper})` : "";
  fill($("about"), make("b", {}, `${same ? "" : "changed from "}${base}`), `: ${recipe.summary}${paper}.`);
}

function keepAddress() {
  const own = recipes[base].state;
  const differences = Object.fromEntries(Object.entries(state).filter(([k, v]) => JSON.stringify(v) !== JSON.stringify(own[k])));
  try {
    if (self === top) history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify({ recipe: base, ...differences }))}`);
  } catch {
    // a page without an address of its own
  }
}

function fromAddress() {
  try {
    const { recipe, ...differences } = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    if (!recipes[recipe]) return;
    base = recipe;
    state = { ...copyOf(recipes[recipe].state), ...differences };
    Plan.outcome(state);
  } catch {
    state = copyOf(DATA.start ?? recipes[base].state);
  }
}

function render() {
  $("refusal").hidden = !refusal;
  $("refusal").textContent = refusal;
  $("recipe").value = base;
  $("other").value = other;
  $("compared").textContent = `Cost, against ${other}`;
  followers.forEach((f) => f());
  drawAbout();
  drawTree(shown);
  drawGrid(shown, drawBars(shown));
  drawTiles(shown);
  drawTable(shown);
  drawStrip(shown);
  $("python").textContent = pythonOf(shown.plan);
  keepAddress();
  if (self !== top) fitFrame();
}

function fitFrame() {
  try {
    frameElement.style.height = `${document.body.scrollHeight + 4}px`;
  } catch {
    // a frame of another origin keeps its height
  }
}

// Light or dark: as the page around (a site's or JupyterLab's), else as the system says, or as the button was pressed.
function useTheme(name) {
  document.documentElement.dataset.theme = name;
}

function themeAround() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  try {
    const around = self !== top ? parent.document.body.dataset : {};
    if (around.jpThemeLight) return around.jpThemeLight === "true" ? "light" : "dark";
    if (["light", "dark"].includes(around.theme)) return around.theme;
  } catch {
    // a page of another origin
  }
  return system;
}

function watchTheme() {
  useTheme(themeAround());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => useTheme(themeAround()));
  try {
    if (self !== top) new MutationObserver(() => useTheme(themeAround())).observe(parent.document.body, { attributes: true });
  } catch {
    // a page of another origin
  }
  $("theme").onclick = () => useTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

const options = (entries) => entries.map((r) => make("option", { value: r.name }, r.name));

const group = (title, entries) => fill(make("optgroup", { label: title }), ...options(entries));

function begun() {
  watchTheme();
  document.body.classList.toggle("embedded", self !== top);
  fill($("recipe"), ...options(DATA.recipes), group("Shapes of no paper", DATA.shapes));
  fill($("other"), ...options(DATA.recipes));
  $("recipe").onchange = () => begin($("recipe").value);
  $("again").onclick = () => begin(base);
  $("other").onchange = () => compareWith($("other").value);
  $("grid").addEventListener("keydown", moveInGrid);
  $("copy").onclick = () => navigator.clipboard?.writeText($("python").textContent);
  if (!DATA.start && self === top && location.hash.length > 1) fromAddress();
  shown = Plan.outcome(state, seed);
  drawKey();
  buildControls();
  buildStep();
  render();
  addEventListener("resize", render);
}

begun();
