"""Every notebook of reproduce/ executes at smoke scale; a second call finds them done; a killed one ends with the same numbers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from branchgrpo.recipes import get
from branchgrpo.reproduction.reproduce import cache_key, jobs as all_jobs, published, templates

ROOT = Path(__file__).parents[1]


def test_every_notebook_has_its_scales_and_every_parameter_is_known():
    table, found = yaml.safe_load((ROOT / "reproduce/scales.yaml").read_text()), templates(ROOT / "reproduce")
    assert table.keys() == found.keys() and all({"smoke", "testbed"} <= scales.keys() for scales in table.values())
    for scale in ("smoke", "testbed", "paper"):
        all_jobs([], scale, ROOT / "reproduce")


def reproduce(cwd, *words, **more):
    """`branchgrpo reproduce` in a folder of its own, so that no earlier run is found."""
    if not (cwd / "reproduce").exists():
        (cwd / "reproduce").symlink_to(ROOT / "reproduce")
    return subprocess.Popen(
        [sys.executable, "-m", "branchgrpo.cli", "reproduce", *words, "--scale", "smoke"],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


@pytest.mark.parametrize("part", range(4))
def test_every_notebook_executes_and_a_second_call_runs_nothing(tmp_path, part):
    """The whole smoke scale, in parts that the suite's processes share."""
    names = sorted(templates(ROOT / "reproduce"))[part::4]
    for expected in ("done", "found"):
        call = reproduce(tmp_path, *names)
        said = call.communicate(timeout=1200)[0]
        assert call.returncode == 0, said
        assert len([line for line in said.splitlines() if f"  {expected} " in line]) == len(names), said
    assert "run   1/" not in said


def evaluations(path) -> dict:
    """Every evaluation in a record, without its times."""
    runs = json.loads(path.read_text())["runs"]
    return {
        (label, seed): [{k: v for k, v in e.items() if k != "seconds"} for e in run["evaluations"]]
        for label, found in runs.items()
        for seed, run in found.items()
    }


def test_killed_in_the_middle_it_ends_with_the_same_numbers(tmp_path):
    words = ("beyond/transitions", "--set", "iterations=2", "evaluation_prompts=8", "held_out=")
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    call = reproduce(tmp_path / "killed", *words, start_new_session=True)
    finished = lambda: [
        p
        for p in (tmp_path / "killed/runs/smoke/runs").glob("*/run.json")
        if json.loads(p.read_text())["state"] == "finished"
    ]
    until = time.time() + 300
    while not finished() and time.time() < until:
        time.sleep(0.2)
    os.killpg(call.pid, signal.SIGKILL)
    call.wait()
    before = {p.parent.name: (p.parent / "metrics.jsonl").read_bytes() for p in finished()}
    assert 1 <= len(before) < 3 and not (tmp_path / "killed/runs/smoke/figures/beyond_transitions.json").exists()
    for folder in ("killed", "whole"):
        call = reproduce(tmp_path / folder, *words)
        said = call.communicate(timeout=600)[0]
        assert call.returncode == 0, said
    assert evaluations(tmp_path / "killed/runs/smoke/figures/beyond_transitions.json") == evaluations(
        tmp_path / "whole/runs/smoke/figures/beyond_transitions.json"
    )
    for name, content in before.items():
        assert (tmp_path / "killed/runs/smoke/runs" / name / "metrics.jsonl").read_bytes() == content


def test_two_notebooks_at_once_make_a_shared_run_once(tmp_path):
    words = ("branchgrpo/fig1", "branchgrpo/fig4", "--jobs", "2", "--set", "held_out=")
    call = reproduce(tmp_path, *words)
    said = call.communicate(timeout=600)[0]
    assert call.returncode == 0, said
    one, two = (
        json.loads((tmp_path / f"runs/smoke/figures/branchgrpo_{name}.json").read_text())["runs"]["BranchGRPO"]["0"][
            "run"
        ]
        for name in ("fig1", "fig4")
    )
    assert (
        one == two
        and len(list((tmp_path / "runs/smoke/runs").glob("branchgrpo-tiny-flux-0-*"))) == 1
        and not list((tmp_path / "runs/smoke/runs").glob("*damaged*"))
    )


def test_every_committed_number_can_be_followed_to_its_run():
    """Rows are the means of the recorded evaluations, and each run's folder is the address of its recorded settings."""
    for path in sorted((ROOT / "figures/testbed").glob("*.json")):
        record = json.loads(path.read_text())
        if not isinstance(record.get("rows"), list) or not isinstance(record.get("runs"), dict):
            continue
        for label, found in record["runs"].items():
            for seed, run in found.items():
                assert Path(run["run"]).name == cache_key(run["settings"]), (path.name, label, seed)
                assert run["settings"]["seed"] == int(seed) and get(run["settings"]["recipe"])
        for row in record["rows"]:
            last = [run["evaluations"][-1] for run in record["runs"][row["label"]].values()]
            for title, value in row.items():
                key = (
                    title
                    if title in last[0]
                    else f"eval_{title}"
                    if f"eval_{title}" in last[0]
                    else {"reward": "eval_reward", "all right": "eval_check_all"}.get(title, f"eval_reward/{title}")
                )
                if isinstance(value, list) and key in last[0]:
                    assert abs(value[0] - sum(e[key] for e in last) / len(last)) < 1e-9, (
                        path.name,
                        row["label"],
                        title,
                    )


def test_the_printed_numbers_are_there():
    folder = ROOT / "reproduce/published"
    for paper, tables in (("branchgrpo", (1, 2, 3, 4)), ("pro_grpo", range(1, 15))):
        for n in tables:
            assert published(paper, f"Table {n}", folder)
