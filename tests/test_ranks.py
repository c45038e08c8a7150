"""Several processes share an evaluation, an error, and the tree of one prompt."""

import json

import pytest
import torch
from test_training import SMALL, together

EVALUATION = """
import sys, json, torch
from branchgrpo import TrainConfig, Trainer
from branchgrpo.training.callbacks import Callback
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
rows = []
predict = t.policy.predict
def counted(latents, time, conditioning):
    rows.append(len(latents))
    return predict(latents, time, conditioning)
t.policy.predict = counted
scores, images = t.evaluator(t.policy)
out = {"scores": scores, "images": images, "rows": rows}
torch.save(out, f"{sys.argv[2]}.{t.accelerator.process_index}")
"""


def results(n, code, table, place):
    "What each of `n` processes saved."
    for status, log in together(n, code, json.dumps(table), place):
        assert status == 0, log
    return [torch.load(f"{place}.{rank}", weights_only=False) for rank in range(n)]


@pytest.mark.parametrize(("count", "processes"), [(3, (4,)), (37, (2, 4))])
def test_an_evaluation_shared_by_processes_gives_the_scores_of_one(tmp_path, count, processes):
    "To the bit, with fewer prompts than processes too; every process makes the same calls."
    table = SMALL | {"output": str(tmp_path / "run"), "splits": [0, 2], "evaluation_prompts": count, "max_batch": 4}
    table |= {"prompts_per_iteration": 4, "reward": "0.7*tiny-clip+0.3*tiny-pickscore", "held_out": "tiny-aesthetic"}
    one = results(1, EVALUATION, table, tmp_path / "out1")[0]
    assert len(one["images"]) == min(count, 32) and "eval_check_all" in one["scores"], one["scores"]
    for n in processes:
        several = results(n, EVALUATION, table, tmp_path / f"out{n}")
        assert all(own["scores"] == one["scores"] for own in several)
        assert torch.equal(several[0]["images"], one["images"])
        assert all(len(own["images"]) == 0 for own in several[1:])
        assert all(own["rows"] == several[0]["rows"] for own in several)
        assert len(several[0]["rows"]) < len(one["rows"]) or count < 8
