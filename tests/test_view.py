"""Looking at a run: kept trees change no number, and the page shows what is there."""

import json
import os
import socket
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
from commands import popen
from safetensors.torch import load_file
from slow import often
from small import rows, wait_for
from test_training import START, together

from branchgrpo import TrainConfig, Trainer, cli
from branchgrpo.planning import plan_of
from branchgrpo.training.resolve import resolve
from branchgrpo.viewing.page import page
from branchgrpo.viewing.run import read_records, read_run

SMALL = dict(
    steps=4, splits=(0, 1), prompts_per_iteration=2, evaluate_every=0, tracker="none", iterations=3
)


def trained(folder, **changes):
    return Trainer(TrainConfig.from_dict(SMALL | {"output": str(folder)} | changes)).fit()


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    "A finished run with evaluations, samples and trees."
    folder = tmp_path_factory.mktemp("runs") / "demo"
    return trained(folder, evaluate_every=2, evaluation_prompts=8)


@pytest.fixture
def copied(demo, tmp_path):
    "A copy of the run, to be damaged."
    subprocess.run(["cp", "-r", demo.path, tmp_path / "demo"], check=True)
    return tmp_path / "demo"


def called(capsys, *words):
    code = cli.main(["view", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


class Elements(HTMLParser):
    "The elements of a page with their attributes, as a browser would find them."

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def all(self, tag):
        return [attrs for name, attrs in self.found if name == tag]


# kept trees

FUNNEL = {"recipe": "pro-grpo", "roots": 6, "prune_at": {"1": 4, "2": 2}, "splits": []}
SIDE = {
    "splits": [],
    "roots": 2,
    "side": [0, 2],
    "branch_factor": 3,
    "advantage": "siblings",
    "lora_rank": 2,
}


def kept_trees(folder):
    return [json.loads(path.read_text()) for path in sorted((folder / "trees").iterdir())]


KINDS = {
    "tree": {},
    "funnel": FUNNEL,
    "side branches": SIDE,
    "small batches": {"max_batch": 3},
    "adaptive": {"adaptive": True, "splits": (0, 2)},
    "selected leaves": {
        "group_selection": "ovf",
        "group_keep": 2,
        "prune": "extreme",
        "prune_keep": 1,
    },
}


def weights_of(found):
    "The tensors of a run's result."
    files = sorted(
        path for name in ("model", "lora") for path in (found.path / name).rglob("*.safetensors")
    )
    return {
        f"{path.name}/{name}": value for path in files for name, value in load_file(path).items()
    }


@pytest.mark.parametrize("kind", often(KINDS, ("side branches", "selected leaves")))
def test_keeping_trees_changes_no_number(tmp_path, kind):
    changes = KINDS[kind]
    without = trained(tmp_path / "without", **changes, iterations=2, tree_every=0)
    kept = trained(tmp_path / "with", **changes, iterations=2, tree_every=1)
    assert rows(kept.path) == rows(without.path)
    before, after = weights_of(without), weights_of(kept)
    assert before and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not (without.path / "trees").exists()
    assert [path.name for path in sorted((kept.path / "trees").iterdir())] == [
        "000001.json",
        "000002.json",
    ]


@pytest.mark.parametrize("changes", [{}, FUNNEL, SIDE], ids=["tree", "funnel", "side branches"])
def test_a_kept_tree_is_the_tree_that_was_trained_on(tmp_path, changes):
    "Its rewards have the iteration's mean, its leaves are the images, and its shape is the plan's."
    found = trained(
        tmp_path / "run", **changes, prompts_per_iteration=1, iterations=1, tree_every=1
    )
    (tree,) = kept_trees(found.path)
    s = resolve(TrainConfig.from_dict(SMALL | changes))
    assert [len(depth["values"]) for depth in tree["depths"]] == list(plan_of(s).populations)
    assert sum(tree["rewards"]) / len(tree["rewards"]) == pytest.approx(
        found.metrics[0]["reward"], abs=1e-5
    )
    assert tree["depths"][-1]["values"] == tree["rewards"]
    assert sum(sum(depth["trained"]) for depth in tree["depths"]) == found.metrics[0]["edges"]
    last = str(len(tree["depths"]) - 1)
    assert len(tree["images"][last]) == len(tree["rewards"]) and "0" in tree["images"]


@pytest.mark.slow
def test_a_tree_shared_by_processes_is_kept_once(tmp_path):
    """By the main process: the numbers are those of one process, and the images those of its own
    leaves."""
    table = SMALL | {
        "max_batch": 1,
        "decode_batch": 1,
        "prompts_per_iteration": 1,
        "iterations": 1,
        "tree_every": 1,
    }
    found = []
    for n in (1, 2):
        here = table | {"output": str(tmp_path / str(n)), "ranks_per_prompt": n}
        for status, log in together(n, START, json.dumps(here), tmp_path / str(n)):
            assert status == 0, log
        found += kept_trees(tmp_path / str(n))
    one, two = found
    assert two["rewards"] == one["rewards"] and two["prompt"] == one["prompt"]
    assert two["depths"] == one["depths"]
    last = str(len(one["depths"]) - 1)
    assert 0 < len(two["images"][last]) < len(one["images"][last])
    assert all(one["images"][last][n] == image for n, image in two["images"][last].items())


def test_trees_come_with_evaluations_unless_they_are_asked_for(demo, tmp_path):
    assert [path.stem for path in sorted((demo.path / "trees").iterdir())] == [
        "000001",
        "000002",
        "000003",
    ]
    alone = trained(tmp_path / "run", evaluate_every=2, evaluation_prompts=4, tree_every=0)
    assert not (alone.path / "trees").exists()


def test_a_run_goes_on_with_another_tree_every(tmp_path):
    "Also a run of a version that did not know the setting."
    first = trained(tmp_path / "run", iterations=1)
    table = first.info
    del table["settings"]["tree_every"]
    (first.path / "run.json").write_text(json.dumps(table))
    assert len(trained(tmp_path / "run", iterations=2, tree_every=1).metrics) == 2


# what the page shows


def test_the_page_needs_nothing_from_outside_and_runs_nothing(demo):
    found = Elements(page([read_run(demo.path)]))
    names = {tag for tag, _ in found.found}
    assert not names & {"script", "iframe", "object", "embed", "link", "base", "form"}
    for _, attrs in found.found:
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value.startswith("data:image/")
    (policy,) = [
        m["content"] for m in found.all("meta") if m.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'")


EVIL = """"><script>alert(1)</script><img src=x onerror='alert(1)'>&amp;</title></style>]]>"""


def test_what_a_run_holds_is_text_and_no_html(copied, tmp_path):
    info = json.loads((copied / "run.json").read_text())
    info["settings"] |= {"recipe": EVIL, "backbone": EVIL, "reward": EVIL, "seed": EVIL, EVIL: EVIL}
    (copied / "run.json").write_text(json.dumps(info))
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {f"reward/{EVIL}": 0.5, EVIL: 1.0} for line in lines]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in (copied / "trees").iterdir():
        tree = json.loads(path.read_text()) | {"prompt": EVIL, "iteration": EVIL}
        path.write_text(json.dumps(tree))
    other = tmp_path / "<script>alert(2)<"
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"settings": {"seed": 0}, "state": "started"}))
    found = Elements(page(read_records((copied, other)), refresh=5))
    clean = Elements(page(read_records((copied,))))
    assert not found.all("script") and not clean.all("script")
    assert all(
        attrs["src"].startswith("data:image/") and "onerror" not in attrs
        for attrs in found.all("img")
    )
    assert len(found.all("title")) == 1


