"""What a user states is what runs: in a recipe's file, in Python, as a flag; on every tiny
model."""

import dataclasses
import json
import typing
import warnings

import pytest
from ruamel.yaml import YAML

from branchgrpo import TrainConfig, recipes
from branchgrpo.backbones.names import TINY
from branchgrpo.cli import main
from branchgrpo.settings import MethodSettings, field_types, read_settings
from branchgrpo.training.resolve import fill_in, fit_of, resolve

CANDIDATES = {
    bool: (True, False),
    int: (3, 5, 1, 0),
    float: (0.25, 0.5, 1.5, 0.0),
    str: ("window", "extreme", "flow", "ddim"),
    tuple: ([1, 3], [2]),
    dict: ({2: 2}, {1: 0.5}),
}
BASES = ("branchgrpo", "testbed/branchgrpo")


def other_value(name, fitted):
    "A value that a setting may have, and that the fitted base does not have."
    hint = field_types(MethodSettings)[name]
    kinds = [typing.get_origin(kind) or kind for kind in (hint, *typing.get_args(hint))]
    values = [value for kind in kinds for value in CANDIDATES.get(kind, typing.get_args(kind))]
    values += [value for kind in (hint, *typing.get_args(hint)) for value in typing.get_args(kind)]
    for value in values:
        try:
            read = read_settings(MethodSettings, {name: value})[name]
        except (ValueError, TypeError):
            continue
        if read is not None and read not in fitted:
            return value, read
    raise AssertionError(f"no other value of {name} was found")


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings(action="ignore"):
        yield


# of a run
SETTINGS = [field.name for field in dataclasses.fields(MethodSettings) if field.name != "seed"]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_of_a_recipe_is_final(name, tmp_path):
    "Of a file over a published recipe, over its fit, over a file; of Python; of a flag."
    here = {model: getattr(fill_in(TrainConfig(backbone=model))[0], name) for model in TINY}
    value, read = other_value(name, list(here.values()))
    for base in BASES:
        path, above = tmp_path / "mine.yaml", tmp_path / "above.yaml"
        YAML().dump({"base": base, "values": {name: value}}, path)
        YAML().dump({"base": str(path), "values": {}}, above)
        for recipe in (path, above):
            for model in TINY:
                config = TrainConfig(recipe=str(recipe), backbone=model)
                assert getattr(fill_in(config)[0], name) == read, (base, model)
                assert name not in fit_of(config).changes
    recipes.RECIPES.register("stated-here")(
        recipes.get("branchgrpo").variant("stated-here", "", **{name: (read, "")})
    )
    try:
        for model in TINY:
            assert (
                getattr(fill_in(TrainConfig(recipe="stated-here", backbone=model))[0], name) == read
            )
            assert getattr(fill_in(TrainConfig(backbone=model, **{name: read}))[0], name) == read
    finally:
        del recipes.RECIPES.entries["stated-here"]


@pytest.mark.parametrize("model", TINY)
def test_a_run_has_the_values_of_its_file(model, tmp_path, capfd):
    """Trained by the command: run.json has what the file states, and what the model changed of its
    base."""
    values = {"splits": [0, 2], "steps": 6, "learning_rate": 1.0e-4, "clip_range": 1.0e-3, "s": 2.0}
    base = "dancegrpo-sd" if model == "tiny-sd" else "branchgrpo"
    values |= {"stochastic": "all", "eta": 0.4, "frames": 5} if "wan" in model else {"eta": 0.4}
    path = tmp_path / "mine.yaml"
    YAML().dump({"base": base, "values": values}, path)
    words = (
        f"--backbone {model} --iterations 1 --prompts-per-iteration 1 --evaluate-every 0 --tracker"
        " none"
    )
    words += f" --recipe {path} --output {tmp_path}/run --reward tiny-clip" + (
        " --prompts clips" if "wan" in model else ""
    )
    assert main(["train", *words.split()]) == 0
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert {name: info["settings"][name] for name in values} == values
    assert info["base"]["name"] == f"testbed/{base}" and info["base"]["changes"]["height"][1] == 32
    assert not set(info["base"]["changes"]) & (set(values) | {"prompts_per_iteration"})
    assert f"base testbed/{base}, fitted to {model}: " in capfd.readouterr().err


def test_a_stated_value_that_a_model_cannot_take_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: branchgrpo\nvalues: {transition: dance}\n")
    with pytest.raises(ValueError, match="transition: 'dance' is not ddim"):
        resolve(TrainConfig(recipe=str(path), backbone="tiny-sd"))
