"""The tables of bad input, and the files that they name."""

import json
import shutil
from pathlib import Path

import branchgrpo
from branchgrpo.files import parse_table

SMALL = """steps: 6
splits: [0, 2]
prompts_per_iteration: 2
evaluate_every: 0
tracker: none
iterations: 1
"""
BAD = parse_table(Path(__file__).with_name("bad_inputs.yaml").read_text(encoding="utf-8"))

TRAIN = "train --config {f}/small.yaml "
RUNS = {  # what looks odd and is fine: what is typed, and a part of what is printed
    "a prompt file that begins with a BOM": (TRAIN + "--prompts {f}/p_bom.txt", "in 1 iterations"),
    "a prompt file with CRLF": (TRAIN + "--prompts {f}/p_crlf.txt", "in 1 iterations"),
    "a prompt of 10,000 characters": (TRAIN + "--prompts {f}/p_long.txt", "in 1 iterations"),
    "prompts that occur twice": (TRAIN + "--prompts {f}/p_twice.txt", "in 1 iterations"),
    "the same prompts to train and to test on": (TRAIN + "--prompts {f}/p_same", "in 1 iterations"),
    "prompts of other scripts and emoji": (TRAIN + "--prompts {f}/p_emoji.txt", "in 1 iterations"),
    "a flag that occurs twice: the last one counts": ("train --seed 1 --seed 2 --print-config", "seed: 2"),
    "--config twice: the last file counts": (
        "train --config {f}/small.yaml --config {f}/anchor.yaml --print-config",
        "iterations: 3",
    ),
    "a flag before --config=FILE overrides it": ("train --seed 9 --config={f}/anchor.yaml --print-config", "seed: 9"),
    "a YAML file with an anchor": ("train --config {f}/anchor.yaml --print-config", "seed: 3"),
    "a YAML file with 1e-4": ("train --config {f}/exp.yaml --print-config", "learning_rate: 0.0001"),
    "mixed_precision: no, without quotes": ("train --config {f}/no.yaml --print-config", "mixed_precision: no"),
    "a setting that is null: the recipe's value": ("train --config {f}/null.yaml --print-config", "iterations: 50"),
    "a very small number": ("train --kl 1e-300 --print-config", "kl: 1e-300"),
    "a recipe of your own": ("train --recipe {f}/r_good.yaml --print-config", "recipe: r_good"),
    "a negative weight": ("train --reward -1*tiny-clip --print-config", "reward: -1*tiny-clip"),
    "a negative number after a flag": ("train --beta -0.5 --print-config", "beta: -0.5"),
    "nothing for no pruning": ("train --prune-at '' --print-config", "prune_at: {}"),
}
EVALUATE = "evaluate --output e --limit 1 "
ENVIRONMENT = {  # variables, what is typed, and how the one line begins; None: it runs
    "WORLD_SIZE=two": ({"WORLD_SIZE": "two"}, EVALUATE, "WORLD_SIZE: 'two' is not a whole number"),
    "WORLD_SIZE=0": ({"WORLD_SIZE": "0"}, EVALUATE, "WORLD_SIZE: 0 is not a whole number from 1"),
    "RANK=-1": ({"RANK": "-1"}, EVALUATE, "RANK: -1 is not a whole number from 0"),
    "RANK above WORLD_SIZE": ({"RANK": "3", "WORLD_SIZE": "2"}, EVALUATE, "RANK: 3 is not a whole number from 0 to 1"),
    "LOCAL_RANK=1.5": ({"LOCAL_RANK": "1.5"}, EVALUATE, "LOCAL_RANK: '1.5' is not a whole number"),
    "train with WORLD_SIZE=two": ({"WORLD_SIZE": "two"}, TRAIN, "WORLD_SIZE: 'two' is not a whole number"),
    "train with RANK=x": ({"RANK": "x"}, TRAIN, "RANK: 'x' is not a whole number"),
    "ACCELERATE_USE_FSDP=true": ({"ACCELERATE_USE_FSDP": "true"}, TRAIN, "launch: accelerate's FSDP is not supported"),
    "ACCELERATE_USE_DEEPSPEED=1": (
        {"ACCELERATE_USE_DEEPSPEED": "1"},
        TRAIN,
        "launch: accelerate's DEEPSPEED is not supported",
    ),
    "BRANCHGRPO_DATA that is not there": (
        {"BRANCHGRPO_DATA": "/nowhere"},
        TRAIN + "--prompts hpdv2",
        "prompts: 'hpdv2' is not under '/nowhere'",
    ),
    "MPLBACKEND of no kind": ({"MPLBACKEND": "nonsense"}, "recipes", None),
    "TERM=dumb": ({"TERM": "dumb"}, "train --print-config", None),
    "NO_COLOR": ({"NO_COLOR": "1"}, "train --help", None),
    "OMP_NUM_THREADS=abc": ({"OMP_NUM_THREADS": "abc"}, "train --print-config", None),
    "CUDA_VISIBLE_DEVICES=nonsense": ({"CUDA_VISIBLE_DEVICES": "nonsense"}, "train --print-config", None),
    "PYTHONIOENCODING=ascii": ({"PYTHONIOENCODING": "ascii"}, "recipes branchgrpo", None),
    "LC_ALL=C and prompts of other scripts": ({"LC_ALL": "C"}, "doctor --prompts {f}/p_emoji.txt", None),
    "HOME that cannot be written": ({"HOME": "/proc", "HF_HOME": "/proc/hf"}, "train --print-config", None),
}


