"""Every row and column that the papers print is on its page: computed, or with a sentence that says
why not."""

import ast
import csv
import json
from pathlib import Path

import nbformat
import pytest

from branchgrpo.reproduction.pages import templates

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "reproduce/published"
# tables that a page computes line by line from the csv itself, and the json that it writes
RECOMPUTED = {
    ("branchgrpo", "Table 2"): "branchgrpo_table2",
    ("pro_grpo", "Table 4"): "pro_grpo_tables4_10_11",
    ("pro_grpo", "Table 7"): "pro_grpo_tables7_8",
    ("pro_grpo", "Table 8"): "pro_grpo_tables7_8",
    ("pro_grpo", "Table 9"): "pro_grpo_table9_fig7",
    ("pro_grpo", "Table 10"): "pro_grpo_tables4_10_11",
    ("pro_grpo", "Table 11"): "pro_grpo_tables4_10_11",
}
# rows that such a page's arithmetic starts from
INPUTS = {"Noise Prediction", "VAE Decoding", "Reward Computation"}
# tables of seconds that a page prints below its own
BESIDE = {("pro_grpo", "Table 13"): "pro_grpo/table13"}


def printed(paper: str) -> dict[str, tuple[set[str], set[str]]]:
    "Return the rows and the columns of every table of a paper."
    tables = {}
    with open(PUBLISHED / f"{paper}.csv", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["table"].startswith("Table"):
                rows, columns = tables.setdefault(line["table"], (set(), set()))
                rows.add(line["row"])
                columns.add(line["column"])
    return tables


TABLES = {
    (path.stem, table): names
    for path in PUBLISHED.glob("*.csv")
    for table, names in printed(path.stem).items()
}


def constants(source: str) -> ast.Module:
    "Return the assignments of a cell that call nothing."
    body = ast.parse(source).body
    plain = [line for line in body if isinstance(line, ast.Assign)]
    plain = [
        line for line in plain if not any(isinstance(part, ast.Call) for part in ast.walk(line))
    ]
    return ast.Module(plain, type_ignores=[])


def declared(path: Path) -> list[dict]:
    """Return what each cell tagged `whole` of a page declares, with what the cells before it have
    declared."""
    names, found = {}, []
    for cell in nbformat.read(path, 4).cells:
        if "whole" in cell.metadata.get("tags", []):
            exec(compile(constants(cell.source), str(path), "exec"), {}, names)
            found.append(dict(names))
    return found


PAGES = {name: declared(path) for name, path in templates(ROOT / "reproduce").items()}
WHOLE = {
    whole["PAPER_TABLE"]: (name, whole)
    for name, declared_here in PAGES.items()
    for whole in declared_here
}


def missing(whole: dict, rows: set[str], columns: set[str]) -> list[str]:
    """Return what a declaration lacks or has too much, and what has neither a number of ours nor a
    reason."""
    wrong = []
    for kind, ours, theirs in (
        ("row", whole["PAPER_ROWS"], rows),
        ("column", whole["PAPER_COLUMNS"], columns),
    ):
        wrong += [f"{kind} {name!r} is not on the page" for name in theirs - ours.keys()]
        wrong += [f"{kind} {name!r} is not printed" for name in ours.keys() - theirs]
        wrong += [
            f"{kind} {name!r} has no reason"
            for name, here in ours.items()
            if not here and name not in whole["WHY"]
        ]
    return wrong


def source_of(name: str) -> str:
    "Return the code of a page."
    cells = nbformat.read(ROOT / f"reproduce/{name}.ipynb", 4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def reads(name: str, table: tuple[str, str]) -> bool:
    "Return whether a page reads a printed table."
    paper, number = table
    return f'published("{paper}", "{number}"' in source_of(name)


def test_every_printed_table_has_a_page():
    assert len(TABLES) >= 17, "both papers print their tables"
    assert not TABLES.keys() - WHOLE.keys() - RECOMPUTED.keys() - BESIDE.keys()
    assert not WHOLE.keys() - TABLES.keys()


@pytest.mark.parametrize(
    "table", sorted(WHOLE.keys() | TABLES.keys() - RECOMPUTED.keys() - BESIDE.keys()), ids=" ".join
)
def test_every_row_and_column_is_on_its_page(table):
    name, whole = WHOLE[table]
    assert not missing(whole, *TABLES[table])
    assert reads(name, table), "the page reads the printed table"
    assert "whole_table(" in source_of(name), "the page shows the whole table"


@pytest.mark.parametrize("table", sorted(BESIDE), ids=" ".join)
def test_a_table_beside_is_read_by_its_page(table):
    assert reads(BESIDE[table], table)


@pytest.mark.parametrize("table", sorted(RECOMPUTED.keys() - WHOLE.keys()), ids=" ".join)
def test_every_row_of_a_recomputed_table_is_in_its_record(table):
    record = json.loads(
        (ROOT / f"figures/testbed/{RECOMPUTED[table]}.json").read_text(encoding="utf-8")
    )
    text = json.dumps(record, ensure_ascii=False)
    rows, _ = TABLES[table]
    assert not [
        row for row in rows - INPUTS if json.dumps(row, ensure_ascii=False)[1:-1] not in text
    ]