# what is missing or damaged


@pytest.mark.parametrize(
    "missing",
    [
        "metrics.jsonl",
        "evaluations.jsonl samples",
        "trees",
        "metrics.jsonl evaluations.jsonl samples trees",
    ],
)
def test_a_run_is_shown_as_far_as_it_has_come(missing, copied, capsys):
    subprocess.run(["rm", "-r", *(copied / name for name in missing.split())], check=True)
    code, out, err = called(capsys, copied)
    assert (code, err) == (0, "")
    assert ", finished" in out
    assert (copied / "view.html").read_text(encoding="utf-8").endswith("</body></html>")


def test_a_line_that_is_just_being_written_is_left_out(copied):
    before = read_run(copied).rows
    (copied / "metrics.jsonl").write_bytes((copied / "metrics.jsonl").read_bytes()[:-30])
    assert read_run(copied).rows == before[:-1]


DAMAGES = {
    "run.json": b'{"settings": {',
    "metrics.jsonl": b"[1, 2]\n",
    "evaluations.jsonl": b"[" * 100_000,
    "samples/000002.png": b"",
    "trees/000003.json": b'{"depths": [{"parents": 3}]}',
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_in_one_line(name, copied, capsys):
    (copied / name).write_bytes(DAMAGES[name])
    code, out, err = called(capsys, copied)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert name.rpartition("/")[2] in err


# live


@pytest.mark.slow
def test_a_live_page_follows_a_training_to_its_end(tmp_path):
    "The page loads itself again while the run is trained, and no more after it was killed."
    folder = tmp_path / "run"
    table = SMALL | {"output": str(folder), "iterations": 100_000, "splits": [0, 1]}
    training = popen([sys.executable, "-c", START, json.dumps(table)])
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists())
        with open(tmp_path / "said", "w") as said:
            words = ["-m", "branchgrpo.cli", "view", str(folder), "--live", "--interval", "1"]
            follower = popen([sys.executable, *words], stdout=said, stderr=said)
        wait_for((folder / "view.html").exists)
        first = (folder / "view.html").read_text()
        assert 'http-equiv="refresh"' in first
        wait_for(lambda: (folder / "view.html").read_text() != first)
    finally:
        training.kill()
        training.wait(timeout=60)
    assert follower.wait(timeout=120) == 0, (tmp_path / "said").read_text()
    assert 'http-equiv="refresh"' not in (folder / "view.html").read_text()
    text = (tmp_path / "said").read_text()
    assert ", training" in text and "stopped" in text.split("page:")[-2]
    assert "\x1b" not in text  # no terminal


def test_looking_does_not_disturb_a_training(copied):
    "The lock is neither taken nor removed, and a holder that is gone counts as stopped."
    info = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps(info | {"state": "started"}))
    assert read_run(copied).state == "stopped"
    lock = copied / ".lock"
    lock.write_text(
        json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": "now"})
    )
    before = lock.stat()
    assert read_run(copied).state == "training"
    assert (lock.stat().st_mtime_ns, lock.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    lock.write_text(
        json.dumps({"process": 2**22 + 1, "host": socket.gethostname(), "since": "now"})
    )
    assert read_run(copied).state == "stopped"
    lock.write_text(json.dumps({"process": 1, "host": "another", "since": "now"}))
    assert read_run(copied).state == "training"  # it wrote something within the hour
    for path in copied.glob("*.json*"):
        os.utime(path, (1, 1))
    assert read_run(copied).state == "stopped"
    for text in ("", "{", "[]", '{"process": "x"}'):
        lock.write_text(text)
        assert read_run(copied).state == "stopped"


LIGHT = """
import sys
from branchgrpo.cli import main
code = main(["view", sys.argv[1]])
slow = ("torch", "diffusers", "transformers", "pandas")
print([name for name in slow if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def test_a_look_loads_no_torch(demo):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, demo.path], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
