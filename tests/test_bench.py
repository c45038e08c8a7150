"""`branchgrpo bench` keeps its time and says how much is left; the GPU bench writes its lines at a
small size."""

import json
import math
import time
from pathlib import Path
from unittest import mock

import gpu_bench
import IPython.display
import nbformat
import pytest
import torch

from branchgrpo import cli
from branchgrpo.machine.bench import Countdown, interleaved, seconds_of
from branchgrpo.settings import options

ROOT = Path(__file__).parents[1]

TABLES = {
    "smoke": {"machine", "runs", "mismatch", "compiled"},
    "first-half-hour": {"steps", "machine", "runs", "mismatch", "compiled", "commands", "guided"},
}
CPU = torch.device("cpu")


def test_time_that_others_take_does_not_count_on_a_cpu():
    "A job that waits, as on a busy machine, costs no processor seconds."
    assert seconds_of(lambda: time.sleep(0.2), CPU) < 0.1
    assert seconds_of(lambda: sum(i * i for i in range(300_000)), CPU) > 0.002


def test_jobs_take_turns_until_the_time_of_their_table_is_up():
    """Another round begins only if there is time for one like the last; each job is measured at
    least once."""
    order, watch = [], Countdown(0.6 / 60, tables=2)
    jobs = {name: lambda name=name: order.append(name) or time.sleep(0.02) for name in "ab"}
    watch.begin("the first of two tables")
    began = time.monotonic()
    interleaved(jobs, math.inf, CPU, watch=watch)
    assert time.monotonic() - began < 0.45, "half of the time"
    assert 6 <= len(order) < 18 and "".join(order) == "ab" * (len(order) // 2)
    assert watch.measured == f"processor seconds, medians of {len(order) // 2 - 1}"
    watch.begin("the second")
    jobs["slow"] = lambda: time.sleep(0.6)
    took = interleaved(jobs, math.inf, CPU, watch=watch)
    assert took.keys() == jobs.keys()
    assert watch.measured == "processor seconds, medians of 1", (
        "the round that should warm up is what counts"
    )


def test_bench_keeps_to_minutes_and_says_what_is_left(tmp_path, capfd):
    (tmp_path / "small.yaml").write_text("steps: 4\nsplits: [0, 2]\n")
    words = (
        f"bench --minutes 0.05 --settings {tmp_path}/small.yaml --recipes dancegrpo branchgrpo"
        " --factors 2 3"
    )
    assert cli.main([*words.split(), "--output", str(tmp_path / "bench.json")]) == 0
    said = capfd.readouterr()
    assert said.err.startswith("0:03 left, branchgrpo, its floors") and "\r" not in said.err, (
        "lines, since nobody looks at a bar here"
    )
    record = json.loads((tmp_path / "bench.json").read_text())
    clock = "seconds of a synchronised clock" if torch.cuda.is_available() else "processor seconds"
    assert len(record["tables"]) == 3 and all(clock in title for title in record["tables"])
    assert all(title in said.out for title in record["tables"])


def test_a_policy_of_your_own_is_measured(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from branchgrpo import GaussianFlow\n\n\ndef make():\n    return GaussianFlow(shape=(3, 8,"
        " 8))\n"
    )
    (tmp_path / "small.yaml").write_text("steps: 4\nsplits: [0, 2]\n")
    words = (
        f"bench --backbone {tmp_path}/mine.py:make --minutes 0.01 --settings {tmp_path}/small.yaml"
    )
    assert cli.main([*words.split(), "--recipes", "dancegrpo", "branchgrpo", "--factors", "2"]) == 0
    assert f"{tmp_path}/mine.py:make, 1 prompt," in capsys.readouterr().out


def test_bench_takes_four_minutes_by_default():
    from branchgrpo.commands import BenchOptions

    assert options(BenchOptions, {}).minutes == 4


def page(folder, output) -> dict:
    """Execute the page's cells in this process, with tables as text; return the record that they
    write."""
    names = {}
    with mock.patch.object(IPython.display, "display", lambda shown: print(shown.data)):
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
    assert not [line for line in record["lines"] if "error" in line]
    assert record["device"] and record["packages"]["torch"]
    failed = [name for name, step in record.get("steps", {}).items() if not step["holds"]]
    assert not failed
    capsys.readouterr()
    shown = page(path.parent, tmp_path)
    printed = capsys.readouterr().out
    assert f"{part}: {record['device']}" in printed and "small sizes, not the real ones" in printed
    assert all(f"**{table}**" in printed for table in TABLES[part])
    assert shown["rows"] == [], "seconds are measured by steps"


def test_what_fails_becomes_a_line(tmp_path):
    lines = gpu_bench.Lines("smoke", True, 100, str(tmp_path / "lines.json"))
    lines.attempt("runs", "broken", lambda: 1 / 0)
    lines.attempt("runs", "too late", lambda: 1, needed=1000)
    errors = [line["error"] for line in json.loads((tmp_path / "lines.json").read_text())["lines"]]
    assert errors[0].startswith("ZeroDivisionError")
    assert errors[1].startswith("TimeoutError: left out")


def test_the_first_half_hour_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """A step that hangs is ended, one that fails has advice, and one without time left is made by
    the next call."""
    made, path = [], tmp_path / "first.json"
    steps = {
        "start": (5, lambda lines: made.append("start")),
        "hangs": (1, lambda lines: time.sleep(30)),
        "fails": (5, lambda lines: 1 / 0),
        "long": (500, lambda lines: made.append("long")),
    }
    monkeypatch.setattr(gpu_bench, "STEPS", steps)
    words = ["first-half-hour", "--tiny", "--json", str(path), "--seconds"]
    gpu_bench.main([*words, "60"])
    found = json.loads(path.read_text())
    assert made == ["start"] and {name: step["holds"] for name, step in found["steps"].items()} == {
        "start": True,
        "hangs": False,
        "fails": False,
    }
    assert any("time is over" in line.get("error", "") for line in found["lines"])
    assert any("500 s needed" in line.get("next_call", "") for line in found["lines"])
    gpu_bench.main([*words, "540"])
    assert made == ["start", "long"] and set(json.loads(path.read_text())["steps"]) == set(steps)


def test_chosen_steps_of_the_first_half_hour_at_a_small_size(tmp_path):
    """A step that was made is not made again, and a start that failed is. SD-1.5 and Wan tell their
    mismatch by step, with the same batches and with others."""
    words = [
        "first-half-hour",
        "--tiny",
        "--json",
        str(tmp_path / "first.json"),
        "--steps",
        "start",
        "guided",
    ]
    (tmp_path / "first.json").write_text(
        json.dumps(gpu_bench.Lines("", True, 1, None).record | {"steps": FAILED})
    )
    record = gpu_bench.main([*words, "--seconds", "900"])
    assert {name: step["holds"] for name, step in record["steps"].items()} == {
        "start": True,
        "guided": True,
    }
    assert gpu_bench.main(words)["lines"][:-1] == record["lines"]
    lines = [line for line in record["lines"] if line["table"] == "guided"]
    assert len(lines) == 4 and not [line for line in lines if "error" in line], lines
    assert all(line["by_step"] and isinstance(line["remedy"], list) for line in lines)
    assert sum(line["worst"] == 0 for line in lines) >= 2, "the same batches, the same kernels"


FAILED = {"start": {"seconds": 1, "holds": False}}


def test_nothing_follows_a_start_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu_bench, "STEPS", {"start": (5, lambda lines: 1 / 0), "next": (5, lambda lines: 1 / 0)}
    )
    record = gpu_bench.main(["first-half-hour", "--tiny", "--json", str(tmp_path / "first.json")])
    assert list(record["steps"]) == ["start"] and "repair this first" in str(record["lines"])
