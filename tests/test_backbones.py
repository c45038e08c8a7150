"""Every family trains through the same trainer, and its results load in plain diffusers."""

import json
import re
import shutil
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run as run_python
from peft import LoraConfig
from safetensors.torch import load_file
from slow import often

from branchgrpo.backbones.names import FAMILIES, TINY, folder_of
from branchgrpo.backbones.pipeline import published_pipeline
from branchgrpo.evaluation.policies import load_policy
from branchgrpo.evaluation.sampling import sample_block
from branchgrpo.noise import Noise
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.export import comfyui_note, write_lora
from branchgrpo.training.resolve import resolve
from branchgrpo.training.trainer import Trainer

OTHERS = [name for name in TINY if name != "tiny-flux"]  # tiny-flux: tests/test_training.py
PROMPTS = {
    "tiny-wan": ["a red 3 moving left", "a blue 5 standing still"],
    "tiny-wan-i2v": ["a red 3 moving left", "a blue 5 standing still"],
}


def config(folder, backbone, **changes):
    clips = {"reward": "motion", "prompts": "clips"} if "wan" in backbone else {"prompts": "digits"}
    base = dict(
        backbone=backbone,
        steps=6,
        splits=(0, 2),
        prompts_per_iteration=2,
        iterations=2,
        guidance_scale=3.0,
    )
    return TrainConfig.from_dict(
        base | clips | {"evaluate_every": 0, "tracker": "none", "output": str(folder)} | changes
    )


WAYS = {
    "plain": {},
    "guidance with gradient": {"guidance_grad": True},
    "bf16": {"mixed_precision": "bf16"},
}
FLUX = [("tiny-flux", "plain"), ("tiny-flux", "bf16")]
TRIED = [
    ("tiny-sd", "plain"),
    ("tiny-wan-i2v", "plain"),
    ("tiny-sd3", "guidance with gradient"),
    ("tiny-wan", "bf16"),
]
TRIED += FLUX


@pytest.mark.parametrize("backbone, way", often([*FLUX, *product(OTHERS, WAYS)], TRIED))
def test_ratio_is_exactly_one_with_guidance_on(tmp_path, backbone, way):
    trainer = Trainer(config(tmp_path / "run", backbone, **{"steps_per_pass": 1} | WAYS[way]))
    rows = [trainer.step() for _ in range(2)]
    assert all(row["rollout_mismatch"] == 0 for row in rows)
    assert all(row["ratio"] == 1 and row["clip_fraction"] == 0 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


PLAIN = """
import sys, torch
assert not [name for name in sys.modules if name.startswith("branchgrpo")]
code = open(sys.argv[1]).read().split("```")[1].removeprefix("python")
given = torch.load(sys.argv[2])
*lines, last = code.strip().splitlines()
assert last.split(" = ")[1].startswith("pipe('a cat',")
exec("\\n".join(lines))
pipe.set_progress_bar_config(disable=True)
out = pipe(output_type="pt", **draw, **given)
torch.save(out.frames if hasattr(out, "frames") else out.images, sys.argv[2])
"""
# FLUX.1-dev's own: the shift follows the image's size
SIZED = {"use_dynamic_shifting": True, "shift": 1.0}
PNDM = {"_class_name": "PNDMScheduler", "skip_prk_steps": True}  # Stable Diffusion's
UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}
UNIPC |= {"flow_shift": 3.0}  # Wan's
FILES = {
    "tiny-flux": SIZED,
    "tiny-sd": PNDM,
    "tiny-sd3": {},
    "tiny-wan": UNIPC,
    "tiny-wan-i2v": UNIPC,
}
SHIFTS = (5.0, "scheduler")
TRIED_RESULTS = [
    ("tiny-flux", 5.0, 4),
    ("tiny-sd", 5.0, 0),
    ("tiny-sd3", "scheduler", 0),
    ("tiny-wan-i2v", 5.0, 0),
]


def published_like(backbone, folder):
    "A tiny model's folder with a scheduler of the class and fields that the published model has."
    shutil.copytree(folder_of(backbone), folder)
    for file, changes in (
        ("scheduler/scheduler_config.json", FILES[backbone]),
        ("model_index.json", {}),
    ):
        table = json.loads((folder / file).read_text()) | changes
        if "scheduler" in table and "_class_name" in FILES[backbone]:
            table["scheduler"] = ["diffusers", FILES[backbone]["_class_name"]]
        (folder / file).write_text(json.dumps(table))
    return folder


