"""A file of prompts is read as it stands, or refused in one line that names the place."""

import json

import pytest

from branchgrpo.files import bare
from branchgrpo.prompts import PROMPT_SETS, PromptSet, load_prompts, rows_of

RAGGED = {  # a CSV file, and what the refusal names
    "longer, all rows": (
        "prompt,id\na cat, sitting,1\na dog, running,2\n",
        "line 2 of 'data.csv' has 3 fields",
    ),
    "longer, the last row": (
        "prompt\na cat\na dog, running\n",
        "line 3 of 'data.csv' has 2 fields",
    ),
    "shorter": ("prompt,id\na cat,1\na dog\n", "line 3 of 'data.csv' has 1 fields"),
    "a comma at every end": (
        "prompt,id\na cat,1,\na dog,2,\n",
        "line 2 of 'data.csv' has 3 fields",
    ),
    "after a blank line": ("prompt,id\na cat,1\n\na dog\n", "line 4 of 'data.csv' has 1 fields"),
    "after a text of two lines": (
        'prompt,id\n"a\ncat",1\na dog\n',
        "line 4 of 'data.csv' has 1 fields",
    ),
    "a quote that is not closed": (
        'prompt,id\n"a cat,1\na dog,2\n',
        "line 2 of 'data.csv' has 1 fields",
    ),
    "one name for two columns": (
        "id,prompt,prompt\n1,a cat,a dog\n",
        "has two columns of the name 'prompt'",
    ),
}


def refusal_of(place) -> str:
    "What reading a set says."
    with pytest.raises(ValueError) as refused:
        load_prompts(str(place))
    return str(refused.value)


@pytest.mark.parametrize("case", RAGGED)
def test_a_row_with_other_fields_than_the_header_is_refused(tmp_path, case):
    text, wanted = RAGGED[case]
    (tmp_path / "data.csv").write_text(text)
    assert refusal_of(tmp_path).startswith("prompts: ") and wanted in refusal_of(tmp_path)


def test_a_table_of_images_is_checked_too(tmp_path):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a cat, sitting\n")
    assert "line 2 of 'metadata.csv' has 3 fields" in refusal_of(tmp_path)


def test_quotes_tabs_marks_and_blank_lines_of_a_table_are_read(tmp_path):
    for name in ("comma", "tab"):
        (tmp_path / name).mkdir()
    table = 'prompt,id\n"a cat, ""big""",1\n\n\u200ba dog,2\n'
    (tmp_path / "comma" / "data.csv").write_text(table, encoding="utf-8-sig")
    (tmp_path / "tab" / "data.tsv").write_text("prompt\tid\r\na cat, sitting\t1\r\n")
    assert load_prompts(str(tmp_path / "comma")).train == ['a cat, "big"', "a dog"]
    assert load_prompts(str(tmp_path / "tab")).train == ["a cat, sitting"]


LINES = {  # a .jsonl file, and what the refusal names
    "null in one line": (
        '{"prompt": null, "caption": "c1"}\n{"prompt": "a dog", "caption": "c2"}\n',
        "line 1 of",
    ),
    "absent in one line": ('{"prompt": "a cat", "text": "t"}\n\n{"text": "t"}\n', "line 3 of"),
    "a number in one line": (
        '{"prompt": "a cat", "text": "t"}\n{"prompt": 5, "text": "t"}\n',
        "line 2 of",
    ),
    "a list of messages": ('{"prompt": [{"role": "user"}], "caption": "c"}\n', "line 1 of"),
    "no table in one line": ('{"prompt": "a cat"}\n["a dog"]\n', "line 2 of"),
    "nothing to see in one line": (
        '{"prompt": "a cat"}\n{"prompt": "\\u200b"}\n',
        "the prompt in line 2 of",
    ),
    "a name twice": ('{"prompt": "a cat", "prompt": "a dog"}\n', "it names 'prompt' twice"),
    "a name twice, within": (
        '{"prompt": "a cat", "include": {"a": 1, "a": 2}}\n',
        "it names 'a' twice",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_without_the_prompt_of_the_others_is_refused(tmp_path, case):
    text, wanted = LINES[case]
    (tmp_path / "p.jsonl").write_text(text)
    assert wanted in refusal_of(tmp_path / "p.jsonl")


def test_a_column_without_a_value_is_none(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": null, "caption": "c1"}\n{"prompt": null, "caption": "c2"}\n'
    )
    assert load_prompts(str(tmp_path / "p.jsonl")).train == ["c1", "c2"]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data.json").write_text((tmp_path / "p.jsonl").read_text())
    assert load_prompts(str(tmp_path / "set")).train == ["c1", "c2"]
    (tmp_path / "set" / "data.json").write_text(
        '{"prompt": "p1", "caption": "c1"}\n{"caption": "c2"}\n'
    )
    assert "row 2 of" in refusal_of(tmp_path / "set")


MARKS = ["\ufeff", "\u200b", "\u2060", "\u200e", "\u00ad", "\u202a", "\u2066", "\x00", "\u3164"]


@pytest.mark.parametrize("mark", MARKS)
def test_unseen_marks_are_no_prompt_and_no_part_of_one(tmp_path, mark):
    (tmp_path / "p.txt").write_text(
        f"a cat\n{mark}a dog {mark}\n{mark}\n {mark} {mark}\n{mark}{mark}a fox\n"
    )
    assert load_prompts(str(tmp_path / "p.txt")).train == ["a cat", "a dog", "a fox"]
    rows = [{"prompt": f"{mark}a dog{mark}", "id": 1}, {"prompt": " a cat "}]
    (tmp_path / "p.jsonl").write_text(
        "".join(f"{mark * (mark != chr(0))}{json.dumps(row)}\n" for row in rows)
    )
    assert load_prompts(str(tmp_path / "p.jsonl")).train == ["a dog", " a cat "]


def test_marks_that_change_what_is_seen_stay():
    flag = "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
    for text in ("👩\u200d🎨", "❤\ufe0f", flag, "می\u200cخواهم", "ന്\u200d", "a sign says\u2028Go"):
        assert bare(f"\ufeff{text}\u200b") == text
    assert bare("a cat\u200d") == "a cat" and bare("\u200da cat\u200b\u200c") == "a cat"


SORTED = [
    {"prompt": f"{tag} {n}", "tag": tag} for tag in ("one", "two", "colour") for n in range(100)
]


def test_a_few_prompts_of_a_sorted_file_are_of_all_kinds(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SORTED))
    test = load_prompts(str(tmp_path / "p.jsonl"))
    some = test.few(24)
    assert {row["tag"] for row in rows_of(some)} == {"one", "two", "colour"} and len(
        set(some)
    ) == 24
    assert some == test.few(24) == test.few(64)[:24], (
        "the same at every call, and a part of a larger one"
    )
    assert test.few() == test.few(300) == test.few(1000) == test.test, (
        "all of them stay in their order"
    )


@pytest.mark.parametrize("name", PROMPT_SETS.names())
def test_the_testbed_s_prompts_are_shuffled_already(name):
    found = load_prompts(name)
    assert found.few(16) == found.test[:16]


def test_every_line_counts(tmp_path):
    lines = ["a cat", "a dog", "a cat", "a cat"]
    (tmp_path / "p.txt").write_text("\n".join(lines))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data.csv").write_text("\n".join(["prompt", *lines]))
    for given in (str(tmp_path / "p.txt"), str(tmp_path / "set"), lines):
        assert load_prompts(given).train == load_prompts(given).test == lines
    assert PromptSet(lines, lines).without_repeats().test == ["a cat", "a dog"]
