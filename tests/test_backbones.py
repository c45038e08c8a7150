"""Every family trains through the same trainer, and its results load in plain diffusers."""

import sys
from itertools import product

import pytest
import torch
from commands import run as run_python
from diffusers import DiffusionPipeline
from slow import often

from branchgrpo.backbones.loading import TINY, folder_of
from branchgrpo.planning import process_of
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.resolve import resolve
from branchgrpo.training.trainer import Trainer

OTHERS = [name for name in TINY if name != "tiny-flux"]  # tiny-flux: tests/test_training.py
PROMPTS = {
    "tiny-wan": ["a red 3 moving left", "a blue 5 standing still"],
    "tiny-wan-i2v": ["a red 3 moving left", "a blue 5 standing still"],
}


def config(folder, backbone, **changes):
    clips = {"reward": "motion", "prompts": "clips"} if "wan" in backbone else {"prompts": "digits"}
    base = dict(backbone=backbone, steps=6, splits=(0, 2), prompts_per_iteration=2, iterations=2, guidance_scale=3.0)
    return TrainConfig.from_dict(
        base | clips | {"evaluate_every": 0, "tracker": "none", "output": str(folder)} | changes
    )


WAYS = {"plain": {}, "guidance with gradient": {"guidance_grad": True}, "bf16": {"mixed_precision": "bf16"}}
TRIED = [("tiny-sd", "plain"), ("tiny-wan-i2v", "plain"), ("tiny-sd3", "guidance with gradient"), ("tiny-wan", "bf16")]


@pytest.mark.parametrize("backbone, way", often(product(OTHERS, WAYS), TRIED))
def test_ratio_is_exactly_one_with_guidance_on(tmp_path, backbone, way):
    trainer = Trainer(config(tmp_path / "run", backbone, **{"steps_per_pass": 1} | WAYS[way]))
    rows = [trainer.step() for _ in range(2)]
    assert all(row["rollout_mismatch"] == 0 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


PLAIN = """
import sys, torch
assert not [name for name in sys.modules if name.startswith("branchgrpo")]
from diffusers import DiffusionPipeline
call, places = torch.load(sys.argv[1]), sys.argv[2:]
pipe = DiffusionPipeline.from_pretrained(places[0], dtype=torch.float32)
if len(places) > 1: pipe.load_lora_weights(places[1])
pipe.set_progress_bar_config(disable=True)
out = pipe(output_type="pt", **call)
torch.save(out.frames if hasattr(out, "frames") else out.images, sys.argv[1])
"""


def call_of(trainer, backbone, prompts, latents):
    "What the pipeline of a backbone takes to sample from given latents."
    call = {"prompt": prompts, "height": 32, "width": 32, "num_inference_steps": 4, "guidance_scale": 3.0}
    call["latents"] = latents
    if backbone == "tiny-flux":
        call["max_sequence_length"] = 12
    if "wan" in backbone:
        call |= {"num_frames": 9, "max_sequence_length": 12}
    if backbone == "tiny-wan-i2v":  # its pipeline takes one image per call
        call |= {"prompt": prompts[0], "latents": latents[:1], "image": trainer.prompts.first_frames(prompts[:1])}
    return call


@pytest.mark.parametrize("backbone, lora", often(product(TINY, (0, 4)), [("tiny-flux", 4), ("tiny-wan-i2v", 0)]))
def test_the_result_loads_in_plain_diffusers(tmp_path, backbone, lora):
    "The denoiser's output is the same, and a fresh process with diffusers alone samples the same images."
    rate = 1e-2 if lora else 1e-4
    trainer = Trainer(config(tmp_path / "run", backbone, lora_rank=lora, lora_alpha=16, learning_rate=rate))
    run, policy = trainer.fit(), trainer.policy
    time = process_of(trainer.settings, policy).times[2]
    prompts = PROMPTS.get(backbone, ["a red 3", "two blue 5s"])
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    conditioning = trainer.conditioner(prompts)
    with torch.no_grad():
        ours = policy.predict(x, time, conditioning)
    places = [str(folder_of(backbone)), str(run.path / "lora")] if lora else [str(run.path / "model")]
    pipe = DiffusionPipeline.from_pretrained(places[0], dtype=torch.float32)
    if lora:
        pipe.load_lora_weights(places[1])
    trained, policy.call = policy.pipeline, getattr(pipe, policy.component).eval()
    with torch.no_grad():
        theirs = policy.predict(x, time, conditioning)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * max(1.0, ours.abs().max().item()))
    call = call_of(trainer, backbone, prompts, x)
    torch.save(call, tmp_path / "images.pt")
    plain = run_python([sys.executable, "-c", PLAIN, tmp_path / "images.pt", *places])
    assert plain.returncode == 0, plain.stdout[-3000:]
    trained.set_progress_bar_config(disable=True)
    out = trained(output_type="pt", **call)
    images = out.frames if hasattr(out, "frames") else out.images
    torch.testing.assert_close(images, torch.load(tmp_path / "images.pt"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backbone", OTHERS)
def test_the_doctor_knows_it(backbone):
    from branchgrpo.machine.doctor import report
    from branchgrpo.machine.estimate import estimate

    s = resolve(config("unused", backbone))
    text = report(s)
    assert "MISSING" not in text and "leaves" in text
    assert estimate(s).tflop > 0  # the report leaves it out, since a small model's FLOPs decide nothing
