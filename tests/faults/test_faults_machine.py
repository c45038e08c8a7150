"""What a machine does to a run: disks, file handles, files that go, clocks.

Real disks, limits and processes.
"""

import json

import pytest
from disk import scene

LINE = "branchgrpo: output: no space left on the disk of "
FULL = {
    "metrics row": ("branchgrpo.training.runs:append_jsonl", 2, 0),
    "checkpoint": ("branchgrpo.training.checkpoints:write_checkpoint", 2, 0),
    "checkpoint's manifest": ("branchgrpo.training.checkpoints:put_in_place", 2, 0),
    "adapter at the end": ("branchgrpo.training.export:write_result", 1, 0),
    "run.json at the end": ("branchgrpo.training.runs:Run.set_state", 1, 0),
    "run.json at the start": ("branchgrpo.training.trainer:open_run", 1, 0),
    "evaluation's images": ("branchgrpo.training.trainer:record_evaluation", 2, 1),
    "evaluation's row": ("branchgrpo.training.trainer:Run.write_rows", 3, 1),
}
FILLED = """
disk = Disk()
for name, (place, call, every) in json.loads(sys.argv[1] and TABLE).items():
    run = disk.path / name.replace(" ", "-")
    before(place, disk.fill, call)
    words = ("--evaluate-every", every)
    refused = train(run, *words)
    left = leftovers(run)
    still = train(run, *words)
    disk.free()
    again, whole = train(run, *words), ROOT / f"whole{every}"
    if not whole.exists():
        train(whole, *words)
    found[name] = {"refused": refused, "left": left, "still": still, "again": again,
                   "same": same(run, whole), "tidy": leftovers(run),
                   "lock": (run / ".lock").exists(), "kind": disk.kind}
"""


def refused(said, words=LINE):
    "Check that a command ended with code 74 and one line; return the line."
    code, lines = said
    assert code == 74, said
    assert len(lines) == 1, said
    assert lines[0].startswith(words), said
    return lines[0]


def is_disk_full(found):
    "The words of a full disk, or of the limit that stands for it."
    return LINE if found["kind"] == "tmpfs" else "branchgrpo: output: "


def filled(tmp_path, noted, names):
    table = json.dumps({name: FULL[name] for name in names})
    for name, at in scene(f"TABLE = {table!r}" + FILLED, tmp_path).items():
        refused(at["refused"], is_disk_full(at))
        refused(at["still"], is_disk_full(at))
        assert at["again"] == [0, []], at
        assert at["same"] and at["tidy"] == [] and not at["lock"], at
        noted(
            f"disk full at the {name}",
            "code 74, one line; the same line as long as the disk is full",
            "the last checkpoint; with space again the same command ends bit-equal",
            disk=at["kind"],
        )


@pytest.mark.fast
def test_a_full_disk_at_a_checkpoint(tmp_path, noted):
    filled(tmp_path, noted, ["checkpoint"])


def test_a_full_disk_at_rows_and_results(tmp_path, noted):
    filled(
        tmp_path,
        noted,
        [name for name in FULL if name != "checkpoint" and "evaluation" not in name],
    )


def test_a_full_disk_at_an_evaluation(tmp_path, noted):
    filled(tmp_path, noted, [name for name in FULL if "evaluation" in name])


TWO = """
disk = Disk()
run = disk.path / "run"
words = ("--iterations", 3, "--evaluate-every", 0, "--output")
before(PLACE, lambda: (ROOT / "freed").exists() or disk.fill(), 2)
found["codes"], found["said"] = ranks(2, *words, run)
found["again"] = ranks(2, *words, run)
(ROOT / "freed").touch()
disk.free()
found["freed"] = ranks(2, *words, run)
ranks(2, *words, ROOT / "whole")
found |= {"same": same(run, ROOT / "whole"), "tidy": leftovers(run), "kind": disk.kind}
"""


@pytest.mark.parametrize(
    ("what", "place"),
    {
        "checkpoint": "branchgrpo.training.checkpoints:write_checkpoint",
        "metrics row": "branchgrpo.training.runs:append_jsonl",
    }.items(),
)
def test_a_full_disk_ends_both_processes(tmp_path, noted, what, place):
    "Kept: iteration 1; with space again both go on, bit-equal."
    found = scene(f"PLACE = {place!r}" + TWO, tmp_path)
    assert found["codes"] == [74, 74], found
    for said in found["said"]:
        refused([74, said], is_disk_full(found))
    assert found["freed"] == [[0, 0], [[], []]], found
    assert found["same"] and found["tidy"] == [], found
    noted(
        f"disk full at the {what}, 2 processes",
        "both end with code 74 and the same line; none waits for the other",
        disk=found["kind"],
    )


