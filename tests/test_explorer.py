"""The explorer's JavaScript counts what the library counts: on random plans, on every recipe, and
edge by edge."""

import importlib
import json
import random
import re
from dataclasses import asdict, replace

import pytest
import torch
from py_mini_racer import MiniRacer

from branchgrpo import recipes
from branchgrpo.fusion import fuse_rewards
from branchgrpo.plan import RolloutPlan, plan_cost
from branchgrpo.planning import at_places, plan_of, window_steps
from branchgrpo.pruning import PruningOptions, keep_edges
from branchgrpo.site.explorer import (
    SHAPES,
    explorer_page,
    explorer_part,
    plan_fields,
    plan_state,
    recipe_state,
    shape_entry,
)
from branchgrpo.tree import Tree


@pytest.fixture(scope="module")
def js():
    """A function that evaluates JavaScript in which the page's arithmetic is loaded; values go in
    and out as JSON."""
    context = MiniRacer()
    context.eval(explorer_part("plan.js"))

    def call(code, *values):
        given = ", ".join(json.dumps(value) for value in values)
        return json.loads(context.eval(f"JSON.stringify(({code})({given}))"))

    return call


def some(draw, steps, share):
    return [i for i in range(steps) if draw.random() < share]


def fans_of(draw, fields, steps):
    "At some steps each node's own number of children, mostly for as many nodes as there are."
    fans, width = {}, fields["roots"]
    for i in range(steps):
        if i not in fields["splits"] and draw.random() < 0.3 and width < 50:
            count = width if draw.random() < 0.9 else width + 1
            fans[i] = [draw.randint(0 if draw.random() < 0.02 else 1, 4) for _ in range(count)]
            width = sum(fans[i])
        else:
            width *= fields["splits"].get(i, 1)
    return fans


def random_plan(draw):
    "A plan that may contradict itself; `None` where the library refuses it."
    steps = draw.randint(1, 14)
    fields = {
        "roots": draw.choice((1, 1, 2, 5, 12)),
        "noisy_last": draw.random() < 0.2,
        "same_root": draw.random() < 0.3,
    }
    if draw.random() < 0.5:
        fields["stochastic"] = some(draw, steps, 0.8)
    if draw.random() < 0.3:
        fields["trained"] = some(draw, steps, 0.4)
    kind = draw.choice(("tree", "tree", "fans", "side"))
    if kind == "side":
        fields["side"] = {i: draw.randint(1, 4) for i in some(draw, steps, 0.4)}
        fields |= {"stochastic": None, "noisy_last": draw.random() < 0.05}
    else:
        fields["splits"] = {i: draw.randint(1, 4) for i in some(draw, steps, 0.25)}
        fields["prune_at"] = {i: draw.randint(1, 9) for i in some(draw, steps, 0.2)}
    if kind == "fans":
        fields["prune_at"] = {}
        fields["fans"] = fans_of(draw, fields, steps)
    if draw.random() < 0.4:
        fields["preview_levels"] = draw.choice(("grid", "even"))
        fields["previews"] = {
            d: [draw.randint(1, 3) for _ in range(draw.randint(0, 2))]
            for d in some(draw, steps, 0.3)
        }
    return {"steps": steps} | fields


def made(fields):
    "The library's plan and its refusal: one of them is None."
    try:
        return RolloutPlan(**fields), None
    except ValueError as error:
        return None, str(error)


REFUSAL = (
    "plan => { try { Plan.complete(plan); return null } catch (error) { return error.message } }"
)


def test_counts_are_the_librarys(js):
    draw, compared, refused = random.Random(0), 0, 0
    while compared < 300 or refused < 100:
        fields = random_plan(draw)
        plan, refusal = made(fields)
        if refusal:
            refused += 1
            assert (js(REFUSAL, fields) or "").split(":")[0] == refusal.split(":")[0], (
                fields,
                refusal,
            )
            continue
        compared += 1
        reference = draw.random() < 0.5
        expected = asdict(plan_cost(plan, reference=reference))
        del expected["latent_bytes"]
        assert js("Plan.costs", fields, reference) == expected, fields
        assert js("plan => Plan.complete(plan).populations", fields) == plan.populations
        assert js("plan => Plan.complete(plan).lineage", fields) == plan.lineage


COMPLETE = """state => {
    const plan = Plan.complete(Plan.planOf(state));
    return {...plan, stochastic: [...plan.stochastic], trained: [...plan.trained]};
}"""


def as_json(plan):
    "The fields of a plan as the explorer has them."
    return json.loads(json.dumps(plan_fields(plan)))


def shared(plan, fields):
    return {name: plan[name] for name in fields}


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipes_state_makes_its_plan(js, name):
    settings = replace(recipes.get(name).values, adaptive=False)
    state = recipe_state(recipes.get(name))
    for at in at_places(settings):
        here = state | ({"window_start": window_steps(at)[0]} if settings.window != "none" else {})
        if settings.tail_ratio and window_steps(at) != window_steps(settings):
            continue  # a solver's tail has fewer steps at later places
        expected = as_json(plan_of(at))
        if not isinstance(settings.preview_at, str) and settings.preview_at:
            here["preview_depths"] = list(settings.preview_at)
        assert shared(js(COMPLETE, here), expected) == expected


