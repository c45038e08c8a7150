"""What the README, the page for GPU nodes and the scale `paper` train fits on their GPUs, by the
doctor's count."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
from slow import often
from test_gpu_nodes import SETTINGS, TEXT, file_name
from test_prose import FOUND, OURS, given_by

from branchgrpo import cli
from branchgrpo.backbones.memory import QUANTISED
from branchgrpo.machine.advice import advice, memory_verdict
from branchgrpo.machine.doctor import Report, cost_lines
from branchgrpo.machine.estimate import estimate
from branchgrpo.machine.gpus import GPU_GB, SLOWER
from branchgrpo.machine.peak import fits, memory_parts, peak_gb
from branchgrpo.reproduction.budget import budget, cost_of
from branchgrpo.reproduction.pages import jobs, planned_runs
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.resolve import resolve
from branchgrpo.yaml_files import parse_table

ROOT = Path(__file__).parents[1]


def trained_by_readme() -> list[TrainConfig]:
    "Return the config of every `train` in the README."
    lines = [
        line
        for line, command in OURS.items()
        if FOUND[command] == "README.md" and line.startswith("train ")
    ]
    given = [given_by(line) for line in lines]
    fields = TrainConfig.__dataclass_fields__
    return [
        TrainConfig.from_dict({name: table[name] for name in table if name in fields})
        for table in given
    ]


def test_every_training_of_the_readme_fits():
    found = trained_by_readme()
    assert found, "the README trains"
    for config in found:
        assert memory_verdict(resolve(config), 1).startswith("fits: yes"), memory_verdict(
            resolve(config), 1
        )


def large() -> tuple[TrainConfig, int]:
    """Return the config and the number of GPUs of the training of FLUX on one node, of the page for
    GPU nodes."""
    line = r"^accelerate launch .*--num_processes (\d+) .*--config examples/flux_lora.yaml$"
    gpus = re.search(line, TEXT, re.MULTILINE)[1]
    return TrainConfig.from_yaml(ROOT / "examples/flux_lora.yaml"), int(gpus)


@pytest.mark.parametrize("path", SETTINGS, ids=file_name)
def test_a_file_of_examples_fits_on_the_gpu_that_it_names(path):
    # a card has GiB
    gb = float(re.search(r"(\d+) GB", path.read_text(encoding="utf-8"))[1]) * 1.0737
    assert fits(peak_gb(resolve(TrainConfig.from_yaml(path)), 1), gb)


def pages() -> list[str]:
    table = parse_table((ROOT / "reproduce/scales.yaml").read_text(encoding="utf-8"))
    return [name for name, scales in table.items() if "paper" in scales]


@pytest.mark.parametrize("name", often(pages(), ("branchgrpo/table1", "pro_grpo/table1_fig5")))
def test_every_run_of_the_paper_scale_fits_on_its_gpus(name):
    job = jobs([name], "paper", ROOT / "reproduce")[0]
    for config, _ in planned_runs(job):
        gpus, s = job.runner["gpus"], resolve(config)
        assert s.prompts_per_iteration % gpus == 0, (
            f"{s.recipe}: {s.prompts_per_iteration} prompts on {gpus} GPUs"
        )
        cost = estimate(s, gpus)
        assert fits(cost.peak_gb), memory_verdict(s, gpus)
        assert cost.hours > 0


PRINTED = {
    "dancegrpo": "DanceGRPO (tf=1.0)",
    "branchgrpo": "BranchGRPO",
    "branchgrpo-mix": "BranchGRPO-Mix",
}


def test_the_dry_run_of_table_1_tells_disk_time_limit_and_verdicts():
    job = jobs(["branchgrpo/table1"], "paper", ROOT / "reproduce")[0]
    lines = budget([job], hours=24)
    assert lines[0].endswith("8 runs, one seed: no verdict; two: --set 'seeds=[42,43]'")
    (disk,) = [line for line in lines if line.startswith("disk")]
    assert disk.startswith("disk: 3.6 TB at the end, 5.1 TB while"), disk
    (limit,) = [line for line in lines if line.startswith("time limit")]
    assert "7 of 8 runs" in limit and "24 hours" in limit
    at = lines.index(limit)
    assert re.search(r"dancegrpo-FLUX\S+ +56 to 64 hours, queued again 2 times", lines[at + 1])
    assert not any("branchgrpo-mix" in line for line in lines[at:])
    assert not any("reach it" in line for line in budget([job], hours=100))
    two = budget(
        jobs(["branchgrpo/table1"], "paper", ROOT / "reproduce", given={"seeds": [42, 43]})
    )
    assert two[0].endswith("16 runs") and any(line.startswith("disk: 7.2 TB") for line in two)


def test_published_runs_take_twice_the_hours():
    with open(ROOT / "reproduce/published/branchgrpo.csv", encoding="utf-8") as file:
        rows = [
            row
            for row in csv.reader(file)
            if row[0] == "Table 1" and row[2] == "Iteration Time (s)"
        ]
    seconds = {row[1]: float(row[3]) for row in rows}
    job = jobs(["branchgrpo/table1"], "paper", ROOT / "reproduce")[0]
    found = {
        config.recipe: cost_of(config, 16).hours * 3600 / config.iterations
        for config, _ in planned_runs(job)
    }
    for recipe, label in PRINTED.items():
        assert SLOWER[0] <= seconds[label] / found[recipe] <= SLOWER[1], recipe


@pytest.mark.parametrize(
    ("changes", "gpus", "cures"),
    [
        ({"lora_rank": 0, "base_dtype": "float32", "learning_rate": None}, 8, {"sharding"}),
        (
            {"lora_rank": 0, "base_dtype": "float32", "learning_rate": None},
            1,
            {"lora_rank", "base_dtype"},
        ),
        ({"gradient_checkpointing": False}, 8, {"gradient_checkpointing"}),
        ({"decode_batch": 64}, 8, {"decode_batch"}),
        ({"max_batch": None, "decode_batch": None}, 8, {"max_batch"}),
    ],
    ids=["all weights", "all weights, one GPU", "no checkpointing", "64 images", "no max_batch"],
)
def test_what_does_not_fit_is_told_with_a_cure(changes, gpus, cures):
    config, _ = large()
    s = resolve(replace(config, **changes))
    found = advice(s, gpus)
    assert found is not None and cures <= found.keys()
    text = memory_verdict(s, gpus)
    assert text.startswith("fits: NO") and all(
        f"--{name.replace('_', '-')}" in text for name in cures
    )
    assert fits(peak_gb(replace(s, **found), gpus))


def test_the_parts_add_up():
    """Weights, gradients and AdamW of an adapter are counted once each; the report shows them, and
    the sum."""
    config, gpus = large()
    s = resolve(config)
    parts = {part.name: part.gb for part in memory_parts(s, gpus)}
    assert parts["denoiser"] == pytest.approx(2 * 11.9014, rel=1e-3)
    wide = {part.name: part.gb for part in memory_parts(replace(s, vae_dtype="float32"), gpus)}
    assert (wide["denoiser"], wide["VAE"]) == (parts["denoiser"], 2 * parts["VAE"])
    assert (
        parts["adapter"]
        == parts["gradients"]
        == parts["averaged weights"]
        == parts["optimiser"] / 2
    )
    lines = cost_lines(Report(s, gpus))
    assert any(line.startswith("sum") for line in lines)
    assert any(line.startswith("fits: yes") for line in lines)
    assert (
        max(
            float(value)
            for value in next(line for line in lines if line.startswith("sum")).split()[1:]
        )
        < GPU_GB
    )


ADAPTED = {"lora_rank": 4, "mixed_precision": "bf16", "base_dtype": "int8"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_rank": 0}, "base_dtype: 'int8' needs an adapter"),
        ({"mixed_precision": "no"}, "mixed_precision: 'no' is not bf16, in which a base in int8"),
        ({"sharding": "full"}, "sharding: 'full' cannot split a base in int8"),
        ({"base_dtype": "int4"}, "base_dtype: 'int4' is not one of float32, bfloat16, int8, nf4"),
    ],
)
def test_a_base_in_fewer_bits_is_refused_where_it_cannot_be(changes, said):
    with pytest.raises(ValueError, match=said):
        resolve(TrainConfig(**ADAPTED | changes))


def test_a_base_in_fewer_bits_needs_its_package_and_writes_nothing(tmp_path, monkeypatch, capfd):
    "One line with the package to install; where it is installed, the run goes on as any other."
    monkeypatch.setitem(QUANTISED, "int8", ("a_package_of_nobody", 1.0))
    words = "train --base-dtype int8 --lora-rank 4 --mixed-precision bf16 --iterations 1"
    assert cli.main([*words.split(), "--output", str(tmp_path / "run")]) == 2
    assert (
        "base_dtype: 'int8' needs a_package_of_nobody; pip install a_package"
        in capfd.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_a_base_in_fewer_bits_takes_less_memory():
    "By the count: two bytes of a weight become one, or a half and its share of a scale."
    given = {"backbone": "black-forest-labs/FLUX.1-dev", "reward": "hps-v2.1"}
    run = resolve(TrainConfig(**ADAPTED | given))
    gb = {
        base: {part.name: part.gb for part in memory_parts(replace(run, base_dtype=base))}
        for base in ("bfloat16", "int8", "nf4")
    }
    denoiser = {base: parts.pop("denoiser") for base, parts in gb.items()}
    assert denoiser["int8"] == denoiser["bfloat16"] / 2
    assert denoiser["nf4"] == pytest.approx(denoiser["bfloat16"] * 0.5625 / 2)
    assert gb["int8"] == gb["nf4"] == gb["bfloat16"], "nothing else changes"
