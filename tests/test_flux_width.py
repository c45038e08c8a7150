"""The whole way by the documented commands at FLUX.1-dev's true width: train, evaluate, sample,
draw with diffusers."""

import json
import sys

import numpy as np
import pytest
import torch
from commands import run as run_python
from diffusers import AutoencoderKL, DiffusionPipeline, FluxPipeline, FluxTransformer2DModel
from gpu_models import SMALL_VAE, built
from PIL import Image
from test_backbones import PLAIN
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from branchgrpo import cli
from branchgrpo.backbones.flux import FluxPolicy
from branchgrpo.backbones.names import folder_of
from branchgrpo.evaluation.sampling import drawing_seed
from branchgrpo.noise import Noise
from branchgrpo.training.runs import Run


def wide_flux(folder):
    """Write a FLUX pipeline as wide as the published one (3072; T5 4096), one block of each kind,
    random weights."""
    tiny = DiffusionPipeline.from_pretrained(folder_of("tiny-flux"))
    layers, parts = {"num_layers": 1, "num_single_layers": 1}, {}
    parts["transformer"] = built(
        FluxTransformer2DModel, FluxPolicy.published[1] | layers, "cpu", torch.bfloat16
    )
    parts["vae"] = built(AutoencoderKL, SMALL_VAE, "cpu", torch.bfloat16)
    clip = tiny.text_encoder.config.to_dict() | {"hidden_size": 768, "num_attention_heads": 12}
    t5 = tiny.text_encoder_2.config.to_dict() | {"d_model": 4096, "d_kv": 64, "num_heads": 64}
    torch.manual_seed(0)
    parts["text_encoder"] = CLIPTextModel(CLIPTextConfig(**clip))
    parts["text_encoder_2"] = T5EncoderModel(T5Config(**t5))
    parts |= {name: getattr(tiny, name) for name in ("tokenizer", "tokenizer_2", "scheduler")}
    FluxPipeline(**parts).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


TRAIN = """
--prompts digits --reward tiny-clip --held-out tiny-pickscore --height 64 --width 64
--steps 3 --splits 0,1 --max-batch 4 --lora-rank 32 --lora-alpha 64 --learning-rate 1e-3
--base-dtype bfloat16 --mixed-precision bf16 --gradient-checkpointing --iterations 2
--prompts-per-iteration 1
--evaluate-every 2 --evaluation-prompts 2 --evaluation-steps 3 --tracker none
"""


@pytest.mark.slow
def test_train_evaluate_sample_and_draw_with_diffusers_alone(tmp_path):
    base, run = wide_flux(tmp_path / "files"), tmp_path / "run"
    assert cli.main(["train", "--backbone", base, "--output", str(run), *TRAIN.split()]) == 0
    rows, evaluations = Run(run).metrics, Run(run).evaluations
    assert all(row["rollout_mismatch"] == 0 and row["grad_norm"] > 0 for row in rows)

    score = [
        "evaluate",
        "--backbone",
        str(run),
        "--prompts",
        "digits",
        "--limit",
        "2",
        "--steps",
        "3",
    ]
    assert (
        cli.main(
            [
                *score,
                "--rewards",
                "tiny-clip",
                "tiny-pickscore",
                "--output",
                str(tmp_path / "scores"),
            ]
        )
        == 0
    )
    summary = json.loads((tmp_path / "scores/summary.json").read_text())
    for name, reward in (
        ("eval_reward", "tiny-clip"),
        ("eval_reward/tiny-pickscore", "tiny-pickscore"),
    ):
        assert summary["rewards"][reward]["mean"] == round(evaluations[-1][name], 6), (
            "training and evaluate agree"
        )

    png = tmp_path / "a.png"
    words = [
        "sample",
        "--backbone",
        str(run),
        "--prompt",
        "a red 3",
        "--steps",
        "3",
        "--output",
        str(png),
    ]
    assert cli.main(words) == 0
    # a pixel is written as 4 × 4; the base model's image is above
    pixels = torch.from_numpy(np.array(Image.open(png)))[::4, ::4].permute(2, 0, 1) / 255
    drawn = pixels[:, 64:]

    noise = Noise(drawing_seed(), 0, (0,)).roots(1, (16, 64))[:, 0]
    torch.save({"prompt": ["a red 3"], "latents": noise}, tmp_path / "images.pt")
    written = run / "lora/how_to_draw.md"
    plain = run_python(
        [sys.executable, "-c", PLAIN, written, tmp_path / "images.pt"], cwd=written.parent
    )
    assert plain.returncode == 0, plain.stdout[-3000:]
    theirs = torch.load(tmp_path / "images.pt")[0].float()
    # bfloat16; one has its adapter in float32
    torch.testing.assert_close(drawn, theirs, rtol=0, atol=0.03)
