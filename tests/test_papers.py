"""Every value of a paper's recipe stands on words of the paper, and every word that is kept is
needed."""

import csv
import json
import re
from pathlib import Path

from branchgrpo import recipes
from branchgrpo.commands import recipe_table
from branchgrpo.methods.papers import (
    ERRATA,
    PAPER_NAME,
    PAPERS,
    PLACE,
    QUOTES,
    places,
    quotes_of,
    words_lines,
)

ROOT = Path(__file__).parents[1]
ALL = [recipes.get(name) for name in recipes.names()]
SAID = [*QUOTES, *(q for e in ERRATA for q in e.quotes)]
# how a source begins that names no place, or one that it leaves
NO_PLACE = r"off(:|$)|ours|derived|not given"
CODE_FILE = r"\w\.(py|sh|yaml|json)\b"


def says_what_it_is(source):
    return (
        re.match(f"{NO_PLACE}|{PAPER_NAME}", source)
        or places(source)
        or re.search(CODE_FILE, source)
    )


def test_every_source_says_what_it_is():
    rows = [(recipe.name, name, source) for recipe in ALL for name, _, source in recipe.rows()]
    assert [row for row in rows if not says_what_it_is(row[2])] == []
    assert not says_what_it_is("a feeling")


def test_every_place_of_a_quote_is_one_that_a_source_can_name():
    assert [q.place for q in SAID if not re.fullmatch(PLACE, q.place)] == []


def stands_in_a_paper(source):
    "Return whether a source names a place of one of the two papers."
    return not re.match(NO_PLACE, source) and any(paper in PAPERS for paper, _ in places(source))


def test_a_value_with_a_place_has_words():
    rows = [(recipe, *row) for recipe in ALL for row in recipe.rows()]
    named = [
        (recipe, name, source) for recipe, name, _, source in rows if stands_in_a_paper(source)
    ]
    assert [
        (r.name, name, source) for r, name, source in named if not quotes_of(r, name, QUOTES)
    ] == []


def test_no_words_without_a_value():
    "Every setting that a quote speaks of, and every value that it lists, is that of a recipe."
    for q in QUOTES:
        for name, said in q.says.items():
            having = [
                getattr(recipe.values, name) for recipe in ALL if q in quotes_of(recipe, name, (q,))
            ]
            for value in said if isinstance(said, list) else [said]:
                assert value in having, f"{q.place}: no recipe has {name} {value} from there"


def numbers(text):
    "Return the numbers of a text, as texts."
    return re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("×", " ")))


def published(paper):
    "Return the numbers of every table of a paper, as they are printed."
    found = {}
    with open(ROOT / f"reproduce/published/{paper}.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["table"], set()).update(
                numbers(" ".join(row[key] for key in ("row", "column", "value")))
            )
    return found


def test_rows_of_tables_are_those_that_are_kept():
    """The numbers of a quoted row are in the transcription of its table, which other tests compare
    with."""
    tables = {"BranchGRPO": published("branchgrpo"), "Pro-GRPO": published("pro_grpo")}
    of_tables = [q for q in SAID if q.place.startswith("Table") and "path of" not in q.text]
    assert len(of_tables) > 40
    for q in of_tables:
        assert set(numbers(q.text)) <= tables[q.paper][q.place], q


def test_errata_name_lines_of_the_audit():
    recomputed = {
        line["what"]
        for line in json.loads((ROOT / "figures/testbed/audit.json").read_text())["lines"]
    }
    assert {what for e in ERRATA for what in e.audit} <= recomputed
    assert all(e.quotes and e.finding.endswith(".") for e in ERRATA)
    assert len({(e.paper, e.title) for e in ERRATA}) == len(ERRATA)


def test_a_recipe_is_shown_with_its_words():
    recipe = recipes.get("pro-grpo")
    shown, rows = words_lines(recipe), recipe_table(recipe)["words"]
    assert len(shown) == len(rows) > 10
    assert {"settings", "paper", "place", "text", "note"} == rows[0].keys()
    for line, row in zip(shown, rows):
        assert row["text"] in line and all(setting in line for setting in row["settings"])
