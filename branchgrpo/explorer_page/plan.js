"use strict";
// A plan, its tree, its counts and its cost: the arithmetic of branchgrpo's lessons on counts, previews, the plan,
// pruning and costs, in the same words. tests/test_explorer.py compares both on random plans. No page is needed here.

const Plan = (() => {
  const range = (n) => Array.from({ length: Math.max(0, n) }, (_, i) => i);
  const sum = (xs) => xs.reduce((a, b) => a + b, 0);
  const ascending = (xs) => [...new Set(xs.map(Number))].sort((a, b) => a - b);
  const keys = (table) => ascending(Object.keys(table));
  const refuse = (text) => {
    throw new Error(text);
  };
  const MOST_NODES = 100000; // of one prompt's tree, as branchgrpo's settings allow

  // ---- the fields of a plan, complete and checked ------------------------------------------------------------------

  function stepSet(name, given, steps) {
    const chosen = ascending([...given]);
    for (const i of chosen) if (!(i >= 0 && i < steps)) refuse(`${name}: step ${i} is outside 0…${steps - 1}`);
    return new Set(chosen);
  }

  function stepTable(name, given, steps, what) {
    stepSet(name, Object.keys(given), steps);
    const table = {};
    for (const i of keys(given)) table[i] = Number(given[i]);
    for (const i of keys(table)) if (!(table[i] >= 1)) refuse(`${name}: ${what} ${table[i]} at step ${i} is below 1`);
    return table;
  }

  // {step: children of each node there}
  function fanTable(given, steps) {
    stepSet("fans", Object.keys(given), steps);
    return Object.fromEntries(keys(given).map((i) => [i, [...given[i]].map(Number)]));
  }

  function previewTable(given, steps, levels) {
    const table = {};
    for (const d of keys(given)) {
      if (!(d >= 0 && d < steps)) refuse(`previews: depth ${d} is outside 0…${steps - 1}`);
      for (const n of given[d]) {
        if (n < 1) refuse(`previews: ${n} steps at depth ${d} are below 1`);
        if (levels === "grid" && n > steps - d) {
          refuse(`previews: ${n} steps at depth ${d} are more than the ${steps - d} that are left there`);
        }
      }
      if (given[d].length) table[d] = [...given[d]];
    }
    return table;
  }

  function drawnSteps(stochastic, steps, noisyLast) {
    return new Set([...stochastic].filter((i) => noisyLast || i !== steps - 1));
  }

  function checkSide(p) {
    const steps = keys(p.side);
    const last = p.steps - 1;
    if (last in p.side) {
      refuse(`side: step ${last} is the last, whose branches are one image; 0…${last - 1} are allowed`);
    }
    const excluded = { splits: keys(p.splits).length, prune_at: keys(p.prune_at).length, noisy_last: p.noisy_last };
    for (const name of Object.keys(excluded)) {
      if (excluded[name]) refuse(`${name}: is not possible with side branches, at steps ${steps.join(", ")}`);
    }
    if (String([...p.stochastic]) !== String(steps)) {
      refuse(`stochastic: steps ${[...p.stochastic].join(", ")} are not those of the side branches, ${steps.join(", ")}`);
    }
  }

  function checkFans(p) {
    for (const i of keys(p.fans)) {
      const children = p.fans[i];
      if (i in p.splits || i in p.prune_at || keys(p.side).length) {
        refuse(`fans: step ${i} cannot split, prune or have side branches, too`);
      }
      if (!p.stochastic.has(i) || i === p.steps - 1) {
        refuse(`fans: step ${i} draws no noise, or is the last, so siblings would be equal`);
      }
      if (children.length !== p.populations[i] || !(Math.min(...children) >= 1)) {
        refuse(`fans: ${children.join(", ")} at step ${i} are not ${p.populations[i]} numbers of at least 1`);
      }
    }
  }

  function checkFields(p) {
    const last = p.steps - 1;
    for (const i of p.trained) if (!p.stochastic.has(i)) refuse(`trained: step ${i} is not stochastic`);
    if (p.trained.has(last) && !p.noisy_last) {
      refuse(`trained: step ${last} is the last, which draws no noise without noisy_last`);
    }
    for (const i of keys(p.splits)) {
      if (p.splits[i] > 1 && !p.stochastic.has(i)) {
        refuse(`splits: step ${i} is not stochastic, so siblings would be equal`);
      }
      if (p.splits[i] > 1 && i === last) {
        refuse(`splits: step ${i} is the last, whose siblings are one image; 0…${last - 1} are allowed`);
      }
    }
    for (const i of keys(p.prune_at)) {
      if (p.prune_at[i] > p.populations[i]) {
        refuse(`prune_at: ${p.prune_at[i]} survivors at step ${i} are more than the ${p.populations[i]} nodes there`);
      }
    }
  }

  // Return a plan with all fields, W_d and lineage; throw one line that begins with the field's name.
  function complete(given) {
    const steps = Number(given.steps);
    const roots = Number(given.roots ?? 1);
    if (!(steps >= 1)) refuse(`steps: ${given.steps} is below 1`);
    if (!(roots >= 1)) refuse(`roots: ${given.roots} is below 1`);
    const p = { steps, roots, noisy_last: !!given.noisy_last, same_root: !!given.same_root };
    p.splits = stepTable("splits", given.splits ?? {}, steps, "factor");
    p.prune_at = stepTable("prune_at", given.prune_at ?? {}, steps, "number of survivors");
    p.side = stepTable("side", given.side ?? {}, steps, "number of branches");
    p.fans = fanTable(given.fans ?? {}, steps);
    p.preview_levels = given.preview_levels ?? "grid";
    p.previews = previewTable(given.previews ?? {}, steps, p.preview_levels);
    const every = keys(p.side).length ? keys(p.side) : range(steps);
    p.stochastic = stepSet("stochastic", given.stochastic ?? every, steps);
    p.drawn = drawnSteps(p.stochastic, steps, p.noisy_last);
    p.trained = given.trained == null ? p.drawn : stepSet("trained", given.trained, steps);
    p.populations = populations(p);
    if (keys(p.side).length) checkSide(p);
    checkFields(p);
    checkFans(p);
    p.lineage = lineage(p);
    return p;
  }

  // ---- counts --------------------------------------------------------------------------------------------------------

  // Nodes of the next depth. Numbers alone: a tree too large to draw is counted, too.
  function nextWidth(p, step, width) {
    if (step in p.side) {
      const ended = step === Math.max(...keys(p.side)) ? p.roots : 0; // the trunk ends with its last side step
      return width - ended + p.roots * p.side[step];
    }
    if (step in p.fans) return sum(p.fans[step]);
    return (p.prune_at[step] ?? width) * (p.splits[step] ?? 1);
  }

  function populations(p) {
    const widths = [p.roots];
    for (const i of range(p.steps)) widths.push(nextWidth(p, i, widths[i]));
    return widths;
  }

  // The edges of a step: the parent of each node of the next depth, and whether noise is drawn on the way.
  function stepEdges(p, step) {
    const width = p.populations[step];
    const repeated = (children) => children.flatMap((k, n) => Array(k).fill(n));
    if (step in p.side) {
      const branches = repeated(Array(p.roots).fill(p.side[step]));
      const goingOn = range(width).slice(width + branches.length - p.populations[step + 1]);
      return { parents: [...goingOn, ...branches], drawn: [...goingOn.map(() => false), ...branches.map(() => true)] };
    }
    const alike = () => Array(p.prune_at[step] ?? width).fill(p.splits[step] ?? 1);
    const parents = repeated(p.fans[step] ?? alike());
    return { parents, drawn: parents.map(() => p.drawn.has(step)) };
  }

  // How many edges of a step draw noise, and from how many nodes they come.
  function noisyEdges(p, step) {
    if (step in p.side) return { edges: p.roots * p.side[step], parents: p.roots };
    return { edges: p.populations[step + 1], parents: p.prune_at[step] ?? p.populations[step] };
  }

  // W_d, or the survivors of a later checkpoint if those are fewer.
  function lineage(p) {
    return p.populations.map((width, d) => {
      const later = keys(p.prune_at).filter((i) => i >= d && d <= p.steps);
      return Math.min(width, ...later.map((i) => p.prune_at[i]));
    });
  }

  function previewNodes(p, depth) {
    const width = depth in p.previews ? p.populations[depth] : 0;
    const first = depth - 1 in p.side ? Math.max(0, width - noisyEdges(p, depth - 1).edges) : 0;
    return { first, count: width - first };
  }

  function costs(given, reference = false) {
    const p = given.populations ? given : complete(given);
    const previewed = keys(p.previews).map((d) => [previewNodes(p, d).count, p.previews[d]]);
    const nodes = sum(p.populations);
    const calls = sum(p.populations.slice(0, -1)) + sum(previewed.map(([n, steps]) => n * sum(steps.map((x) => x - 1))));
    const trained = [...p.trained];
    const trainedCalls = sum(trained.map((i) => Math.min(noisyEdges(p, i).parents, p.lineage[i])));
    const trainedEdges = sum(trained.map((i) => Math.min(noisyEdges(p, i).edges, p.lineage[i + 1])));
    return {
      calls,
      edges: nodes - p.roots,
      nodes,
      leaves: p.populations[p.steps],
      previews: sum(keys(p.prune_at).map((i) => p.populations[i])) + sum(previewed.map(([n, steps]) => n * steps.length)),
      trained_calls: trainedCalls,
      trained_edges: trainedEdges,
      flops: papersCost(calls, trainedCalls, reference),
    };
  }

  const papersCost = (calls, trainedCalls, reference) => calls + (reference ? 4 : 3) * trainedCalls;

  // ---- one tree ------------------------------------------------------------------------------------------------------

  // A stand-in for rewards: a random walk that takes a step wherever noise is drawn. The same seed, the same tree.
  function normals(seed) {
    let a = (seed * 2654435761 + 1013904223) >>> 0;
    const uniform = () => {
      a = (a + 0x6d2b79f5) >>> 0;
      let t = Math.imul(a ^ (a >>> 15), 1 | a);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
    return { uniform, normal };
  }

  const byValue = (values, sign) => range(values.length).sort((a, b) => sign * (values[a] - values[b]) || a - b);

  // The k values of largest variance: some from below, the others from above; among equals the fewest from below.
  function mostSpread(values, k) {
    const up = byValue(values, 1);
    const down = byValue(values, -1);
    let best = -1;
    let chosen = [];
    for (const low of range(k + 1)) {
      const kept = [...up.slice(0, low), ...down.slice(0, k - low)];
      const mean = sum(kept.map((i) => values[i])) / k;
      const variance = sum(kept.map((i) => (values[i] - mean) ** 2)) / k;
      if (variance > best + 1e-12) [best, chosen] = [variance, kept];
    }
    return ascending(chosen);
  }

  // Places drawn with odds that rise with the values, with replacement.
  function resampled(values, k, random) {
    const mean = sum(values) / values.length;
    const spread = Math.sqrt(sum(values.map((v) => (v - mean) ** 2)) / Math.max(1, values.length - 1)) || 1;
    const odds = values.map((v) => Math.exp((v - mean) / spread));
    const drawOne = () => {
      let left = random.uniform() * sum(odds);
      return Math.max(0, odds.findIndex((odd) => (left -= odd) < 0));
    };
    return range(k).map(drawOne).sort((a, b) => a - b);
  }

  function choose(rule, values, k, random) {
    if (rule === "re-root") return Array(k).fill(byValue(values, -1)[0]);
    if (rule === "resample") return resampled(values, k, random);
    if (rule === "best") return ascending(byValue(values, -1).slice(0, k));
    if (rule === "random") return ascending(byValue(values.map(() => random.uniform()), 1).slice(0, k));
    return mostSpread(values, k);
  }

  // Return, per depth, every node's parent, whether noise was drawn on the way, and a stand-in value; `selection` chooses
  // at pruning steps, and may keep a node several times.
  function grow(p, seed = 0, selection = "ovf") {
    const random = normals(seed);
    const common = random.normal();
    const values = [range(p.roots).map(() => (p.same_root ? common : random.normal()))];
    const parents = [range(p.roots).map(() => -1)];
    const drawn = [range(p.roots).map(() => false)];
    for (const i of range(p.steps)) {
      const survivors = i in p.prune_at ? choose(selection, values[i], p.prune_at[i], random) : null;
      const edges = stepEdges(p, i);
      const up = edges.parents.map((n) => (survivors ? survivors[n] : n));
      values.push(up.map((n, child) => values[i][n] + (edges.drawn[child] ? random.normal() : 0)));
      parents.push(up);
      drawn.push(edges.drawn);
    }
    return { parents, drawn, values, rewards: values[p.steps], random };
  }

  // Nodes on the paths to the leaves of a mask.
  function paths(tree, leafMask) {
    const keep = [leafMask];
    for (let d = tree.parents.length - 1; d > 0; d--) {
      const above = Array(tree.parents[d - 1].length).fill(false);
      tree.parents[d].forEach((n, child) => keep[0][child] && (above[n] = true));
      keep.unshift(above);
    }
    return keep;
  }

  // The mean reward of the leaves below each node, per depth; -∞ without leaves.
  function fused(tree, leafMask) {
    let sums = tree.rewards.map((r, n) => (leafMask[n] ? r : 0));
    let counts = leafMask.map(Number);
    const means = () => sums.map((s, n) => (counts[n] ? s / counts[n] : -Infinity));
    const all = [means()];
    for (let d = tree.parents.length - 1; d > 0; d--) {
      const [s, c] = [sums, counts];
      sums = Array(tree.parents[d - 1].length).fill(0);
      counts = [...sums];
      tree.parents[d].forEach((n, child) => ((sums[n] += s[child]), (counts[n] += c[child])));
      all.unshift(means());
    }
    return all;
  }

  // Nodes down to `depth`, then only descendants of those kept there.
  function descendants(tree, depth, kept) {
    const keep = tree.parents.slice(0, depth + 1).map((up) => up.map(() => true));
    for (const up of tree.parents.slice(depth + 1)) {
      kept = up.map((n) => kept[n]);
      keep.push(kept);
    }
    return keep;
  }

  // Whether two nodes of a depth have the same parent, and drew noise.
  function hasSiblings(tree, depth) {
    const parents = tree.parents[depth].filter((_, c) => tree.drawn[depth][c]);
    return new Set(parents).size < parents.length;
  }

  const RULES = {
    none: () => null,
    "parent-top1": (p, tree, leafMask) => {
      const last = range(p.steps + 1).findLast((d) => hasSiblings(tree, d));
      if (last === undefined) return null;
      const values = fused(tree, leafMask)[last];
      const best = {};
      tree.parents[last].forEach((n, c) => {
        if (tree.drawn[last][c] && (best[n] === undefined || values[c] > values[best[n]])) best[n] = c;
      });
      return descendants(tree, last, values.map((_, c) => !tree.drawn[last][c] || best[tree.parents[last][c]] === c));
    },
    extreme: (p, tree, leafMask, s) => {
      const order = byValue(tree.rewards, 1);
      const b = s.prune_keep;
      const kept = new Set([...order.slice(0, b), ...order.slice(Math.max(0, order.length - b))]);
      return paths(tree, tree.rewards.map((_, n) => kept.has(n)));
    },
    "depth-window": (p, tree, leafMask, s) =>
      tree.parents.map((up, d) => up.map(() => d - 1 < s.window_start || d - 1 >= s.window_start + s.window_size)),
  };

  // A share of the trained steps, drawn for each leaf; a node follows its first leaf.
  function randomSteps(p, tree, fraction) {
    const steps = ascending([...p.trained]);
    const kept = Math.max(1, Math.floor(fraction * steps.length));
    const chosen = tree.rewards.map(() => {
      const order = byValue(steps.map(() => tree.random.uniform()), 1);
      return new Set(order.slice(0, kept).map((n) => steps[n]));
    });
    const first = tree.parents.map((up) => up.map(() => 0));
    first[p.steps] = range(tree.rewards.length);
    for (let d = p.steps; d > 0; d--) {
      for (let child = tree.parents[d].length - 1; child >= 0; child--) first[d - 1][tree.parents[d][child]] = first[d][child];
    }
    return tree.parents.map((up, d) => up.map((_, n) => !p.trained.has(d - 1) || chosen[first[d][n]].has(d - 1)));
  }

  // Return which edges get a gradient, per depth; `rules` holds prune, group_selection, train_fraction and their numbers.
  function trainedEdges(p, tree, rules = {}) {
    const group = rules.group_selection ?? "all";
    const all = tree.rewards.map(() => true);
    let leafMask = all;
    if (group !== "all") {
      const kept = new Set(choose(group, tree.rewards, Math.min(rules.group_keep, all.length), tree.random));
      leafMask = all.map((_, n) => kept.has(n));
    }
    const masks = [paths(tree, leafMask)];
    const pruned = RULES[rules.prune ?? "none"](p, tree, leafMask, rules);
    if (pruned) masks.push(pruned);
    if ((rules.train_fraction ?? 1) !== 1) masks.push(randomSteps(p, tree, rules.train_fraction));
    return tree.parents.map((up, d) => {
      if (!p.trained.has(d - 1)) return up.map(() => false);
      return up.map((_, n) => tree.drawn[d][n] && masks.every((m) => m[d][n]));
    });
  }

  // Denoiser calls of an update: nodes with a trained edge to a child, per step.
  function trainedCallsByStep(tree, mask) {
    return range(mask.length - 1).map((i) => new Set(tree.parents[i + 1].filter((_, n) => mask[i + 1][n])).size);
  }

  // Return all that a page shows of a state: the plan, one tree, its trained edges, and its counts after pruning.
  function outcome(state, seed = 0) {
    const plan = complete(planOf(state));
    const cost = costs(plan, state.reference);
    if (cost.nodes > MOST_NODES) refuse(`roots: this tree has ${cost.nodes} nodes, more than ${MOST_NODES}`);
    const tree = grow(plan, seed, state.selection);
    const mask = trainedEdges(plan, tree, state);
    const byStep = trainedCallsByStep(tree, mask);
    const trained = sum(byStep);
    const edges = sum(mask.map((m) => m.filter(Boolean).length));
    const after = { trained_calls: trained, trained_edges: edges, flops: papersCost(cost.calls, trained, state.reference) };
    return { plan, tree, mask, by_step: byStep, cost: { ...cost, ...after }, planned: cost };
  }

  // ---- from the page's state to a plan ---------------------------------------------------------------------------------

  const windowOf = (s) => range(s.window_size).map((n) => s.window_start + n);

  function stepsOf(word, left, levels) {
    if (word === "x0") return 1;
    if (word.startsWith("ode")) {
      const stride = Number(word.slice(4) || 1);
      return Math.floor((left + stride - 1) / stride);
    }
    return levels === "even" ? Number(word) : Math.min(Number(word), left);
  }

  function previewsOf(s, drawn) {
    if (s.previews === "none") return {};
    if (s.previews === "hand") return s.preview_table;
    const last = Math.max(-1, ...drawn);
    const around = [...drawn].flatMap((i) => [i, i + 1]).filter((d) => d <= last);
    const after = [...drawn].map((i) => i + 1).filter((d) => d < s.steps);
    const depths = { drawn: around, after, hand: s.preview_depths }[s.preview_at];
    const words = s.previews.split("+");
    const entry = (d) => [d, words.map((word) => stepsOf(word, s.steps - d, s.preview_levels))];
    return Object.fromEntries(ascending(depths).map(entry));
  }

  function planOf(s) {
    const inside = windowOf(s);
    const every = (steps) => Object.fromEntries(steps.map((i) => [i, s.children]));
    const splits = { hand: s.splits, window: every(inside), "window-start": every(inside.slice(0, 1)) }[s.split_at];
    const side = { hand: s.side, window: every(inside), all: every(range(s.steps - 1)) }[s.side_at];
    const noise = { all: null, window: inside, "splits+window": ascending([...keys(splits), ...inside]), hand: s.stochastic };
    const stochastic = noise[s.noise];
    const sided = keys(side).length ? keys(side) : range(s.steps);
    const drawn = drawnSteps(stochastic ?? sided, s.steps, s.noisy_last);
    return {
      steps: s.steps,
      roots: s.roots,
      splits,
      prune_at: s.prune_at,
      stochastic,
      trained: s.gradient,
      noisy_last: s.noisy_last,
      same_root: s.same_root,
      side,
      fans: s.fans,
      previews: previewsOf(s, drawn),
      preview_levels: s.preview_levels,
    };
  }

  return { complete, costs, noisyEdges, previewNodes, grow, trainedEdges, outcome, planOf, windowOf, keys, range, sum, ascending };
})();

if (typeof module !== "undefined") module.exports = Plan;
