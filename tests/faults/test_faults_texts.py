"""Random texts of rewards, prompts, YAML and commands: each is read, or one line says why not."""

import collections
import contextlib
import io
import json
import os
import string
import tempfile
import time
import warnings
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from test_faults_plans import FIELDS, profile

from branchgrpo import cli
from branchgrpo.files import bare
from branchgrpo.prompts import load_prompts
from branchgrpo.rewards.names import check_name, terms
from branchgrpo.yaml_files import read_table, yaml_of

COUNTS = collections.Counter()
# letters of many scripts, signs that have a meaning somewhere, controls, line separators, halves of
# a pair, emoji
SIGNS = (
    "+*():-.,0123456789eE"
    " norm'\"{}[]#&!%|>@`\\/\t\r\n\x00\x0b\x1f\x85\u2028\u2029\ufeff\ud800\udfff😀é中عक"
)
TEXTS = st.text(st.one_of(st.sampled_from(SIGNS), st.characters()), max_size=40)


def refused(function, *args) -> str | None:
    """Return the one line that a call raises as `ValueError`, or None if it raises nothing; other
    errors are not caught."""
    try:
        function(*args)
    except ValueError as error:
        text = str(error)
        assert type(error) is ValueError, repr(error)
        assert text and not set("\n\r") & set(text), repr(text)
        return text
    return None


# --------------------------------------------------------------------------------------------------
# rewards

PARTS = st.sampled_from(
    ["clip", "tiny-clip", "norm(", ")", "+", "*", "2*", "1e", "math:pi", "x.py:f", "os:", ":", "-"]
)
MUTATED = st.lists(st.one_of(PARTS, st.text(SIGNS, max_size=4)), max_size=6).map("".join)


def wrong_rewards(examples: int) -> None:
    @profile(examples)
    @example("1e400*clip")
    @example("clip" * 3000)
    @example("\x00")
    @example("\ud800")
    @example("norm(" * 50)
    @given(st.one_of(TEXTS, MUTATED))
    def each(text):
        line = refused(check_name, text)
        COUNTS["ran" if line is None else "refused"] += 1
        assert line is None or line.startswith("reward: "), line

    each()


@pytest.mark.fast
@pytest.mark.parametrize(
    "one", ["1", "1 ", "a ", " ", "a", "1e", "norm(", "a+", "2*a+", "a.b.", "_", "a:"]
)
def test_a_long_expression_takes_no_exponential_time(one):
    start = time.process_time()
    for end in ("", "!", " b", ")", "*", "+"):
        refused(terms, one * 20_000 + end)
    assert time.process_time() - start < 20


NESTS = (
    "[*a{n}, *a{n}]",
    "{{x: *a{n}, y: *a{n}}}",
    "{{<<: [*a{n}, *a{n}]}}",
    "{{? [*a{n}, *a{n}] : 1}}",
)


@pytest.mark.parametrize("nest", NESTS)
def test_a_few_lines_of_aliases_take_no_time_and_no_memory(tmp_path, nest):
    lines = ["a0: &a0 {x: 1}", *(f"a{n + 1}: &a{n + 1} {nest.format(n=n)}" for n in range(60))]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    start = time.process_time()
    line = refused(read_table, tmp_path / "bomb.yaml")
    assert (
        line is not None
        and "bomb.yaml" in line
        and "its aliases (*name) make more than 10000 values" in line
    )
    assert time.process_time() - start < 5


# --------------------------------------------------------------------------------------------------
# prompt files


def prompt_file(name: str, content: bytes) -> None:
    "A file's prompts are whole texts, one for each line; or one line names the setting."
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        line = refused(load_prompts, str(path))
        COUNTS["ran" if line is None else "refused"] += 1
        if line is not None:
            assert line.startswith("prompts: "), line
            return
        found = load_prompts(str(path))
        assert found.train and all(isinstance(text, str) and bare(text) for text in found.train), (
            found.train
        )
        if name.endswith(".txt"):
            text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
            assert found.train == [bare(line) for line in text.split("\n") if bare(line)]


SURROUNDED = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe"]), st.binary(max_size=60)
).map(b"".join)
LINES = st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=8)
ENDS = st.sampled_from(["\n", "\r\n", "\r", "\u2028"])
WRITTEN = st.builds(lambda lines, end: end.join(lines).encode(), LINES, ENDS)
JSONS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["prompt", "text", "x"]), inner)
    ),
    max_leaves=6,
)
PROMPT_ROWS = st.builds(
    lambda prompt, more: {"prompt": prompt} | more,
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.dictionaries(st.sampled_from(["image", "tag", "prompt"]), JSONS, max_size=2),
)
ROWS = st.lists(PROMPT_ROWS | JSONS, max_size=4).map(
    lambda rows: "\n".join(map(json.dumps, rows)).encode()
)


def prompt_files(examples: int) -> None:
    @profile(examples)
    @example("a.jsonl", b'{"prompt": "\\ud800"}')
    @example("a.jsonl", b'{"prompt": " "}')
    @example("a.jsonl", b"[" * 100_000)
    @example("a.jsonl", b'{"prompt": 1' + b"0" * 5000 + b"}")
    @example("a.txt", b"")
    @example("a.txt", b"\xef\xbb\xbf")
    @example("a.txt", b"a\x00b\n\xf0\x9f\x98\x80\n")
    @example("a.txt", b"x" * 10_000 + b"\n" + b"x" * 10_000)
    @given(
        st.sampled_from(["a.txt", "a.txt", "a.jsonl", "a.JSONL", "a.json", "a"]),
        st.one_of(SURROUNDED, WRITTEN, ROWS),
    )
    def each(name, content):
        prompt_file(name, content)

    each()


# --------------------------------------------------------------------------------------------------
# command lines


