"""What driving a pipeline costs beside a class that was written by hand, the two taking turns.

`python tests/pipeline_speed.py` prints medians, and writes them into tests/golden/pipelines.json
as `beside`."""

import json
import logging
import warnings

import torch
from pipeline_table import RECORD
from test_pipelines import OURS, by_its_class, first_frames

from branchgrpo.backbones.any_pipeline import hold
from branchgrpo.machine.bench import interleaved

ROUNDS = 5
PROMPTS = ["a red 3", "two green 5s", "a red 3", "a red 3"]


@torch.no_grad()
def measured(name: str) -> dict[str, float]:
    "Return the median milliseconds of a call for four rows, by the class and by the pipeline."
    by_hand = by_its_class(name, full=False)
    call = by_hand.drawing(4)
    del call["num_inference_steps"]
    frames = call.pop("num_frames", None)
    driven = hold(by_hand.pipeline, **call, frames=frames)
    if name == "tiny-wan-i2v":
        by_hand.first_frames = driven.first_frames = first_frames
    x = torch.zeros(len(PROMPTS), *by_hand.latent_shape)
    t = by_hand.own_levels(4)[0][1]
    rows = {"class": by_hand.encode(PROMPTS), "driven": driven.encode(PROMPTS)}
    jobs = {
        "class": lambda: by_hand.predict(x, t, rows["class"]),
        "driven": lambda: driven.predict(x, t, rows["driven"]),
        "class decodes": lambda: by_hand.decode(x[:1]),
        "driven decodes": lambda: driven.decode(x[:1]),
    }
    taken = interleaved(jobs, ROUNDS, torch.device("cpu"))
    return {job: round(1e3 * seconds, 1) for job, seconds in taken.items()}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = {}
    for name in OURS:
        found[name] = measured(name)
        print(name, found[name], flush=True)
    record = json.loads(RECORD.read_text())
    RECORD.write_text(json.dumps(record | {"beside": found}, indent=1) + "\n")
