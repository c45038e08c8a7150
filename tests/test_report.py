"""The reports say what the records say, and which runs are earlier ones."""

import json
import re
from pathlib import Path

import nbformat
import pytest

from branchgrpo.reproduction.answers import CLOSING, OPENING, first_answers, written_report
from branchgrpo.reproduction.cache import cache_key
from branchgrpo.reproduction.pages import jobs, planned_runs, templates
from branchgrpo.reproduction.records import read_record
from branchgrpo.reproduction.report import write_results
from branchgrpo.training.resolve import resolve

ROOT = Path(__file__).parents[1]
MARK = ", earlier |"
PAGES = templates(ROOT / "reproduce")


def names_today(page: str) -> set[str]:
    "Return the names of the runs that a page would train today."
    (job,) = jobs([page], "testbed", ROOT / "reproduce")
    return {cache_key(resolve(config).to_dict()) for config, _ in planned_runs(job)}


def names_recorded(page: str) -> set[str] | None:
    "Return the names of the runs in a page's record; None if the page has written nothing."
    source = "".join(
        cell.source for cell in nbformat.read(PAGES[page], 4).cells if cell.cell_type == "code"
    )
    paths = [
        ROOT / f"figures/testbed/{name}.json"
        for name in re.findall(r"\{output\}/(\w+)\.json", source)
    ]
    records = [json.dumps(read_record(path)) for path in paths if path.exists()]
    if not records:
        return None
    return {
        Path(name).name for record in records for name in re.findall(r'"run": "([^"]+)"', record)
    }


def row(page: str) -> str:
    "Return the row of a page in the table of all results."
    lines = (ROOT / "figures/README.md").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if f"(../reproduce/{page}.ipynb) |" in line)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_is_marked_if_and_only_if_its_runs_are_earlier(page):
    recorded, today = names_recorded(page), names_today(page)
    if recorded is not None and today:
        assert (row(page).endswith(MARK)) == (recorded != today), (
            "`branchgrpo.reproduction.report.write_results` is due"
        )
    elif recorded is not None:
        assert not row(page).endswith(MARK), "it trains nothing"


def test_the_list_of_results_is_what_the_pages_and_their_records_say(tmp_path, monkeypatch):
    "A page whose words change leaves no command of the README with a changed file behind."
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/testbed").symlink_to(ROOT / "figures/testbed")
    (tmp_path / "reproduce").symlink_to(ROOT / "reproduce")
    monkeypatch.chdir(tmp_path)
    write_results()
    made = (tmp_path / "figures/README.md").read_text(encoding="utf-8")
    shown = (ROOT / "figures/README.md").read_text(encoding="utf-8")
    assert made == shown, "`make figures` is due"


def test_the_written_report_is_made_from_the_records():
    assert (ROOT / "REPORT.md").read_text(encoding="utf-8") == written_report(), (
        "`make report` is due"
    )


def test_the_first_page_has_the_answers_of_the_record():
    first = json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8"))
    block = f"{OPENING}\n{first_answers()}\n{CLOSING}"
    assert any(block in "".join(cell["source"]) for cell in first["cells"]), "`make report` is due"
