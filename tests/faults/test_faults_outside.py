"""What comes from outside: names, parameters, settings, weights and prompts are data; none of them
writes or runs."""

import json
import os
import re
import shutil
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image
from small import requirements

from branchgrpo import TrainConfig
from branchgrpo.cli import main
from branchgrpo.evaluation.benchmarks import compbench_layout, geneval_layout, vbench_layout
from branchgrpo.prompts import from_path
from branchgrpo.reproduction.cache import cache_key
from branchgrpo.reproduction.figures import side_by_side
from branchgrpo.reproduction.launch import train_in_subprocess
from branchgrpo.reproduction.markdown import markdown_table
from branchgrpo.reproduction.pages import jobs, new_page, page_arms
from branchgrpo.reproduction.schedule import run_notebook
from branchgrpo.reproduction.slurm import sbatch_options
from branchgrpo.rewards.names import load_reward
from branchgrpo.training.checkpoint_files import put_in_place, remove_leftovers
from branchgrpo.training.resolve import resolve
from branchgrpo.viewing.trees import draw_tree

ROOT = Path(__file__).parents[2]
HOSTILE = (
    *(
        "..",
        ".",
        "../../evil",
        "/etc/evil",
        "a/b",
        "..\\evil",
        "-rf",
        "~",
        ".hidden",
        "CON",
        "a\0b",
        "a\nb",
        " ",
    ),
    *(
        "x" * 300,
        "模" * 300,
        "a\u2028b",
        "\u202eexe.txt",
        "\x1b[2J",
        "\ud800",
        "$(touch EVIL)",
        "`touch EVIL`",
        ";",
    ),
)


def tree(folder):
    "Every path below a folder, with the text of small files."
    paths = sorted(Path(folder).rglob("*"))
    return {str(p): p.read_bytes()[:1000] if p.is_file() else None for p in paths}


@pytest.mark.fast
def test_a_run_stays_in_the_cache(tmp_path, noted):
    "A recipe's name, from its file, and a backbone's folder become part of a run's folder."
    settings = resolve(TrainConfig()).to_dict()
    known = cache_key(settings)
    assert known.startswith("branchgrpo-tiny-sd3-0-")
    for text in HOSTILE:
        for name in ("recipe", "backbone"):
            key = cache_key(settings | {name: text})
            assert (tmp_path / key).resolve().parent == tmp_path.resolve(), (name, text, key)
            assert (
                len(f"{key}.damaged-{2**63}.lock".encode()) <= 255
                and key.isprintable()
                and key != known
            )
            assert not key.startswith("-"), "a command would read it as an option"
    noted(
        "Run cache: 22 hostile names of recipes and backbones (../../evil, NUL, 300 characters,"
        " escape sequences)",
        "each run's folder lies in the cache; its name has at most 150 bytes",
        "everything outside of the cache",
    )


@pytest.mark.fast
def test_prompts_name_files_inside_the_tools_folder_only(tmp_path, noted):
    "T2I-CompBench++ and VBench read the prompt from the file's name."
    work = tmp_path / "work"
    (work / "source").mkdir(parents=True)
    Image.new("RGB", (16, 16)).save(work / "source" / "0.png")
    before, refused = tree(tmp_path), 0
    for n, prompt in enumerate(HOSTILE):
        row = {"number": 0, "prompt": prompt, "sample": 0, "image": "0.png"}
        known = [{"tag": "colors", "include": [], "prompt": prompt}]
        for layout in (geneval_layout, compbench_layout, vbench_layout):
            target = work / "target" / f"{n}{layout.__name__}"
            try:
                layout([row], known, work / "source", target)
                assert len([path for path in target.rglob("*.[pg][ni][gf]") if path.is_file()]) == 1
            except ValueError as error:
                assert "cannot be a file's name" in str(error)
                assert not target.exists(), "nothing is half written"
                refused += 1
    shutil.rmtree(work / "target")
    assert tree(tmp_path) == before and refused == 2 * 4
    twins = [
        dict(number=n, prompt=p, sample=0, image="0.png") for n, p in enumerate(("a/b", "a b"))
    ]
    with pytest.raises(ValueError, match="give one file"):
        vbench_layout(twins, [{}, {}], work / "source", work / "target")
    assert not (work / "target").exists()
    noted(
        "Benchmark layouts: prompts such as ../../evil, /etc/evil, NUL, 300 characters; two prompts"
        " with one file name",
        "files inside the tool's folder, or one line that names the prompt",
        "all other files; no image is scored against another prompt",
    )


