"""Write geneval.json: what GenEval's own code says about random scenes.

Run `python tests/golden/geneval.py GENEVAL` with a clone of djghosh13/geneval. Its detector, its
files and its colours are replaced by the scene; the rest of `evaluate_image` runs as it is.
"""

import ast
import json
import random
import sys
import types
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
CLASSES = ["dog", "cat", "bench"]
COLOURS = ["red", "blue", "green"]
RELATIONS = ["left of", "right of", "above", "below"]
NEEDED = ("compute_iou", "relative_position", "evaluate", "evaluate_image")


def scene(draw):
    "Return up to six objects [class, box, score, colour]."
    found = []
    for _ in range(draw.randint(0, 6)):
        x, y = draw.randint(0, 300), draw.randint(0, 300)
        box = [x, y, x + draw.randint(5, 120), y + draw.randint(5, 120)]
        score = round(draw.choice((draw.uniform(0.2, 1), draw.uniform(0.85, 1))), 4)
        found.append([draw.choice(CLASSES), box, score, draw.choice(COLOURS)])
    return found


def asked(draw):
    "Return the metadata of a prompt, in one of GenEval's forms."
    a, b = draw.sample(CLASSES, 2)
    tag = draw.choice(
        ["single_object", "two_object", "counting", "colors", "position", "color_attr"]
    )
    first, second = {"class": a, "count": 1}, {"class": b, "count": 1}
    row = {"tag": tag, "include": [first]}
    if tag == "counting":
        first["count"] = draw.randint(2, 3)
        row["exclude"] = [{"class": a, "count": first["count"] + 1}]
    if tag in ("colors", "color_attr"):
        first["color"] = draw.choice(COLOURS)
    if tag in ("two_object", "position", "color_attr"):
        row["include"].append(second)
    if tag == "position":
        second["position"] = [draw.choice(RELATIONS), 0]
    if tag == "color_attr":
        second["color"] = draw.choice(COLOURS)
    return row


def original(source):
    "Return the original's functions, without its models."
    nodes = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name in NEEDED
    ]
    names = types.SimpleNamespace(open=lambda path: path, exif_transpose=lambda image: image)
    space = dict(np=np, json=json, Image=names, ImageOps=names, classnames=CLASSES)
    space |= dict(COLORS=COLOURS, THRESHOLD=0.3, COUNTING_THRESHOLD=0.9, MAX_OBJECTS=16)
    space |= dict(NMS_THRESHOLD=1.0, POSITION_THRESHOLD=0.1, object_detector=None)
    exec(compile(ast.Module(nodes, []), "geneval", "exec"), space)
    return space


def correct(space, found, metadata):
    "Return what the original says about a scene."
    colours = {tuple(box): colour for _, box, _, colour in found}
    boxes = [
        np.array([[*box, score] for name, box, score, _ in found if name == one]).reshape(-1, 5)
        for one in CLASSES
    ]
    space["inference_detector"] = lambda detector, path: boxes
    space["color_classification"] = lambda image, objects, name: [
        colours[tuple(int(x) for x in box[:4])] for box, _ in objects
    ]
    return bool(space["evaluate_image"]("", metadata | {"prompt": ""})["correct"])


if __name__ == "__main__":
    space = original((Path(sys.argv[1]) / "evaluation/evaluate_images.py").read_text())
    draw, cases = random.Random(0), {True: [], False: []}
    while min(map(len, cases.values())) < 200:
        found, metadata = scene(draw), asked(draw)
        right = correct(space, found, metadata)
        if len(cases[right]) < 200:
            cases[right].append({"found": found, "metadata": metadata, "correct": right})
    text = json.dumps({"cases": cases[True] + cases[False]})
    (HERE / "geneval.json").write_text(text + "\n", encoding="utf-8")
