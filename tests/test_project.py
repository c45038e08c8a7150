"""The project's shape: metadata agree, dependencies are what was tried, nothing refers to the
outside."""

import ast
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

from packaging.requirements import Requirement
from small import requirements
from test_package import tracked

ROOT = Path(__file__).parents[1]


def constraints():
    lines = [
        line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    return dict(line.split("==") for line in lines if line)


def test_nbdev_keeps_tags_and_metadata():
    nbdev = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nbdev"]
    assert nbdev["allowed_cell_metadata_keys"] == ["tags"] and nbdev["update_pyproject"] is False


def test_dependencies():
    texts, pins = requirements(), constraints()
    wanted = [Requirement(text) for text in texts[""] + texts["dev"]]
    assert not {r.name for r in wanted} & {"torchvision", "torch-fidelity"}
    for requirement in wanted:
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_stands_alone():
    outside = ["../" + "shared", "/wo" + "rk/"]
    for path in map(ROOT.joinpath, tracked()):
        if path.suffix in (".safetensors", ".png") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        assert not [word for word in outside if word in text], path.name


def test_weights_are_small():
    # a link to a shared autoencoder weighs nothing
    sizes = [
        path.lstat().st_size
        for path in (ROOT / "branchgrpo/testbed/weights").rglob("*")
        if path.is_file()
    ]
    assert 1e6 < sum(sizes) < 30e6


def modules(*outside):
    "Return the modules of the package that are not below one of the folders (or files) `outside`."
    paths = sorted((ROOT / "branchgrpo").rglob("*.py"))
    skipped = [ROOT / "branchgrpo" / name for name in ("_modidx.py", *outside)]
    return [path for path in paths if not any(path.is_relative_to(folder) for folder in skipped)]


def name(path):
    return str(path.relative_to(ROOT))


def test_the_engine_knows_no_method_by_name():
    from branchgrpo import recipes

    words = "|".join(re.escape(recipe) for recipe in recipes.names())
    asks = re.compile(rf"""(==|!=|in)\s*\(?["']({words})["']|recipe\s*(==|!=)""")
    package = '.partition(".")[0] == "branchgrpo"'  # the package's own name
    found = modules("methods", "recipes.py")
    assert [
        name(path) for path in found if asks.search(path.read_text().replace(package, ""))
    ] == []


def imported(path):
    "Return the full names of the modules that a file imports, and of what it imports from them."
    package = path.relative_to(ROOT).parent.parts
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) + 1 - node.level]] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            names += [f"{source}.{alias.name}" for alias in node.names]
    return names


def test_the_modules_import_each_other_in_no_circle():
    "So every one can be imported alone, whatever was imported before it."
    known = {name(path).removesuffix(".py").replace("/", "."): path for path in modules()}
    graph = {
        module: known.keys() & set(imported(path)) - {module} for module, path in known.items()
    }
    assert len(graph) > 60 and list(TopologicalSorter(graph).static_order())


def test_production_code_imports_nothing_from_the_testbed():
    found = {name(path): imported(path) for path in modules("testbed")}
    assert {
        path
        for path, names in found.items()
        if any(n.startswith("branchgrpo.testbed") for n in names)
    } == set()