@pytest.mark.fast
def test_first_frames_are_read_as_images_only(tmp_path, noted):
    """A row's `image` may lie anywhere, but only a picture is read from it: an EPS would start a
    program."""
    Image.new("RGB", (8, 8), "red").save(tmp_path / "frame.png")
    (tmp_path / "set").mkdir()
    place = tmp_path / "set" / "clips.jsonl"
    place.write_text(json.dumps({"prompt": "a", "image": "../frame.png"}))
    clips = from_path(place)
    assert clips.first_frames(clips.test)[0].shape == (3, 8, 8)
    (tmp_path / "frame.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    )
    with pytest.raises((OSError, ValueError)):
        clips.first_frames(clips.test)
    noted("A first frame that is an EPS program named .png", "an error", "nothing is started")


@pytest.mark.fast
def test_links_in_a_run_lead_nowhere(tmp_path, noted):
    "Leftovers of a killed save are deleted; a link among them is not followed."
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("000001.tmp", "000002.old", "000001.old"):
        (folder / name).symlink_to(precious)
    remove_leftovers(tmp_path / "run")
    (folder / "new").mkdir()
    put_in_place(folder / "new", folder / "000001", {"iteration": 1}, {})
    assert (precious / "file").read_text() == "kept"
    noted("Links to another folder among a run's leftovers", "not followed", "the other folder")


EVIL = Path("EVIL")
VALUES = (
    "__import__('os').system('touch EVIL')",
    "'); open('EVIL', 'w') #",
    '"); open("EVIL", "w") #',
    "'''\nopen('EVIL', 'w')\n'''",
    '"""\nopen("EVIL", "w")\n"""',
    "a\\",
    "\\'); open('EVIL', 'w') #",
    "line\nopen('EVIL', 'w')",
    "line\u2028open('EVIL', 'w')\u2029\x85\x0b\x0c",
    "{open('EVIL', 'w')} {{x}} %s $HOME $(touch EVIL) `touch EVIL`",
    "# type: ignore\nopen('EVIL', 'w')",
    "!touch EVIL",
    "%%bash\ntouch EVIL",
    "\ud800\x00\x1b[2J",
)
NAMES = (
    "x = open('EVIL', 'w') #",
    "__builtins__",
    "__name__",
    "open",
    "print",
    "text; y",
    "a b",
    "",
    "text\n",
    "é",
)


@pytest.mark.fast
def test_parameters_are_data_for_the_planner(tmp_path, monkeypatch, noted):
    """The runner executes the cells of a page that declare its runs; a parameter's value takes part
    as a value."""
    monkeypatch.chdir(tmp_path)
    new_page("reproduce/page.ipynb", "text: str = ''\nkept: list = []", arms="arms = (text, kept)")
    for value in VALUES:
        given = {"text": value, "kept": [value, {value: value}]}
        (job,) = jobs(["page"], "testbed", "reproduce", "out", given)
        assert page_arms(job) == (value, [value, {value: value}])
    for name in NAMES:
        with pytest.raises(ValueError, match="set: "):
            jobs(["page"], "testbed", "reproduce", "out", {name: 1})
        assert main(["reproduce", "page", "--set", f"{name}=1"]) == 2
    assert not EVIL.exists()
    noted(
        "reproduce --set: 14 values with code, quotes, line separators; 10 names that are code or"
        " no parameter",
        "values stay texts; each name is refused by one line",
        "nothing is executed",
    )


def test_parameters_are_data_in_an_executed_page(tmp_path, monkeypatch, noted):
    "papermill writes them into a cell of the executed notebook."
    monkeypatch.chdir(tmp_path)
    cell = "import json\nopen('seen.json', 'w').write(json.dumps([text, kept]))"
    new_page("reproduce/page.ipynb", "text: str = ''\nkept: list = []", cell)
    values = [value.replace("\ud800", "") for value in VALUES]  # a notebook is UTF-8
    given = {"text": "\n".join(values), "kept": [*values, {value: value for value in values}]}
    (job,) = jobs(["page"], "testbed", "reproduce", "out", given)
    run_notebook(job, tmp_path / "executed.ipynb")
    assert json.loads(Path("seen.json").read_text()) == [given["text"], given["kept"]]
    assert not EVIL.exists()
    noted("The same values in an executed page", "they arrive as they are", "no code runs")


@pytest.mark.fast
def test_no_shell_reads_the_launch_command(tmp_path, monkeypatch, noted):
    "The launch command is split into words; a value of a variable cannot become a command."
    monkeypatch.chdir(tmp_path)
    Path("echo.py").write_text("import json, sys\njson.dump(sys.argv, open('words.json', 'w'))")
    monkeypatch.setenv("HEAD", "node; touch EVIL `touch EVIL` $(touch EVIL) | touch EVIL > EVIL")
    launch = f"{sys.executable} echo.py $HEAD && touch EVIL"
    train_in_subprocess(TrainConfig(output="run $(touch EVIL)"), launch)
    words = json.loads(Path("words.json").read_text())
    assert (
        words[1:3] == ["node;", "touch"]
        and "&&" in words
        and words[-1] == "run $(touch EVIL)/log.yaml"
    )
    assert not EVIL.exists()
    for text in ("account=x\nrm -rf ~", "account=x\r--wrap=evil", "x\n#SBATCH=y", "a b=c"):
        with pytest.raises(ValueError, match="slurm_options: "):
            sbatch_options(text)
    noted(
        "Shell commands in --launch, in the variables it names, and in --slurm-options",
        "words of one command; a line break is refused by one line",
        "no shell reads them",
    )


def test_the_weights_of_a_reward_run_no_code(tmp_path, noted):
    "Those of a model and of a checkpoint: test_faults_checkpoints."

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'EVIL'}",)

    torch.save({"layers.0.weight": Evil()}, tmp_path / "sac+logos+ava1-l14-linearMSE.pth")
    with pytest.raises(Exception, match="(?i)weights"):
        load_reward(f"aesthetic:{tmp_path}")
    assert not (tmp_path / "EVIL").exists()
    noted(
        "A reward's weights that are a pickle with a command",
        "an error that names the file",
        "no code runs",
    )


