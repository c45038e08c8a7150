"""The front page: README.md is the front of the first notebook; every link leads to a file."""

import json
import re
from pathlib import Path

from branchgrpo.reproduction.answers import FRONT_PAGE
from branchgrpo.site.build import readme
from branchgrpo.training.resolve import resolve
from branchgrpo.yaml_files import parse_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST = json.loads((ROOT / FRONT_PAGE).read_text(encoding="utf-8"))


def test_the_readme_is_the_front_of_the_first_notebook():
    assert readme(FIRST) == README, "run `make report`"


def test_the_front_counts_the_pipelines_of_the_record():
    rows = json.loads((ROOT / "tests/golden/pipelines.json").read_text())["rows"].values()
    trained = sum("mismatch" in row for row in rows)
    front = " ".join(README.split())
    assert f"Of {len(rows)} pipelines tried" in front
    assert f"{trained} pass this check" in front


def text_of(path):
    "The text of a page without its code."
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def test_every_link_of_every_page_leads_to_a_file():
    folders = ("nbs", "reproduce", "figures", "docs")
    pages = [
        *ROOT.glob("*.md"),
        *(page for place in folders for page in (ROOT / place).rglob("*.*")),
    ]
    pages = [
        page
        for page in pages
        if page.suffix in (".md", ".ipynb") and ".ipynb_checkpoints" not in page.parts
    ]
    found = [
        (page, link) for page in pages for link in re.findall(r"\]\(([^)\s#]+)", text_of(page))
    ]
    assert len(found) > 500
    dead = [
        (str(page), link)
        for page, link in found
        if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists()
    ]
    assert dead == []


def blocks(language):
    "Return the blocks of README.md in a language."
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_your_own_reward_and_model_train(tmp_path, monkeypatch):
    "The block as it stands, with smaller numbers."
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python")
    smaller = (
        "iterations=1, steps=4, splits=(0, 1), prompts_per_iteration=2, evaluate_every=0,"
        ' tracker="none"'
    )
    assert block.count("iterations=20") == 2
    exec(block.replace("iterations=20", smaller), {})
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"red", "model"}
    for run in ("red", "model"):
        assert len((tmp_path / f"runs/{run}/metrics.jsonl").read_text().splitlines()) == 1


def test_your_own_method_is_one(tmp_path):
    from branchgrpo import TrainConfig

    (block,) = blocks("yaml")
    name = re.search(r"(\S+\.yaml), for --recipe", block)[1]
    (tmp_path / name).write_text(block)
    settings = resolve(TrainConfig(recipe=str(tmp_path / name)))
    assert settings.recipe == parse_table(block)["name"] == Path(name).stem
    assert settings.splits == (0, 1, 2)