@pytest.mark.parametrize(
    "backbone, shift, lora", often(product(TINY, SHIFTS, (0, 4)), TRIED_RESULTS)
)
def test_plain_diffusers_draws_the_result_as_written_beside_it(tmp_path, backbone, shift, lora):
    """A fresh process with diffusers alone, by the lines in how_to_draw.md, draws what the run's
    evaluations draw."""
    rate, place = (1e-2 if lora else 1e-4), published_like(backbone, tmp_path / "files")
    changes = {
        "lora_rank": lora,
        "lora_alpha": 16,
        "learning_rate": rate,
        "height": 32,
        "width": 32,
        "shift": shift,
    }
    changes |= {"evaluation_steps": 4} | ({"frames": 9} if "wan" in backbone else {})
    trainer = Trainer(replace(config(tmp_path / "run", backbone, **changes), backbone=str(place)))
    run = trainer.fit()
    prompts = PROMPTS.get(backbone, ["a red 3", "two blue 5s"])[
        : 1 if backbone == "tiny-wan-i2v" else 2
    ]
    policy = load_policy(str(run.path))
    policy.first_frames = trainer.prompts.first_frames
    ours = sample_block(policy, prompts, list(range(len(prompts))), 4, 0)
    given = {
        "prompt": prompts,
        "latents": Noise(0, 0, tuple(range(len(prompts)))).roots(1, policy.latent_shape)[:, 0],
    }
    if backbone == "tiny-wan-i2v":  # its pipeline takes one image per call
        given |= {"prompt": prompts[0], "image": trainer.prompts.first_frames(prompts)}
    torch.save(given, tmp_path / "images.pt")
    written = run.path / ("lora" if lora else "model") / "how_to_draw.md"
    plain = run_python(
        [sys.executable, "-c", PLAIN, written, tmp_path / "images.pt"], cwd=written.parent
    )
    assert plain.returncode == 0, plain.stdout[-3000:]
    theirs = torch.load(tmp_path / "images.pt")
    torch.testing.assert_close(
        ours, theirs.transpose(1, 2) if ours.ndim == 5 else theirs, rtol=0, atol=1e-4
    )


@pytest.mark.filterwarnings("ignore:rollout_mismatch")  # of bfloat16, with some numbers of threads
@pytest.mark.parametrize("given", [None, "float32"])
def test_the_autoencoder_may_keep_its_precision_under_a_base_in_bfloat16(tmp_path, given):
    """Its weights are those of the files, not rounded; what draws the run decodes so too; without
    it the base rules."""
    half = {"lora_rank": 4, "base_dtype": "bfloat16", "vae_dtype": given, "iterations": 1}
    trainer = Trainer(config(tmp_path / "run", "tiny-sd3", **half))
    run, dtype = trainer.fit(), getattr(torch, given or "bfloat16")
    files = load_file(f"{folder_of('tiny-sd3')}/vae/diffusion_pytorch_model.safetensors")
    for policy in (trainer.policy, load_policy(str(run.path))):
        assert policy.dtype == torch.bfloat16
        for name, value in policy.pipeline.vae.state_dict().items():
            assert value.dtype == dtype and torch.equal(value, files[name].to(dtype))
    told = "The run decoded in float32" in (run.path / "lora/how_to_draw.md").read_text()
    assert told == (given is not None)


@pytest.mark.parametrize("backbone", OTHERS)
def test_the_doctor_knows_it(backbone):
    from branchgrpo.machine.doctor import Report, report_text
    from branchgrpo.machine.estimate import estimate

    s = resolve(config("unused", backbone))
    text = report_text(Report(s))
    assert "MISSING" not in text and "leaves" in text
    # the report leaves it out, since a small model's FLOPs decide nothing
    assert estimate(s).tflop > 0


COMFYUI = json.loads((Path(__file__).parent / "golden/comfyui.json").read_text())


@pytest.mark.parametrize("pipeline", COMFYUI["layers"])
def test_comfyui_knows_the_name_of_every_adapted_layer(pipeline):
    known = set(COMFYUI["layers"][pipeline])
    family = FAMILIES.get(pipeline)
    denoiser = getattr(published_pipeline(family), family.component)
    ends = tuple(f".{target}" for target in family.lora_targets)
    layers = [name for name, _ in denoiser.named_modules() if name.endswith(ends)]
    names = [family.comfyui_name(layer) for layer in layers]
    assert layers and len(set(names)) == len(names)
    for name in names:
        assert name in known or re.sub(r"(?<=blocks\.)\d+(?=\.)", "N", name) in known, name


@pytest.mark.parametrize("backbone", ["tiny-sd", "tiny-wan", "tiny-sd3"])
def test_an_adapter_for_comfyui_draws_as_the_one_for_diffusers(tmp_path, backbone):
    scaled = load_policy(backbone, guidance_scale=3.0)
    targets = list(scaled.lora_targets)
    wide = LoraConfig(r=4, lora_alpha=10, target_modules=targets, init_lora_weights=False)
    scaled.denoiser.add_adapter(wide)
    write_lora(scaled, tmp_path, scaled.denoiser.state_dict())
    file = tmp_path / "comfyui.safetensors"
    assert file.exists() == (backbone != "tiny-sd3")
    assert (f"`{file.name}`" in comfyui_note(scaled)) == file.exists()
    if not file.exists():
        return
    ends = tuple(end for pair in COMFYUI["factors"] for end in pair)
    assert all(key.endswith(ends) for key in load_file(file))
    plain = load_policy(backbone, guidance_scale=3.0)
    plain.pipeline.load_lora_weights(tmp_path, weight_name=file.name)
    prompt = ["a red 3" if backbone == "tiny-sd" else "a 3 moves up"]
    drawn = [sample_block(policy, prompt, [0], 2, 0) for policy in (scaled, plain)]
    torch.testing.assert_close(drawn[1], drawn[0], atol=1e-5, rtol=0)
    untouched = sample_block(load_policy(backbone, guidance_scale=3.0), prompt, [0], 2, 0)
    assert (drawn[0] - untouched).abs().max() > 1e-3


def test_a_pipeline_without_a_family_says_that_comfyui_was_not_looked_up():
    assert "was not looked up" in comfyui_note(SimpleNamespace(component="transformer"))
