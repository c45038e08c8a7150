"""The GPU bench runs at a small size on any machine: every part writes its lines, and none of them is an error."""

import json
from pathlib import Path

import gpu_bench
import nbformat
import pytest

ROOT = Path(__file__).parents[1]

TABLES = {
    "smoke": {"machine", "runs", "mismatch", "compiled"},
    "train": {"machine", "floors", "FLUX.1-dev", "SD3.5-M"},
    "variants": {"machine", "attention", "casts", "decode", "tf32", "checkpoint", "compiled", "mismatch"},
}
NEEDS_A_GPU = {"_native_cudnn"}


def page(folder, output) -> dict:
    "Execute the page's cells in this process; return the record that they write."
    names = {}
    for cell in nbformat.read(ROOT / "reproduce/gpu.ipynb", 4).cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
        if "parameters" in cell.metadata.get("tags", []):
            names |= {"folder": str(folder), "output": str(output)}
    return json.loads((output / "gpu.json").read_text(encoding="utf-8"))


def test_the_page_says_that_nothing_was_measured(tmp_path, capsys):
    record = page(tmp_path / "none", tmp_path)
    assert "Nothing was measured on a GPU" in capsys.readouterr().out
    assert record["rows"] == []
    assert all(verdict.startswith("cannot be judged") for verdict in record["verdict"].values())


@pytest.mark.slow
@pytest.mark.parametrize("part", TABLES)
def test_a_part_at_a_small_size(part, tmp_path, capsys):
    path = tmp_path / "gpu" / f"{part}.json"
    gpu_bench.main([part, "--tiny", "--json", str(path)])
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {line["table"] for line in record["lines"]} == TABLES[part]
    errors = [line for line in record["lines"] if "error" in line and line["name"] not in NEEDS_A_GPU]
    assert not errors
    assert record["device"] and record["packages"]["torch"]
    capsys.readouterr()
    shown = page(path.parent, tmp_path)
    printed = capsys.readouterr().out
    assert f"{part}: {record['device']}" in printed and "small sizes, not the real ones" in printed
    assert all(f"\n{table}\n" in printed for table in TABLES[part])
    assert [row["recipe"] for row in shown["rows"]] == (["branchgrpo"] if part == "train" else [])


def test_what_fails_becomes_a_line(tmp_path):
    lines = gpu_bench.Lines("smoke", True, 100, str(tmp_path / "lines.json"))
    lines.attempt("runs", "broken", lambda: 1 / 0)
    lines.attempt("runs", "too late", lambda: 1, needed=1000)
    errors = [line["error"] for line in json.loads((tmp_path / "lines.json").read_text())["lines"]]
    assert errors[0].startswith("ZeroDivisionError")
    assert errors[1].startswith("TimeoutError: left out")