EMBEDDINGS = """
disk = Disk()
words = ("--embeddings", disk.path / "text")
before("branchgrpo.training.conditioning:write_entry", disk.fill, 3)
found["refused"] = train(ROOT / "run", *words)
disk.free()
found["again"] = train(ROOT / "run", *words)
train(ROOT / "whole")
found |= {"same": same(ROOT / "run", ROOT / "whole"), "tidy": leftovers(disk.path)}
found["kind"] = disk.kind
"""


def test_a_full_disk_at_an_embedding(tmp_path, noted):
    "Kept: the entries before it; with space again the same command ends bit-equal."
    found = scene(EMBEDDINGS, tmp_path)
    refused(
        found["refused"], "branchgrpo: embeddings: " if found["kind"] == "tmpfs" else "branchgrpo: "
    )
    assert found["again"] == [0, []] and found["same"] and found["tidy"] == [], found
    noted(
        "disk full at an entry of the embeddings' folder",
        "code 74, one line that names the setting `embeddings`",
        disk=found["kind"],
    )


TOOLS = """
disk = Disk()
evaluate = ["evaluate", "--limit", 6, "--block", 2, "--steps", 2, "--output"]
before("branchgrpo.evaluation.evaluate:write_jsonl", disk.fill, 2)
code, _, err = command(*evaluate, disk.path / "e")
found["evaluate"] = (code, lines(err))
disk.free()
found["again"] = command(*evaluate, disk.path / "e")[0]
command(*evaluate, ROOT / "e")
found["equal"] = (disk.path / "e/images.jsonl").read_text() == (ROOT / "e/images.jsonl").read_text()
disk.fill()
sample = ["sample", "--prompt", "a red 3", "--steps", 2, "--output", disk.path / "a.png"]
found["sample"] = [(code, lines(err)) for code, _, err in [command(*sample)]][0]
found["sampled"] = (disk.path / "a.png").exists()
disk.free()
found["sampled again"] = command(*sample)[0]
found |= {"kind": disk.kind, "tidy": leftovers(disk.path / "e")}
"""


def test_a_full_disk_at_evaluate_and_sample(tmp_path, noted):
    found = scene(TOOLS, tmp_path)
    refused(found["evaluate"], is_disk_full(found))
    assert found["again"] == 0 and found["equal"] and found["tidy"] == [], found
    refused(found["sample"], is_disk_full(found))
    assert not found["sampled"] and found["sampled again"] == 0, found
    happened = "code 74, one line"
    noted(
        "disk full at a block of `evaluate`",
        happened,
        "the blocks before it; with space again the same rows to the bit",
        disk=found["kind"],
    )
    noted("disk full at the image of `sample`", happened, "no half image", disk=found["kind"])


READ_ONLY = """
disk = Disk()
disk.read_only()
found["before"] = train(disk.path / "run")
disk.read_only(False)
found["left"] = os.listdir(disk.path)
before("branchgrpo.training.checkpoints:write_checkpoint", disk.read_only, 2)
found["during"] = train(disk.path / "run")
found["resumed"] = train(disk.path / "run")
disk.read_only(False)
found["again"] = train(disk.path / "run")
train(ROOT / "whole")
found |= {"same": same(disk.path / "run", ROOT / "whole"), "tidy": leftovers(disk.path)}
found["kind"] = disk.kind
disk.read_only()
found["found"] = train(disk.path / "run")
disk.read_only(False)
"""


def test_a_read_only_folder(tmp_path, noted):
    found = scene(READ_ONLY, tmp_path)
    code, lines = found["before"]
    assert code == 2 and len(lines) == 1 and "is not a writable folder" in lines[0], found
    assert found["left"] == [], found
    for when in ("during", "resumed"):
        line = refused(found[when], "branchgrpo: output: ")
        assert "its disk is read-only; a second call goes on" in line or found["kind"] != "tmpfs", (
            line
        )
    assert found["again"] == [0, []] and found["same"] and found["tidy"] == [], found
    assert found["found"] == [0, []], "a finished run is read where nothing can be written"
    noted(
        "read-only folder before the training",
        "code 2, one line, before any model is loaded",
        "nothing was there, nothing is written",
        disk=found["kind"],
    )
    noted(
        "the disk becomes read-only during the training",
        "code 74, one line, also at the next start",
        "iteration 1; when it can be written again the same command ends bit-equal",
        disk=found["kind"],
    )