OWN = """def ones(images, prompts):
    return [1.0] * len(images)


number = 3


def short(images, prompts):
    return [1.0]


def text(images, prompts):
    return ['a'] * len(images)


def none(images, prompts):
    return None


def square(images, prompts):
    import torch
    return torch.ones(len(images), 2)


def raises(images, prompts):
    raise RuntimeError('no score today')


def quits(images, prompts):
    raise SystemExit(3)


def nan(images, prompts):
    return [float('nan')] * len(images)


def one(images):
    return [1.0] * len(images)


def four(images, prompts, metadata, more):
    return [1.0] * len(images)


def zero():
    return []


def complexes(images, prompts):
    return [1j] * len(images)


def bools(images, prompts):
    return [True] * len(images)


class Needs:
    def __init__(self, a, b):
        pass


class Not:
    pass


class Fails:
    def __init__(self):
        raise RuntimeError('no weights')
    def __call__(self, images, prompts):
        return [1.0] * len(images)


def huge(images, prompts):
    return [10.0**300] * len(images)
"""


def make_files(f):
    "Make every file and folder that the table names."
    f = Path(f)
    f.mkdir(parents=True, exist_ok=True)

    def put(name, content=""):
        p = f / name
        p.parent.mkdir(parents=True, exist_ok=True)
        p.write_bytes(content) if isinstance(content, bytes) else p.write_text(content, encoding="utf-8")
        return p

    tiny = Path(branchgrpo.__file__).parent / "testbed/weights/tiny-flux"
    put("small.yaml", SMALL)
    put("no.yaml", "mixed_precision: no\n")
    # YAML
    put("unknown.yaml", "iteration: 3\n")
    put("type.yaml", "iterations: many\n")
    put("list.yaml", "- 1\n- 2\n")
    put("empty.yaml", "")
    put("tabs.yaml", "iterations:\t3\n\tseed: 1\n")
    put("tag.yaml", "seed: !!python/object/apply:os.system ['touch owned']\n")
    put("twice.yaml", "seed: 1\nseed: 2\n")
    put("deep.yaml", "seed: " + "[" * 3000 + "]" * 3000 + "\n")
    put("binary.yaml", bytes(range(256)) * 4)
    put("utf16.yaml", "seed: 1\n".encode("utf-16"))
    put("scalar.yaml", "3\n")
    put("nested.yaml", "seed: {a: 1}\n")
    put("null.yaml", "iterations: null\n")
    put("bool.yaml", "iterations: true\n")
    put("float.yaml", "iterations: 2.5\n")
    put("steps.yaml", "splits: [0, x]\n")
    put("stepsfloat.yaml", "splits: [0, 1.5]\n")
    put("prune.yaml", "prune_at: {a: 3}\n")
    put("prunelist.yaml", "prune_at: [1, 2]\n")
    put("yes.yaml", "compile: maybe\n")
    put("date.yaml", "seed: 2020-01-01\n")
    put("number.yaml", "3: 4\n")
    put("nan.yaml", "eta: .nan\n")
    put("inf.yaml", "learning_rate: .inf\n")
    put("exp.yaml", "learning_rate: 1e-4\n")
    put("textnum.yaml", "iterations: '3'\n")
    put("sexagesimal.yaml", "seed: 1:30\n")
    put("octal.yaml", "seed: 010\n")
    put("merge.yaml", "a: &a {seed: 1}\n<<: *a\n")
    put(
        "bomb.yaml",
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(7)),
    )
    put("anchor.yaml", "seed: &n 3\niterations: *n\n")
    put("badanchor.yaml", "seed: *n\n")
    put("two.yaml", "seed: 1\n---\nseed: 2\n")
    put("config_in.yaml", "config: small.yaml\n")
    put("print.yaml", "print_config: true\n")
    (f / "folder.yaml").mkdir(exist_ok=True)
    # recipes
    put("r_unknown.yaml", "base: branchgrpo\nvalues: {stepz: 4}\n")
    put("r_base.yaml", "base: branchgrop\n")
    put("r_key.yaml", "bases: x\n")
    put("r_list.yaml", "[1]\n")
    put("r_type.yaml", "values: {steps: many}\n")
    put("r_values.yaml", "values: [1]\n")
    put("r_values2.yaml", "values: 3\n")
    put("r_baselist.yaml", "base: [a]\n")
    put("r_self.yaml", "base: r_self.yaml\n")
    put("r_name.yaml", "name: 3\n")
    put("r_name2.yaml", "name: ../../x\n")
    put("r_empty.yaml", "")
    put("r_number.yaml", "values: {eta: much}\n")
    put("r_range.yaml", "values: {steps: 0}\n")
    put("r_bool.yaml", "values: {steps: true}\n")
    put("r_binary.yaml", bytes(range(256)))
    put("r_null.yaml", "values: {steps: null}\n")
    put("r_twice.yaml", "values: {steps: 3, steps: 4}\n")
    put("r_summary.yaml", "summary: [1]\n")
    put("r_source.yaml", "values: {steps: {value: 4, sauce: x}}\n")
    put("r_source2.yaml", "values: {steps: {value: 4, source: 3}}\n")
    put("r_seed.yaml", "values: {seed: 4}\n")
    put("r_iter.yaml", "values: {iterations: 4}\n")
    put("r_good.yaml", "base: branchgrpo\nvalues: {steps: 6, splits: [0, 2]}\n")
    put("r_tag.yaml", "values: !!python/object/apply:os.system ['touch owned']\n")
    # prompts
    put("p_empty.txt")
    put("p_blank.txt", "\n  \n\t\n")
    put("p_binary.txt", bytes(range(256)))
    put("p_utf16.txt", "a cat\n".encode("utf-16"))
    put("p_latin.txt", "caf\xe9\n".encode("latin-1"))
    put("p_bom.txt", "\ufeff3 on 5\n")
    put("p_crlf.txt", "3 on 5\r\n4 on 5\r\n")
    put("p_nul.txt", "a\0b\n")
    put("p_long.txt", "word " * 2000 + "\n")
    put("p_twice.txt", "3 on 5\n3 on 5\n")
    put("p_emoji.txt", "🐱🐶\nпривет\n你好\nعربى\n")
    put("p_bad.jsonl", '{"prompt": "a"}\n{"prompt": \n')
    put("p_type.jsonl", '{"prompt": 3}\n')
    put("p_field.jsonl", '{"promt": "a"}\n')
    put("p_list.jsonl", '["a"]\n')
    put("p_null.jsonl", "null\n")
    put("p_number.jsonl", "3\n")
    put("p_empty.jsonl")
    put("p_blank.jsonl", '{"prompt": "  "}\n')
    put("p_emptytext.jsonl", '{"prompt": ""}\n')
    put("p_frame.jsonl", '{"prompt": "a digit 3 moves left", "image": "none.png"}\n')
    put("p_frametype.jsonl", '{"prompt": "a digit 3 moves left", "image": 3}\n')
    put("p_framebad.jsonl", '{"prompt": "a digit 3 moves left", "image": "p_bom.txt"}\n')
    put("p_frameout.jsonl", '{"prompt": "a", "image": "/etc/passwd"}\n')
    put("p_nan.jsonl", '{"prompt": "a", "x": NaN}\n')
    put("p_deep.jsonl", '{"prompt": "a", "x": ' + "[" * 100000 + "]" * 100000 + "}\n")
    put("p_surrogate.jsonl", '{"prompt": "\\ud800"}\n')
    put("p_big.jsonl", '{"prompt": "a", "x": ' + "9" * 5000 + "}\n")
    put("p_utf16.jsonl", '{"prompt": "a"}\n'.encode("utf-16"))
    put("p.csv", "prompt\na cat\n")
    put("p.parquet", b"PAR1xxxxPAR1")
    put("p.json", '["a cat"]')
    put("p.md", "a cat\n")
    put("p_many.jsonl", '{"prompt": "a", "metadata": 1}\n')
    (f / "p_folder").mkdir(exist_ok=True)
    put("p_other/readme.bin", b"\0\1")
    put("p_train/train.txt", "")
    put("p_test/train.txt", "3 on 5\n")
    put("p_test/test.txt", "")
    put("p_same/train.txt", "3 on 5\n")
    put("p_same/test.txt", "3 on 5\n")
    (f / "p_dir.txt").mkdir(exist_ok=True)
    # rewards
    put(
        "own.py",
        OWN,
    )
    put("syntax.py", "def f(:\n")
    put("imports.py", "import nothing_like_this\n")
    put("raises.py", "raise RuntimeError('at import')\n")
    put("exits.py", "raise SystemExit(3)\n")
    put("binary.py", bytes(range(256)))
    put("own.txt", "x\n")
    (f / "dir.py").mkdir(exist_ok=True)
    put("interrupt.py", "raise KeyboardInterrupt\n")
    # backbones
    (f / "b_empty").mkdir(exist_ok=True)
    put("b_broken/model_index.json", "{")
    put("b_class/model_index.json", '{"_class_name": "NoPipeline"}')
    put("b_other/model_index.json", '{"_class_name": "DDPMPipeline"}')
    put("b_none/model_index.json", "{}")
    put("b_list/model_index.json", "[]")
    put("b_binary/model_index.json", bytes(range(256)))
    put("b_file", "x")

    def copy(name, change):
        target = f / name
        if not target.exists():
            shutil.copytree(tiny, target)
            change(target)

    copy("b_weights", lambda t: [p.unlink() for p in (t / "transformer").glob("*.safetensors")])

    def cut(t):
        for p in (t / "transformer").glob("*.safetensors"):
            data = p.read_bytes()
            p.write_bytes(data[: len(data) // 2])

    copy("b_cut", cut)
    copy("b_part", lambda t: shutil.rmtree(t / "vae"))

    def zero(t):
        for p in (t / "transformer").glob("*.safetensors"):
            p.write_bytes(b"")

    copy("b_zero", zero)

    def conf(t):
        p = t / "transformer/config.json"
        c = json.loads(p.read_text())
        c["num_attention_heads"] = 3
        p.write_text(json.dumps(c))

    copy("b_shape", conf)

    def conf2(t):
        (t / "transformer/config.json").write_text("{")

    copy("b_config", conf2)

    def conf3(t):
        (t / "scheduler/scheduler_config.json").write_text("{") if (
            t / "scheduler/scheduler_config.json"
        ).exists() else None

    copy("b_sched", conf3)

    def unkn(t):
        p = t / "model_index.json"
        c = json.loads(p.read_text())
        c["vae"] = ["diffusers", "NoSuchVAE"]
        p.write_text(json.dumps(c))

    copy("b_vaeclass", unkn)

    def html(t):
        for p in (t / "vae").glob("*.safetensors"):
            p.write_text("<html>404</html>")

    copy("b_html", html)
    # outputs
    put("o_file", "x")
    put("o_other/thing.txt", "x")
    put("o_run/run.json", json.dumps({"settings": {"recipe": "x"}, "state": "started"}))
    put("o_run/metrics.jsonl", json.dumps({"iteration": 1}) + "\n")
    put("o_badrun/run.json", "{")
    put("o_listrun/run.json", "[]")
    put("o_eval/evaluation.json", "{")
    put("o_evalother/evaluation.json", '{"seed": 9}')
    put("o_evallist/evaluation.json", "[]")
    put("o_nostate/run.json", '{"settings": {}}')
    # checks
    put("images.jsonl", '{"image": "a.png", "prompt": "x"}\n')
    put("images_empty.jsonl", "")
    put("images_type.jsonl", "3\n")
    put("images_none.jsonl", '{"prompt": "x"}\n')
    # pages
    put("pages/scales.yaml", "broken: [\n")
    put("pages/a.ipynb", "{")
    put("pages2/scales.yaml", "[]\n")
    put("pages2/a.ipynb", "{")
    put("pages3/a.ipynb", "{}")
    (f / "pages4").mkdir(exist_ok=True)
    put("pages5/a.txt")
    put("bench.yaml", "iteration: 3\n")
    put("data/hpdv2.txt", "")
