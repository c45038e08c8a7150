"""The GPU bench runs at a small size on any machine: every part writes its lines, and none of them is an error."""

import json

import gpu_bench
import pytest

TABLES = {
    "smoke": {"machine", "runs", "mismatch", "compiled"},
    "train": {"machine", "floors", "FLUX.1-dev", "SD3.5-M"},
    "variants": {"machine", "attention", "casts", "decode", "tf32", "checkpoint", "compiled", "mismatch"},
}
NEEDS_A_GPU = {"_native_cudnn"}


@pytest.mark.parametrize("part", TABLES)
def test_a_part_at_a_small_size(part, tmp_path):
    path = tmp_path / "gpu" / f"{part}.json"
    gpu_bench.main([part, "--tiny", "--json", str(path)])
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {line["table"] for line in record["lines"]} == TABLES[part]
    errors = [line for line in record["lines"] if "error" in line and line["name"] not in NEEDS_A_GPU]
    assert not errors
    assert record["device"] and record["packages"]["torch"]


def test_what_fails_becomes_a_line(tmp_path):
    lines = gpu_bench.Lines("smoke", True, 100, str(tmp_path / "lines.json"))
    lines.attempt("runs", "broken", lambda: 1 / 0)
    lines.attempt("runs", "too late", lambda: 1, needed=1000)
    errors = [line["error"] for line in json.loads((tmp_path / "lines.json").read_text())["lines"]]
    assert errors[0].startswith("ZeroDivisionError")
    assert errors[1].startswith("TimeoutError: left out")
