"""The tables of bad input (bad_inputs.yaml), and the files that they name."""

import json
import shutil
from pathlib import Path

import branchgrpo
from branchgrpo.backbones.names import folder_of
from branchgrpo.yaml_files import parse_table

TABLES = parse_table(Path(__file__).with_name("bad_inputs.yaml").read_text(encoding="utf-8"))
BAD, RUNS, ENVIRONMENT = TABLES["bad"], TABLES["runs"], TABLES["environment"]
EVERY_BYTE = bytes(range(256))
BYTES = {  # files that are no short text
    "deep.yaml": b"seed: " + b"[" * 3000 + b"]" * 3000 + b"\n",
    "binary.yaml": EVERY_BYTE * 4,
    "utf16.yaml": "seed: 1\n".encode("utf-16"),
    "r_binary.yaml": EVERY_BYTE,
    "p_binary.txt": EVERY_BYTE,
    "p_utf16.txt": "a cat\n".encode("utf-16"),
    "p_latin.txt": "caf\xe9\n".encode("latin-1"),
    "p_long.txt": b"word " * 2000 + b"\n",
    "p_deep.jsonl": b'{"prompt": "a", "x": ' + b"[" * 100000 + b"]" * 100000 + b"}\n",
    "p_big.jsonl": b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}\n",
    "p_utf16.jsonl": '{"prompt": "a"}\n'.encode("utf-16"),
    "p.parquet": b"PAR1xxxxPAR1",
    "p_other/readme.bin": b"\0\1",
    "binary.py": EVERY_BYTE,
    "b_binary/model_index.json": EVERY_BYTE,
}
FOLDERS = ("folder.yaml", "p_folder", "p_dir.txt", "dir.py", "b_empty", "pages4")


def weights(part):
    return next(part.glob("*.safetensors"))


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


MODELS = {  # copies of tiny-flux, and what is broken in them
    "b_weights": lambda model: weights(model / "transformer").unlink(),
    "b_cut": lambda model: halve(weights(model / "transformer")),
    "b_part": lambda model: shutil.rmtree(model / "vae"),
    "b_zero": lambda model: weights(model / "transformer").write_bytes(b""),
    "b_shape": lambda model: change(model / "transformer/config.json", num_attention_heads=3),
    "b_config": lambda model: (model / "transformer/config.json").write_text("{"),
    "b_sched": lambda model: (model / "scheduler/scheduler_config.json").write_text("{"),
    "b_vaeclass": lambda model: change(model / "model_index.json", vae=["diffusers", "NoSuchVAE"]),
    "b_html": lambda model: weights(model / "vae").write_text("<html>404</html>"),
}


def make_files(folder):
    "Make every file and folder that the tables name."
    texts = {name: text.encode() for name, text in TABLES["files"].items()}
    for name, content in (texts | BYTES).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name in FOLDERS:
        (folder / name).mkdir()
    for name, damage in MODELS.items():
        shutil.copytree(
            Path(branchgrpo.__file__).parent / "testbed/weights/tiny-flux", folder / name
        )
        damage(folder / name)
    # as a model of one's own: nothing says at which size it was trained
    for name in ("wan", "sd3"):
        shutil.copytree(folder_of(f"tiny-{name}"), folder / f"b_{name}")