@contextlib.contextmanager
def empty_folder():
    "Work in an empty folder."
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def called(words: list[str]) -> tuple[int, str, str]:
    "Return the exit code and what was printed of a command line, in this process."
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            code = cli.main(words)
        except SystemExit as left:  # --help
            code = left.code or 0
    return code, out.getvalue(), err.getvalue()


def one_line_or_done(words: list[str], folder: Path) -> str | None:
    "Check a command line that writes nothing; return what it printed, None if it was refused."
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out, err = called(words)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files, (
        "something was written"
    )
    COUNTS["ran" if code == 0 else "refused"] += 1
    if code == 0:
        assert not err, err
        return out
    assert code == 2 and not out, (code, out, err)
    assert err.startswith("branchgrpo: ") and err.endswith("\n") and len(err.splitlines()) == 1, err
    return None


def again_the_same(printed: str, folder: Path) -> None:
    "A printed config gives the same settings again."
    (folder / "again.yaml").write_text(printed, encoding="utf-8")
    code, out, err = called(["train", "--config", "again.yaml", "--print-config"])
    assert (code, out) == (0, printed), err
    (folder / "again.yaml").unlink()


FLAGS = [f"--{name.replace('_', '-')}" for name in sorted(FIELDS)]
VALUES = st.one_of(
    st.sampled_from(
        [
            "0",
            "1",
            "-1",
            "4",
            "0.5",
            "1e-4",
            "inf",
            "nan",
            "0,3",
            "5:2,7:1",
            "window",
            "true",
            "none",
            "",
        ]
    ),
    st.sampled_from(
        [
            "ovf",
            "branchgrpo",
            "mixgrpo",
            "tiny-flux",
            "tiny-sd",
            "tiny-clip",
            "1" * 5000,
            "[1, 2]",
            "{0: 1}",
        ]
    ),
    st.text(string.printable, max_size=8),
    TEXTS.filter(lambda text: "\x00" not in text),
)
GIVEN = st.tuples(st.sampled_from(FLAGS), VALUES)
EQUALS = GIVEN.map(lambda pair: ("=".join(pair),))
WORDS = st.lists(st.one_of(GIVEN, GIVEN, EQUALS, VALUES.map(lambda word: (word,))), max_size=3)


def command_lines(examples: int) -> None:
    @profile(examples)
    @example([("--seed", "1" * 5000)])
    @example([("--splits", "0,,3")])
    @given(WORDS)
    def each(words):
        with empty_folder() as folder:
            flat = [word for some in words for word in some]
            printed = one_line_or_done(["train", "--print-config", *flat], folder)
            if printed is not None and printed.startswith("recipe: "):
                again_the_same(printed, folder)

    each()


# --------------------------------------------------------------------------------------------------
# YAML

PLAIN_YAML = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=6)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(-2, 9) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)
SETTINGS = st.dictionaries(st.sampled_from(sorted(FIELDS)), PLAIN_YAML, max_size=3)
DOCUMENTS = st.one_of(
    st.one_of(SETTINGS, SETTINGS, PLAIN_YAML).map(lambda table: yaml_of(table).encode()),
    st.lists(st.sampled_from(["steps: 4", "steps: 4", "- a", "{", "a: &x [*x]", "\t",
                              "!!python/object:os.x", "splits: [0]", "---", "? [1]", "eta: .nan",
                              "<<: 3", "seed: 0x1F", "steps: 1_0", "%YAML 9.9"]), max_size=4)
    .map(lambda lines: "\n".join(lines).encode()),
    st.binary(max_size=30),
)  # fmt: skip


def configs(examples: int) -> None:
    @profile(examples)
    @example(b"steps: 2024-01-01")
    @example(b"? [steps, 4]\n: 1")
    @example(b"a: &x\n  b: *x")
    @example(b"[" * 3000)
    @example(b"0: .")
    @example(b"name: 4\nself: 4")
    @example(b'"a\\nb": null')
    @given(DOCUMENTS)
    def each(content):
        with empty_folder() as folder:
            (folder / "given.yaml").write_bytes(content)
            printed = one_line_or_done(
                ["train", "--config", "given.yaml", "--print-config"], folder
            )
            if printed is not None:
                again_the_same(printed, folder)
            (folder / "recipe.yaml").write_bytes(
                b"base: branchgrpo\nvalues:\n  " + content.replace(b"\n", b"\n  ")
            )
            one_line_or_done(["recipes", "recipe.yaml"], folder)

    each()


# --------------------------------------------------------------------------------------------------
# all of them

AGAIN = "nothing written; a printed config gives the same settings again"
# what is checked, with how many examples by `make test` and by `make faults`, and what holds
PROPERTIES = {
    "reward expressions, any text": (wrong_rewards, 30, 1000, "read, or one line"),
    "prompt files": (prompt_files, 30, 600, "whole and different prompts, or one line"),
    "command lines": (command_lines, 25, 400, AGAIN),
    "YAML files as config and as recipe": (configs, 8, 300, AGAIN),
}


@pytest.mark.fast
@pytest.mark.parametrize("what", PROPERTIES)
def test_some_random_texts(what):
    COUNTS.clear()
    function, few, *_ = PROPERTIES[what]
    function(few)


@pytest.mark.parametrize("what", PROPERTIES)
def test_many_random_texts(what, noted):
    COUNTS.clear()
    function, _, many, kept = PROPERTIES[what]
    function(many)
    ran, line = COUNTS["ran"], COUNTS["refused"]
    happened = f"{ran + line} tried: {ran} ran, {line} refused with one line"
    noted(
        f"random {what}",
        happened,
        kept,
        kind="properties",
        examples=ran + line,
        ran=ran,
        refused=line,
    )
