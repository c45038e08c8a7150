"""Two processes of one machine: one encodes the prompts."""

import json

import pytest
import torch
from test_training import SMALL, together

TRAINS = """
import os, sys, json, torch
from branchgrpo import TrainConfig, Trainer
from branchgrpo.training.conditioning import text_parts
t = Trainer(TrainConfig.from_dict(json.loads(sys.argv[1])))
run = t.fit()
rewards = [row["reward"] for row in run.metrics]
table = {"encoders": len(text_parts(t.policy.pipeline)), "rewards": rewards}
store = t.conditioner.store
print(json.dumps(table | {"made": store.made if store else 0}), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_one_process_encodes_for_both(tmp_path):
    "The rewards are those of a run that keeps its encoders."
    found = {}
    for name, changes in (("memory", {}), ("folder", {"embeddings": str(tmp_path / "embeddings")})):
        table = json.dumps(
            SMALL | {"output": str(tmp_path / name), "splits": [0, 2], "iterations": 2} | changes
        )
        done = together(2, TRAINS, table, tmp_path / f"log-{name}")
        for code, log in done:
            assert code == 0, log
        found[name] = [json.loads(log.strip().splitlines()[-1]) for _, log in done]
    assert [process["encoders"] for process in found["folder"]] == [3, 0]  # those of tiny-sd3
    assert found["folder"][0]["made"] > 0 and found["folder"][1]["made"] == 0
    torch.testing.assert_close(
        found["folder"][0]["rewards"], found["memory"][0]["rewards"], rtol=0, atol=1e-4
    )


WAITS = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from types import SimpleNamespace
from branchgrpo.training.conditioning import EmbeddingCache, encode_ahead
dist.init_process_group("gloo")
dist.barrier()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
def encode(prompts):
    time.sleep(1)
    return {"embeds": torch.zeros(len(prompts), 2), "negative_embeds": torch.ones(len(prompts), 2)}
store = EmbeddingCache(sys.argv[1], "slow", encode, batch=1)
pipeline = SimpleNamespace(components={})
policy = SimpleNamespace(pipeline=pipeline)
encode_ahead(SimpleNamespace(store=store, policy=policy, device="cpu"), list("abcde"))
print(store.made, [len(rows) for rows in store.get(list("abcde")).values()], flush=True)
os._exit(0)
"""


def test_nobody_waits_for_all_prompts_of_a_long_preparation(tmp_path):
    "Five seconds of encoding, and a process that waits for three seconds gives up."
    done = together(2, WAITS, str(tmp_path / "embeddings"), tmp_path / "log")
    assert [code for code, _ in done] == [0, 0], done
    assert [log.strip().splitlines()[-1] for _, log in done] == ["5 [5, 5]", "0 [5, 5]"]