HANDLES = """
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
count = lambda: len(os.listdir("/proc/self/fd")) - 1


def lowest_free():
    "The number that the next handle gets: a limit is one of numbers, and a shell leaves some open."
    os.close(number := os.dup(0))
    return number


prompts = ROOT / "prompts.txt"
prompts.write_text("a red 3\\ntwo blue 5s\\n")
words = ("--prompts", prompts, "--embeddings", ROOT / "text")
train(ROOT / "whole", *words, iterations=1)
inherited = [os.dup2(0, number) for number in range(200, 212)]
found |= {"open": [count()], "ends": []}
for more in (0, 1, 2, 3, 5, 64):
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free() + more, hard))
    found["ends"].append(train(ROOT / "run", *words, iterations=1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found["open"].append(count())
found["same"] = same(ROOT / "run", ROOT / "whole")
"""


@pytest.mark.fast
def test_no_file_handles_left(tmp_path, noted):
    """Kept: what was written; with handles again the same command ends bit-equal; no handle stays
    open."""
    found = scene(HANDLES, tmp_path)
    *few, enough = found["ends"]
    assert enough == [0, []] and found["same"], found
    lines = {refused(said, "branchgrpo: ") for said in few if said[0]}
    assert lines and all("(ulimit -n)" in line for line in lines), found
    assert len(set(found["open"])) == 1, "no handle stays open"
    noted(
        "no file handles left (ulimit -n at 0 to 5 above what is open)",
        "code 74, one line that names the limit and `ulimit -n`",
    )


PROMPTS = """
prompts = ROOT / "prompts.txt"
text = "a red 3\\ntwo blue 5s\\na green 7\\n"
prompts.write_text(text)
words = ("--prompts", prompts)
before("branchgrpo.training.checkpoints:write_checkpoint", prompts.unlink, 1)
found["during"] = train(ROOT / "run", *words, iterations=2)
found["gone"] = train(ROOT / "run", *words)
prompts.write_text(text + "a red 8\\n")
found["more"] = train(ROOT / "run", *words)
prompts.write_text(text.replace("green", "white"))
found["other"] = train(ROOT / "run", *words)
prompts.write_text(text)
found["again"] = train(ROOT / "run", *words)
found["rows"] = len(rows(ROOT / "run"))
"""


def test_a_prompt_file_that_goes_or_changes(tmp_path, noted):
    found = scene(PROMPTS, tmp_path)
    assert found["during"] == [0, []], "prompts are read once"
    for when, words in {
        "gone": "prompts.txt' is not there",
        "more": "it had 3 to train on and 3 to test on, now 4 to train on and 4 to test on",
        "other": "it had 3 to train on and 3 to test on, now as many, with other texts",
    }.items():
        code, lines = found[when]
        assert code == 2 and len(lines) == 1, found
        assert lines[0].startswith("branchgrpo: prompts: ") and words in lines[0], found
    assert found["again"] == [0, []] and found["rows"] == 3, found
    noted(
        "the prompt file is deleted during the training",
        "nothing: prompts are read once",
        "the run ends; a second call names the missing file (code 2) and goes on when it is back",
    )
    noted(
        "the prompt file is changed between start and resume",
        "code 2, one line with the numbers of prompts before and now",
        "the run; with the old file it goes on",
    )


CLOCK = """
import time
real, shift = time.time, [0.0]
time.time = lambda: real() + shift[0]
time.time_ns = lambda: int((real() + shift[0]) * 1e9)
from branchgrpo.reproduction.workers import IterationCount
count = IterationCount({ROOT / "run": 3})
jumps = {1: -86400.0, 2: 365 * 86400.0}
for call, seconds in jumps.items():
    jump = lambda s=seconds: shift.__setitem__(0, s)
    before("branchgrpo.training.checkpoints:write_checkpoint", jump, call)
found["run"] = train(ROOT / "run", iterations=2)
found["resumed"] = train(ROOT / "run")
metrics = (ROOT / "run/metrics.jsonl").read_text().splitlines()
found["seconds"] = [json.loads(l)["seconds"] for l in metrics]
found["line"] = count.line([ROOT / "run"])
shift[0] = 0.0
train(ROOT / "whole")
found["same"] = same(ROOT / "run", ROOT / "whole")
"""


def test_a_clock_that_jumps(tmp_path, noted):
    "Kept: every checkpoint; metrics and weights bit-equal."
    found = scene(CLOCK, tmp_path)
    assert found["run"] == found["resumed"] == [0, []] and found["same"], found
    seconds = [0.0, *found["seconds"]]
    assert all(0 < after - before < 3600 for before, after in zip(seconds, seconds[1:])), found
    assert 0 < float(found["line"].split()[0]) < 3600, found
    noted(
        "the clock jumps back by a day, and forward by a year",
        "nothing: durations and times left use a clock that never jumps",
    )
