"""The steps that wait for a GPU run at a small size, go on where they were cut off, and have models
and settings of the right shapes at the published size."""

import json
import re
from dataclasses import replace
from pathlib import Path

import gpu_steps
import pytest
from test_bench import page

from branchgrpo.machine.measured import WAITING
from branchgrpo.planning import plan_of
from branchgrpo.training.resolve import resolve

ROOT = Path(__file__).parents[1]
SPEED = {arm.name: arm for arm in gpu_steps.SPEED}
TABLE_1 = {arm.name: arm for arm in gpu_steps.STEPS["table1"].arms}
ONE_OF_EACH = (
    TABLE_1["branchgrpo"],
    TABLE_1["branchgrpo-mix"],
    SPEED["heads"],
    SPEED["what depends on the step alone"],
)


def lines_in(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["lines"]


def test_each_job_at_a_small_size_goes_on_where_it_was_cut_off(tmp_path, monkeypatch, capsys):
    "A call without time measures nothing; the next one measures the rest; the page draws it."
    step = gpu_steps.Step(ONE_OF_EACH)
    monkeypatch.setattr(gpu_steps, "STEPS", {"table1": step})
    words = ["table1", "--tiny", "--output", str(tmp_path), "--known", str(tmp_path)]
    monkeypatch.setattr(gpu_steps, "STEPS", {"table1": replace(step, arms=ONE_OF_EACH[:1])})
    assert gpu_steps.main(words)
    (path,) = tmp_path.glob("table1-*.json")
    first = lines_in(path)
    monkeypatch.setattr(gpu_steps, "STEPS", {"table1": step})
    assert gpu_steps.main(words)
    lines = lines_in(path)
    assert lines[: len(first)] == first, "what was measured stays"
    arms = [line for line in lines if line["table"] == "step table1"]
    assert [line["name"] for line in arms] == [arm.name for arm in ONE_OF_EACH]
    assert not [line for line in arms if "error" in line]
    assert all(line["rollout_mismatch"] == 0 for line in arms if "rollout_mismatch" in line)
    tree, mix = arms[:2]
    assert tree["made"] == tree["batches"] == 2 and len(tree["update_batches"]) == 1
    assert tree["calls"] == mix["calls"] and tree["rolled_by"] == "branchgrpo"
    assert gpu_steps.main(words) and lines_in(path) == lines, "all is done"

    record = json.loads(path.read_text(encoding="utf-8"))
    record |= {"tiny": False, "device": "NVIDIA H200", "lines": [*lines[:2], *arms[:2]]}
    (tmp_path / "real").mkdir()
    (tmp_path / "real/table1-h200.json").write_text(json.dumps(record), encoding="utf-8")
    capsys.readouterr()
    shown = page(tmp_path / "real", tmp_path)
    said = capsys.readouterr().out
    assert [row["recipe"] for row in shown["rows"]] == ["branchgrpo", "branchgrpo-mix"]
    assert "table1: not measured" not in said and "growth: not measured yet" in said
    assert (tmp_path / "gpu.png").is_file() and shown["units"][0]["images/GPU/s"] > 0


def test_every_arm_has_settings_that_are_allowed_at_a_small_size():
    for step in gpu_steps.STEPS.values():
        for arm in step.arms:
            changes = arm.changes(True) | {"base_dtype": "bfloat16", "lora_rank": 4}
            changes |= {"gradient_checkpointing": True}
            resolve(gpu_steps.config_of(prompts="digit-pairs", mixed_precision="bf16", **changes))


def test_a_step_without_time_begins_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_steps, "expected", lambda arm: SimpleExpected(50.0))
    monkeypatch.setattr(gpu_steps, "roofs", lambda record: None)
    record = gpu_steps.Record("sd35", False, 10, tmp_path, tmp_path)
    assert not gpu_steps.run("sd35", record)
    assert "give the same command again" in capsys.readouterr().out and not record.lines


class SimpleExpected:
    def __init__(self, seconds: float):
        self.seconds = seconds


def test_the_part_of_an_update_is_a_fair_one():
    "Every second micro-batch of the published tree: half of them, of all steps, none twice."
    arm = replace(TABLE_1["branchgrpo"], tiny=gpu_steps.FEW)
    bench = gpu_steps.Bench(gpu_steps.Record("table1", True, 60, Path("none"), Path("none")))
    trainer = bench.trainer(arm)
    x = trainer.collect(0)
    trainer.credit(x)
    parts = [gpu_steps.thinned(trainer, x, 2, turn) for turn in range(2)]
    assert sum(made for _, made, _ in parts) == parts[0][2] and parts[0][2] > 5
    for depth, whole in enumerate(x.edge_mask):
        both = parts[0][0].edge_mask[depth].int() + parts[1][0].edge_mask[depth].int()
        assert (both == whole.int()).all(), "each edge is in one part"


def test_the_published_size_has_the_right_shapes():
    "FLUX.1-dev without values: a batch of Table 1 forward and backward, and the calls it has."
    arm = TABLE_1["branchgrpo"]
    assert gpu_steps.try_on_meta(arm) == (4, 45 * 45, 64)
    s = resolve(gpu_steps.settings_of(arm, "black-forest-labs/FLUX.1-dev"))
    assert plan_of(s, 0).denoiser_calls == 203 and s.max_batch == 4 and s.lora_rank == 32


@pytest.mark.slow
def test_the_whole_plan_in_its_published_sizes(capsys):
    gpu_steps.main(["all", "--dry-run"])
    said = capsys.readouterr().out
    for name, step in gpu_steps.STEPS.items():
        minutes = int(re.search(rf"^{name}: .* about (\d+) minutes$", said, re.M)[1])
        assert abs(minutes - WAITING[name].minutes) <= 2, name
        assert all(arm.name in said for arm in step.arms if arm.job != "heads")


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITING)
def test_a_whole_step_at_a_small_size(name, tmp_path):
    gpu_steps.main([name, "--tiny", "--output", str(tmp_path), "--seconds", "3000"])
    (path,) = tmp_path.glob("*.json")
    errors = {line["name"] for line in lines_in(path) if "error" in line}
    needs_more = {"int8", "nf4", "attention: cuDNN", "attention: FlashAttention 3"}
    needs_more |= {name for name in SPEED if "cuDNN" in name}
    assert errors <= needs_more


def test_the_page_of_nodes_lists_what_waits_in_order():
    cells = json.loads((ROOT / "nbs/gpu_nodes.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    places = [text.find(step.command(name)) for name, step in WAITING.items()]
    assert -1 not in places and places == sorted(places)
    assert list(gpu_steps.STEPS) == list(WAITING)
    for name, step in WAITING.items():
        assert re.search(rf"\| {step.minutes} \|.*`{re.escape(step.command(name))}`", text)
