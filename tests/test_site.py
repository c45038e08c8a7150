"""The site: every page has one place, and a build with the project's settings ends at what is
wrong."""

import json
import re
import shutil
from pathlib import Path

from sphinx.cmd.build import build_main
from sphinx.util.matching import patfilter

ROOT = Path(__file__).parents[1]
NAVIGATION = "docs/templates/navigation.md"


def notebooks(folder):
    found = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.ipynb")]
    return [name for name in found if ".ipynb_checkpoints" not in name]


def test_every_page_has_one_place_in_the_navigation():
    files = [path for part in ("*.md", "figures/**/*.md", "docs/*.md") for path in ROOT.glob(part)]
    own = {path.relative_to(ROOT).as_posix() for path in files} | {
        *notebooks("nbs"),
        *notebooks("reproduce"),
    }
    pages = sorted(name.rpartition(".")[0] for name in own - {"nbs/index.ipynb", "README.md"})
    patterns = re.findall(r"^/(.+)$", (ROOT / NAVIGATION).read_text(), re.MULTILINE)
    assert sorted(page for pattern in patterns for page in patfilter(pages, pattern)) == pages


def notebook(*cells):
    "A notebook in which a text that begins with a flag is code."

    def cell(number, text):
        code = (
            {"cell_type": "code", "outputs": [], "execution_count": None}
            if text.startswith("#|")
            else {}
        )
        return {"cell_type": "markdown", "metadata": {}, "source": text, "id": f"c{number}"} | code

    return json.dumps(
        {
            "cells": list(map(cell, range(99), cells)),
            "metadata": {},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )


INDEX = "# Home\n> All.\n\n## The course\n- **Part.** [a](a.ipynb), [pages](site/00_build.ipynb)"
LESSON = ["# A\n> One lesson.", "#| hide\nunseen = 1", "#| export\nx = 1", "#| slow\ny = 2"]
REFERENCE = (
    "# Reference\n\n```{eval-rst}\n.. autosummary::\n   :toctree: reference\n\n  "
    " branchgrpo.site.build\n```\n"
)
CONTENTS = """```{toctree}
:hidden:
:glob:
:caption: Part

/nbs/a
/nbs/site/*
/docs/*
```
```{toctree}
:hidden:
:glob:
:caption: Results

/figures/*
/reproduce/**
```
"""
REPORT = (
    "# All\n\n## Figure 1\n\n![fig1](testbed/fig1.png)\n\n[notebook](../reproduce/a/fig1.ipynb)\n"
)


def small_repository(root, text):
    "A repository with the parts that a site needs, and one lesson with a text."
    for part in ("nbs/site", "reproduce/a", "figures/testbed", "docs/templates"):
        (root / part).mkdir(parents=True)
    (root / "nbs/index.ipynb").write_text(notebook(INDEX))
    (root / NAVIGATION).write_text(CONTENTS)
    (root / "nbs/a.ipynb").write_text(notebook(*LESSON, text))
    # the lesson of the module in the reference
    shutil.copy(ROOT / "nbs/site/00_build.ipynb", root / "nbs/site")
    (root / "reproduce/a/fig1.ipynb").write_text(
        notebook("# Figure 1\n> A claim.", "#| export\nz = 3")
    )
    (root / "figures/README.md").write_text(REPORT)
    shutil.copy(ROOT / "figures/testbed/quickstart_front.png", root / "figures/testbed/fig1.png")
    (root / "docs/reference.md").write_text(REFERENCE)
    (root / "docs/explorer.md").write_text("# The explorer\n")
    return root


def build(root, out):
    """Build the site of a repository with the project's settings; return the status, 0 if all is
    well."""
    return build_main(
        [
            "-W",
            "-q",
            "-c",
            str(ROOT / "docs"),
            "-d",
            str(out / "doctrees"),
            str(root),
            str(out / "html"),
        ]
    )


def test_a_small_site_is_built(tmp_path):
    root = small_repository(tmp_path / "r", "$$x^2$$ and [home](index.ipynb#the-course)")
    assert build(root, tmp_path / "site") == 0
    site = tmp_path / "site/html"
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    # its lesson shows one
    assert [name for name, page in pages.items() if "#|" in page] == ["nbs/site/00_build.html"]
    assert "x^2" in pages["nbs/a.html"] and "unseen" not in pages["nbs/a.html"]
    assert '"../reference' not in pages["nbs/a.html"], (
        "a lesson's module is in the reference if there is one"
    )
    assert "../docs/reference/branchgrpo.site.build.html" in pages["nbs/site/00_build.html"]
    assert "../../nbs/site/00_build.html" in pages["docs/reference/branchgrpo.site.build.html"]
    assert "../../figures/README.html" in pages["reproduce/a/fig1.html"]
    assert re.search(
        r"Part.*a\.html.*Results.*figures/README\.html", pages["nbs/index.html"], re.DOTALL
    )
    assert "url=nbs/index.html" in pages["index.html"] and "</script>" in pages["explore.html"]
    assert re.search(
        r'<a [^>]*href="../explore.html".*<iframe src="../explore.html"',
        pages["docs/explorer.html"],
        re.DOTALL,
    )
    assert (site / "searchindex.js").is_file() and (site / "_images/fig1.png").is_file()
    loads = r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["'](?:https?:)?//"""
    assert not [name for name, page in pages.items() if re.search(loads, page)], (
        "the site needs no network"
    )


WRONG = {  # a text, and what its warning says
    "[nowhere](b.ipynb)": "b.ipynb",
    "[no such place](index.ipynb#nothing)": "nothing",
    "# One\n\n#### Four": "header",
}


def test_what_is_wrong_ends_the_build(tmp_path, capsys):
    "One build names them all: a warning is an error."
    assert build(small_repository(tmp_path / "r", "\n\n".join(WRONG)), tmp_path / "site") != 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert not [said for said in WRONG.values() if not any(said in line for line in warned)], warned


def test_the_explorer_has_no_link_that_only_the_site_can_follow():
    "On GitHub its page says where `make site` writes it."
    text = (ROOT / "docs/explorer.md").read_text()
    assert "explore.html)" not in text and "href" not in text and "`_site/explore.html`" in text
    assert all((ROOT / "docs" / link).exists() for link in re.findall(r"\]\(([^)]+)\)", text))
