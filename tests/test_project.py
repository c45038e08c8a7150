"""The project's shape: metadata agree, dependencies are what was tried, nothing refers to the outside."""

import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import branchgrpo

ROOT = Path(__file__).parents[1]
PINS = {
    "torch": "2.13.0",
    "diffusers": "0.42.1",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "torchmetrics": "1.9.0",
    "nbdev": "3.3.26",
    "papermill": "2.7.0",
    "jupyterlab": "4.6.6",
}


def settings():
    parser = ConfigParser(delimiters=["="], interpolation=None)
    parser.read(ROOT / "settings.ini")
    return parser["DEFAULT"]


def constraints():
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_metadata_agree():
    cfg, project = settings(), tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert cfg["version"] == branchgrpo.__version__
    assert cfg["lib_name"] == project["project"]["name"] == "branchgrpo"
    assert project["project"]["requires-python"] == f">={cfg['min_python']}"
    nbdev = project["tool"]["nbdev"]
    assert (nbdev["lib_path"], nbdev["nbs_path"]) == (cfg["lib_path"], cfg["nbs_path"])
    assert nbdev["allowed_cell_metadata_keys"] == ["tags"] and nbdev["update_pyproject"] is False


def test_dependencies():
    cfg, pins = settings(), constraints()
    wanted = [Requirement(r) for r in (cfg["requirements"] + " " + cfg["dev_requirements"]).split()]
    assert not {r.name for r in wanted} & {"torchvision", "torch-fidelity", "hpsv2"}
    assert PINS.items() <= pins.items()
    for requirement in wanted:
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), requirement


def tracked():
    out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    return [ROOT / name for name in out.stdout.split("\0") if name]


def test_stands_alone():
    outside = ["../" + "shared", "/wo" + "rk/"]
    for path in tracked():
        if path.suffix in (".safetensors", ".png") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        assert not [word for word in outside if word in text], path.name


def test_weights_are_small():
    sizes = [
        p.lstat().st_size for p in (ROOT / "branchgrpo/testbed/weights").rglob("*") if p.is_file()
    ]  # a link to a shared autoencoder weighs nothing
    assert 1e6 < sum(sizes) < 25e6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_module_imports_alone():
    names = [m.name for m in pkgutil.walk_packages(branchgrpo.__path__, "branchgrpo.") if "weights" not in m.name]
    code = (
        "import os, sys, torch\nbad = []\n"
        "for name in sys.argv[1:]:\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        try: __import__(name); os._exit(0)\n"
        "        except BaseException as e: print(name, repr(e)); sys.stdout.flush(); os._exit(1)\n"
        "    bad += [name] if os.waitpid(pid, 0)[1] else []\n"
        "sys.exit(len(bad))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, cwd=ROOT)
    assert len(names) > 15 and done.returncode == 0, done.stdout + done.stderr


def test_the_engine_knows_no_method_by_name():
    from branchgrpo import recipes

    words = "|".join(re.escape(name) for name in recipes.names())
    for module in ("plan", "tree", "rollout", "credit", "objective", "policy", "transition", "trainer"):
        code = (ROOT / "branchgrpo" / f"{module}.py").read_text()
        assert not re.search(rf"""(==|!=|in)\s*\(?["']({words})["']|recipe\s*(==|!=)""", code), module
