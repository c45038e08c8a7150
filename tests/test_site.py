"""The site: every notebook has a page, every page has a place, and a build without warnings has no dead link."""

import json
import re
from pathlib import Path

import pytest

from branchgrpo.site.build import build, write_sources
from branchgrpo.site.lessons import text_of
from branchgrpo.site.sources import ANSWERS, Sources

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_sources(ROOT, tmp_path_factory.mktemp("site"))


def pages(folder):
    found = [*folder.rglob("*.ipynb"), *folder.rglob("*.md")]
    return {str(path.relative_to(folder)) for path in found if not path.is_relative_to(folder / "figures")}


def test_every_notebook_has_a_page(sources):
    lessons = {str(path.relative_to(ROOT / "nbs")) for path in (ROOT / "nbs").rglob("*.ipynb")}
    results = {str(path.relative_to(ROOT)) for path in (ROOT / "reproduce").rglob("*.ipynb")}
    assert {page for page in lessons | results if ".ipynb_checkpoints" not in page} <= pages(sources)


def contents(folder, page):
    "The pages that a page's tables of contents list."
    text = (folder / page).read_text()
    if page.endswith(".ipynb"):
        text = "\n".join(text_of(cell) for cell in json.loads(text)["cells"])
    found = []
    for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.S):
        lines = [line for line in block.splitlines() if line and not line.startswith(":")]
        found += [str(((folder / page).parent / line).resolve().relative_to(folder)) for line in lines]
    return found


def test_every_page_has_one_place_in_the_navigation(sources):
    names = {page.rsplit(".", 1)[0]: page for page in pages(sources)}
    listed = [name for page in names.values() for name in contents(sources.resolve(), page)]
    alone = {name for name, page in names.items() if "orphan: true" in (sources / page).read_text()[:40]}
    assert all(
        re.fullmatch(r"reference/branchgrpo(\.\w+)+", name) for name in alone
    )  # modules: in their package's list
    assert sorted(listed) == sorted(set(names) - alone - {"index"})


def test_outputs_and_pictures_come_along(sources):
    gallery = json.loads((sources / "24_gallery.ipynb").read_text())
    kinds = [kind for cell in gallery["cells"] for out in cell.get("outputs", []) for kind in out.get("data", {})]
    assert "image/png" in kinds
    page = json.loads((sources / "reproduce/branchgrpo/fig3.ipynb").read_text())
    assert "branchgrpo_fig3_maps.png" in page["cells"][1]["source"]
    assert (sources / "figures/testbed/branchgrpo_fig3_maps.png").is_file()


def test_the_answers_are_taken_up_when_they_are_there(tmp_path):
    site = Sources(ROOT, tmp_path)
    assert ANSWERS in site.captions()["At a glance"]
    result = site.results[ANSWERS]
    result.section, result.figures = "", ["testbed/study_answers.png"]
    assert "study_answers.png" in result.found(str)
    result.figures = []
    assert "No figure of this page is stored yet" in result.found(str)


def small_repository(folder, lesson):
    "A repository with the parts that a site needs, and one lesson."
    for part in ("nbs", "reproduce", "figures/testbed", "branchgrpo"):
        (folder / part).mkdir(parents=True)

    def cell(number, text):
        code = {"cell_type": "code", "outputs": [], "execution_count": None} if text.startswith("#|") else {}
        return {"cell_type": "markdown", "metadata": {}, "source": text, "id": str(number)} | code

    def notebook(*texts):
        return json.dumps(
            {"cells": list(map(cell, range(99), texts)), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        )

    (folder / "nbs/index.ipynb").write_text(notebook("# Home\n> All.\n\n## The course\n- **Part.** [a](a.ipynb)"))
    (folder / "nbs/a.ipynb").write_text(notebook("# A\n> One lesson.", "#| default_exp a", "#| export\nx = 1", lesson))
    (folder / "branchgrpo/a.py").write_text('"One lesson."\n__all__ = ["x"]\nx = 1  # the one\n')
    (folder / "figures/README.md").write_text("# Every figure\n\nNone.\n")
    return folder


def test_a_small_site_is_built(tmp_path):
    root = small_repository(tmp_path / "r", "$$x^2$$ and [home](index.ipynb#the-course)")
    assert build(root, tmp_path / "site", tmp_path / "work") > 5
    assert {path.name for path in tmp_path.iterdir()} == {"r", "site", "work"}, "nothing is left beside the site"
    page = (tmp_path / "site/a.html").read_text()
    assert "x^2" in page and "One lesson." in page
    assert "the one" in (tmp_path / "site/reference/branchgrpo.a.html").read_text()
    assert (tmp_path / "site/searchindex.js").is_file() and (tmp_path / "site/explore.html").is_file()


@pytest.mark.parametrize("text", ["[nowhere](b.ipynb)", "[no such place](index.ipynb#nothing)", "# One\n\n#### Four"])
def test_what_is_wrong_ends_the_build(tmp_path, text):
    root = small_repository(tmp_path / "r", text)
    with pytest.raises((RuntimeError, ValueError)):
        build(root, tmp_path / "site", tmp_path / "work")
