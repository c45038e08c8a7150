"""What is installed is whole: an sdist and a wheel are built, and the wheel alone trains, away from
this folder."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from small import entries, package_settings, requirements

import branchgrpo
from branchgrpo.yaml_files import parse_table

ROOT = Path(__file__).parents[1]
SMALL = (
    "--iterations 1 --steps 4 --splits 0,1 --prompts-per-iteration 1 --evaluate-every 0 --tracker"
    " none"
)


def tracked():
    "Return the files that git knows or would add, relative to the project."
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in out.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist, and the wheel that is built from it; from a copy, since setuptools writes beside
    its sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        if not name.startswith(("nbs/", "runs/", "figures/", "tests/", "reproduce/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def package_files():
    "Return the files of the package, with the size of what a link leads to."
    return {
        name: (ROOT / name).stat().st_size for name in tracked() if name.startswith("branchgrpo/")
    }


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        inside = {
            i.filename: i.file_size for i in wheel.infolist() if ".dist-info/" not in i.filename
        }
    assert "branchgrpo/py.typed" in inside
    assert inside == package_files()


def test_the_sdist_holds_what_a_build_needs(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        links = [member.name for member in sdist.getmembers() if member.issym()]
    assert package_files().keys() <= names
    assert {
        "settings.ini",
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CITATION.cff",
    } <= names
    assert links == []  # else a folder of sources without its neighbours has no weights


def test_settings_ini_is_the_one_record():
    assert (ROOT / "setup.py").is_file()
    assert package_settings()["version"] == branchgrpo.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project.keys() == {"name", "dynamic"}
    assert project["name"] == package_settings()["lib_name"]


def inside(wheel, name):
    "Return the text of a file of a wheel's metadata."
    with zipfile.ZipFile(wheel) as opened:
        path = next(path for path in opened.namelist() if path.endswith(f".dist-info/{name}"))
        return opened.read(path).decode()


def test_the_wheel_says_what_settings_ini_says(built):
    settings, said = package_settings(), Parser().parsestr(inside(built[1], "METADATA"))
    assert (said["Name"], said["Version"]) == (settings["lib_name"], settings["version"])
    assert (said["Summary"], said["Author"]) == (settings["description"], settings["author"])
    assert said["License-Expression"] == settings["license"]
    assert said["Keywords"].split(",") == settings["keywords"].split()
    assert said["Requires-Python"] == f">={settings['min_python']}"
    urls = [line.replace(" =", ",", 1) for line in entries(settings["urls"])]
    assert said.get_all("Project-URL") == urls
    python = "Programming Language :: Python :: 3."
    classifiers = said.get_all("Classifier")
    others = [text for text in classifiers if not text.startswith(python)]
    assert others == entries(settings["classifiers"])


def test_the_wheel_requires_what_settings_ini_requires(built):
    said = Parser().parsestr(inside(built[1], "METADATA"))
    required = {str(Requirement(text)) for text in said.get_all("Requires-Dist")}
    wanted = requirements()
    core = {str(Requirement(text)) for text in wanted.pop("")}
    extra = {
        str(Requirement(f'{text}; extra == "{name}"')) for name in wanted for text in wanted[name]
    }
    assert required == core | extra
    assert set(said.get_all("Provides-Extra")) == wanted.keys()


def test_the_wheel_has_the_commands_of_settings_ini(built):
    settings, points = package_settings(), ConfigParser(delimiters=["="])
    points.read_string(inside(built[1], "entry_points.txt"))
    found = {
        group: [f"{name} = {value}" for name, value in points[group].items()]
        for group in points.sections()
    }
    wanted = {"console_scripts": "console_scripts", "nbdev": "nbdev_entry_points"}
    assert found == {group: entries(settings[field]) for group, field in wanted.items()}


def test_the_versions_of_python_are_those_that_are_tested(built):
    versions = package_settings()["pythons"].split()
    assert versions[0] == package_settings()["min_python"]
    python = "Programming Language :: Python :: 3."
    classifiers = Parser().parsestr(inside(built[1], "METADATA")).get_all("Classifier")
    assert [text.rpartition(" ")[2] for text in classifiers if text.startswith(python)] == versions
    workflow = parse_table((ROOT / ".github/workflows/tests.yml").read_text())
    assert all(job["strategy"]["matrix"]["python"] == versions for job in workflow["jobs"].values())


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_folder(built, tmp_path):
    "Only the wheel's files, beside the libraries of this environment."
    zipfile.ZipFile(built[1]).extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "PYTHONSAFEPATH": "1"}
    code = (
        "import sys, branchgrpo.cli; print(branchgrpo.__file__);"
        " sys.exit(branchgrpo.cli.main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "train", *SMALL.split(), "--output", "run"]
    done = subprocess.run(
        words, cwd=tmp_path / "empty", env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(str(tmp_path / "installed"))
    assert "1 iteration in" in done.stdout
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["run"]


def test_the_citation_is_of_this_version():
    cff = parse_table((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cff["title"], cff["version"]) == ("branchgrpo", branchgrpo.__version__)
    cited = {entry["identifiers"][0]["value"].removeprefix("arXiv:") for entry in cff["references"]}
    assert cited == {"2509.06040", "2512.15347"}
    assert all(
        person.keys() == {"family-names", "given-names"}
        for e in cff["references"]
        for person in e["authors"]
    )
