"""The notebooks of reproduce/ execute at smoke scale, and a second call finds them done."""
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from branchgrpo.reproduce import jobs, published, templates

ROOT = Path(__file__).parents[1]
CALL = [sys.executable, "-m", "branchgrpo.cli", "reproduce", "--scale", "smoke", "--folder", str(ROOT / "reproduce")]


def test_every_notebook_has_its_scales_and_every_parameter_is_known():
    table, found = yaml.safe_load((ROOT / "reproduce/scales.yaml").read_text()), templates(ROOT / "reproduce")
    assert table.keys() == found.keys() and all({"smoke", "testbed"} <= scales.keys() for scales in table.values())
    for scale in ("smoke", "testbed", "paper"): jobs([], scale, ROOT / "reproduce")


def test_notebooks_execute_and_are_found_again(tmp_path):
    names = ["audit", "branchgrpo/table2", "pro_grpo/tables4_10_11", "pro_grpo/tables7_8", "pro_grpo/table9_fig7"]
    given = ["--set", f"output={json.dumps(str(tmp_path / 'figures'))}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    for expected in ("done", "found"):
        out = subprocess.run([*CALL, *names, "--output", str(tmp_path / "executed"), *given], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
        assert out.returncode == 0, out.stdout + out.stderr[-2000:]
        assert out.stdout.count(f" {expected} ") == len(names), out.stdout
    assert (tmp_path / "figures/pro_grpo_table9_fig7.png").is_file()


def test_the_printed_numbers_are_there():
    folder = ROOT / "reproduce/published"
    for paper, tables in (("branchgrpo", (1, 2, 3, 4)), ("pro_grpo", range(1, 15))):
        for n in tables: assert published(paper, f"Table {n}", folder)