@pytest.mark.fast
def test_the_doctor_names_the_commands_that_verify_downloads(tmp_path, capsys, noted):
    "Of the hub's cache, and of a folder; the tiny models are part of the package."
    (tmp_path / "head").mkdir()
    words = ["doctor", "--backbone", "black-forest-labs/FLUX.1-dev", "--verify"]
    # weights are missing
    assert main([*words, "--reward", f"pickscore+aesthetic:{tmp_path}/head"]) == 1
    said = capsys.readouterr().out.partition("verify: run\n")[2]
    assert said.splitlines() == [
        "hf cache verify black-forest-labs/FLUX.1-dev",
        "hf cache verify yuvalkirstain/PickScore_v1",
        f"hf cache verify OWNER/NAME --local-dir {tmp_path}/head",
    ]
    assert main(["doctor", "--verify"]) == 0
    assert capsys.readouterr().out.endswith("verify: nothing was downloaded for this run\n")
    noted(
        "Are downloaded weights damaged?",
        "doctor --verify prints hf cache verify …",
        "nothing is loaded",
    )


@pytest.mark.fast
def test_a_printed_error_moves_no_cursor(capsys, noted):
    for text in ("\x1b[2J\x1b]0;title\x07", "\u202e\u2066", "\x9b31m", "a\rb", "\x00"):
        assert main(["train", "--recipe", f"x{text}y"]) == 2
        said = capsys.readouterr().err
        assert said.rstrip("\n").isprintable() and said.count("\n") == 1, ascii(said)
    noted("Escape sequences in a value that an error shows", "shown as \\x1b…", "the terminal")


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:Glyph 13")  # matplotlib draws a line break as a box
def test_tables_and_figures_show_a_prompt_as_it_is(noted):
    "Kept: the table's rows, the figure."
    text = "a|b\n| c | $\\frac$ $x <script>alert(1)</script>\r\n# d"
    table = markdown_table([{"prompt": text, "reward": 0.5}, {"prompt": "cat", "reward": 0.25}])
    assert len(table.splitlines()) == 4 and "<script" not in table
    assert all(line.replace("\\|", "").count("|") == 3 for line in table.splitlines())
    image = np.zeros((3, 4, 4))
    for figure in (
        side_by_side({text: [image]}, [text]),
        draw_tree([[-1], [0]], {1: image[None]}, [[0], [0.5]], title=text),
    ):
        figure.canvas.draw()
        plt.close(figure)
    noted(
        "A prompt with |, line breaks, <script> and a broken $formula$ in a table and in figures",
        "one cell; drawn as text",
    )


def declared():
    "Return the names of the required packages by extra; those of the package itself are under ''."
    wanted = requirements()
    return {
        key: {canonicalize_name(Requirement(text).name) for text in texts}
        for key, texts in wanted.items()
    }


@pytest.mark.fast
def test_dependencies_are_those_that_are_imported(noted):
    """What the package imports is declared; what is declared is imported, or SECURITY.md says who
    else does."""
    pattern, imported = re.compile(r"^\s*(?:import|from) ([a-z]\w*)", re.M | re.I), set()
    for path in (ROOT / "branchgrpo").rglob("*.py"):
        imported |= set(pattern.findall(path.read_text(encoding="utf-8")))
    known = packages_distributions()
    libraries = [
        known[name]
        for name in imported - set(sys.stdlib_module_names) - {"branchgrpo"}
        if name in known
    ]
    tables = declared()
    core, every = tables[""], set().union(*tables.values())
    for names in libraries:
        assert {canonicalize_name(name) for name in names} & every, names
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for name in core - {canonicalize_name(name) for names in libraries for name in names}:
        assert f"`{name}`" in text, name
    noted("The list of dependencies", f"{len(core)} are declared, each is used", "no other import")