def test_a_plans_state_makes_the_plan(js):
    draw = random.Random(1)
    plans = [plan for plan, refusal in (made(random_plan(draw)) for _ in range(400)) if not refusal]
    assert len(plans) > 100
    for plan in plans:
        expected = as_json(plan)
        assert shared(js(COMPLETE, plan_state(plan)), expected) == expected, plan


GROWN = """(fields, seed) => {
    const plan = Plan.complete(fields);
    const tree = Plan.grow(plan, seed);
    return {parents: tree.parents, rewards: tree.rewards};
}"""
MASK = """(fields, seed, rules) => {
    const plan = Plan.complete(fields);
    return Plan.trainedEdges(plan, Plan.grow(plan, seed), rules);
}"""


def library_tree(plan, grown):
    tree = Tree.from_plan(plan)
    tree.parents = [torch.tensor([up]) for up in grown["parents"]]
    return tree, torch.tensor([grown["rewards"]], dtype=torch.float64)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_of_no_paper_is_counted_as_the_library_counts_it(js, name):
    plan, entry = SHAPES[name][1], shape_entry(name)
    outcome = js("(state) => Plan.outcome(state, 1)", entry["state"])
    expected = plan_cost(plan)
    assert outcome["planned"]["calls"] == expected.calls
    assert outcome["planned"]["trained_edges"] == expected.trained_edges
    assert outcome["cost"]["leaves"] == plan.leaves
    assert max(map(len, outcome["tree"]["parents"][1:])) == max(plan.populations)
    assert f'"name": "{name}"' in explorer_page()


@pytest.mark.parametrize("rule", ["re-root", "resample"])
def test_a_rule_that_keeps_a_node_several_times_gives_it_several_children(js, rule):
    fields = {"steps": 4, "roots": 6, "prune_at": {2: 5}}
    grown = js(
        "(f, rule) => { const p = Plan.complete(f); return Plan.grow(p, 3, rule) }", fields, rule
    )
    kept = grown["parents"][3]
    assert len(kept) == 5 and kept == sorted(kept) and len(set(kept)) < 5
    best = max(range(6), key=lambda node: grown["values"][2][node])
    assert best in kept and (rule == "resample" or set(kept) == {best})
    mask = js(
        "(f, rule) => Plan.trainedEdges(Plan.complete(f), Plan.grow(Plan.complete(f), 3, rule))",
        fields,
        rule,
    )
    tree, rewards = library_tree(RolloutPlan(**fields), grown)
    counted = torch.ones_like(rewards, dtype=torch.bool)
    values = fuse_rewards(tree, rewards, 0.0, "path", counted)
    expected = keep_edges(tree, counted, "none", values, rewards)
    assert mask == [of_depth[0].tolist() for of_depth in expected]


@pytest.mark.parametrize("prune", ["none", "parent-top1", "extreme", "depth-window"])
def test_trained_edges_are_the_librarys(js, prune):
    draw, compared = random.Random(prune), 0
    while compared < 60:
        fields = random_plan(draw)
        plan, refusal = made(fields)
        if refusal or plan.nodes > 2000:
            continue
        start = draw.randint(0, plan.steps - 1)
        rules = {
            "prune_keep": draw.randint(1, 4),
            "window_start": start,
            "window_size": draw.randint(1, plan.steps - start),
        }
        grown = js(GROWN, fields, compared)
        tree, rewards = library_tree(plan, grown)
        assert [len(up) for up in grown["parents"]] == plan.populations
        counted = torch.ones_like(rewards, dtype=torch.bool)
        options = PruningOptions(**rules, window_stop=start)
        values = fuse_rewards(tree, rewards, 0.0, "path", counted)
        expected = [
            mask[0].tolist()
            for mask in keep_edges(tree, counted, prune, values, rewards, options=options)
        ]
        assert js(MASK, fields, compared, rules | {"prune": prune}) == expected, (fields, rules)
        # there the plan's number is the most there can be
        if prune == "none" and not (plan.prune_at and plan.splits):
            assert sum(map(sum, expected)) == plan.trained_edges
        compared += 1


def test_a_huge_tree_is_refused(js):
    state = plan_state(RolloutPlan.tree(20, range(17), 3))
    message = js(
        "state => { try { Plan.outcome(state); return null } catch (error) { return"
        " error.message } }",
        state,
    )
    assert "more than 100000" in message


def test_the_page_is_one_file():
    page = explorer_page(RolloutPlan(6, roots=4))
    assert page.count("<script>") == page.count("</script>") == 3
    assert (
        "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    )


def test_the_lines_of_python_that_the_page_shows_can_be_imported():
    found = re.findall(r"from (branchgrpo[\w.]*) import (\w+)", explorer_part("view.js"))
    assert len(found) == 3
    for module, name in found:
        assert hasattr(importlib.import_module(module), name)
