"""What is installed is whole: an sdist and a wheel are built, and the wheel alone trains, away from this folder."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import branchgrpo
from branchgrpo.files import parse_table

ROOT = Path(__file__).parents[1]
SMALL = "--iterations 1 --steps 4 --splits 0,1 --prompts-per-iteration 1 --evaluate-every 0 --tracker none"


def tracked():
    "Return the files that git knows or would add, relative to the project."
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in out.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    "An sdist, and the wheel that is built from it; from a copy, since setuptools writes beside its sources."
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
    return {name: (ROOT / name).stat().st_size for name in tracked() if name.startswith("branchgrpo/")}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        inside = {i.filename: i.file_size for i in wheel.infolist() if ".dist-info/" not in i.filename}
    assert "branchgrpo/py.typed" in inside
    assert inside == package_files()


def test_the_sdist_holds_what_a_build_needs(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        links = [member.name for member in sdist.getmembers() if member.issym()]
    assert package_files().keys() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff"} <= names
    assert links == []  # else a folder of sources without its neighbours has no weights


def test_the_wheel_says_what_it_is(built):
    with zipfile.ZipFile(built[1]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(wheel.read(name).decode())
    assert said["Version"] == branchgrpo.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    assert len(said.get_all("Project-URL")) >= 2
    python = "Programming Language :: Python :: 3."
    versions = [text.rpartition(" ")[2] for text in said.get_all("Classifier") if text.startswith(python)]
    workflow = parse_table((ROOT / ".github/workflows/tests.yml").read_text())
    assert all(job["strategy"]["matrix"]["python"] == versions for job in workflow["jobs"].values())


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_folder(built, tmp_path):
    "Only the wheel's files, beside the libraries of this environment."
    zipfile.ZipFile(built[1]).extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "PYTHONSAFEPATH": "1"}
    code = "import sys, branchgrpo.cli; print(branchgrpo.__file__); sys.exit(branchgrpo.cli.main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "train", *SMALL.split(), "--output", "run"]
    done = subprocess.run(words, cwd=tmp_path / "empty", env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(str(tmp_path / "installed"))
    assert "1 iteration in" in done.stdout
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["run"]


def test_the_citation_is_of_this_version():
    cff = parse_table((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cff["title"], cff["version"]) == ("branchgrpo", branchgrpo.__version__)
    cited = {entry["identifiers"][0]["value"].removeprefix("arXiv:") for entry in cff["references"]}
    assert cited == {"2509.06040", "2512.15347"}
    assert all(person.keys() == {"family-names", "given-names"} for e in cff["references"] for person in e["authors"])
