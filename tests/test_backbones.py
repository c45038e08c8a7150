"""Every family trains through the same trainer, and its results load in plain diffusers."""
import pytest
import torch
from diffusers import (AutoencoderKL, DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline,
                       StableDiffusionPipeline, UNet2DConditionModel)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from branchgrpo.backbones.base import resolve
from branchgrpo.testbed.world import TEXT_LENGTH, clip_tokenizer, t5_tokenizer
from branchgrpo.trainer import TrainConfig, Trainer

SIBLINGS = ["random-sd3", "random-sd"]


def random_sd(folder):
    "A StableDiffusionPipeline of the real classes with random weights: for plumbing, not for learning."
    torch.manual_seed(0)
    tok = clip_tokenizer()
    text = CLIPTextModel(CLIPTextConfig(vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=TEXT_LENGTH,
                                        bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id))
    unet = UNet2DConditionModel(sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=32, attention_head_dim=2,
                                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))
    vae = AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, block_out_channels=(8, 8, 16), latent_channels=4, norm_num_groups=4, sample_size=32)
    ddim = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    StableDiffusionPipeline(vae, text, tok, unet, ddim, None, None, requires_safety_checker=False).save_pretrained(folder)


def random_sd3(folder):
    "A StableDiffusion3Pipeline of the real classes with random weights: for plumbing, not for learning."
    torch.manual_seed(0)
    clip_tok, t5_tok = clip_tokenizer(), t5_tokenizer()
    clip = CLIPTextConfig(vocab_size=len(clip_tok), hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=TEXT_LENGTH, projection_dim=16,
                          bos_token_id=clip_tok.bos_token_id, eos_token_id=clip_tok.eos_token_id, pad_token_id=clip_tok.pad_token_id)
    t5 = T5Config(vocab_size=len(t5_tok), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0, feed_forward_proj="gated-gelu", pad_token_id=t5_tok.pad_token_id, eos_token_id=t5_tok.eos_token_id)
    transformer = SD3Transformer2DModel(sample_size=8, patch_size=2, in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=32,
                                        pooled_projection_dim=32, pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm")
    vae = AutoencoderKL.from_pretrained(f"{resolve('tiny-flux')}/vae").float()
    StableDiffusion3Pipeline(transformer, FlowMatchEulerDiscreteScheduler(shift=3.0), vae, CLIPTextModelWithProjection(clip), clip_tok, CLIPTextModelWithProjection(clip), clip_tok, T5EncoderModel(t5), t5_tok).save_pretrained(folder)


@pytest.fixture
def backbone(request, tmp_path):
    {"random-sd": random_sd, "random-sd3": random_sd3}[request.param](tmp_path / request.param)
    return str(tmp_path / request.param)


def config(folder, backbone, **changes):
    base = dict(backbone=backbone, height=32, width=32, steps=6, splits=(0, 2), prompts_per_iteration=2, iterations=2, guidance_scale=3.0, evaluate_every=0, tracker="none", output=str(folder))
    return TrainConfig.from_dict(base | changes)


@pytest.mark.parametrize("changes", [{}, {"guidance_grad": True}, {"mixed_precision": "bf16"}], ids=str)
@pytest.mark.parametrize("backbone", SIBLINGS, indirect=True)
def test_ratio_is_exactly_one_with_guidance_on(tmp_path, backbone, changes):
    trainer = Trainer(config(tmp_path / "run", backbone, **changes))
    rows = [trainer.step() for _ in range(2)]
    assert all(row["ratio_error"] == 0 and row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("backbone", SIBLINGS, indirect=True)
def test_the_result_loads_in_plain_diffusers(tmp_path, backbone, lora):
    trainer = Trainer(config(tmp_path / "run", backbone, lora_rank=lora, lora_alpha=16, learning_rate=1e-2 if lora else 1e-4))
    run = trainer.fit()
    policy, time = trainer.policy, trainer.process.times[2]
    x, cond = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0)), trainer.conditioning(["a red 3", "two blue 5s"])
    with torch.no_grad(): ours = policy.predict(x, time, cond)
    pipe = DiffusionPipeline.from_pretrained(resolve(backbone) if lora else run.path / "model", dtype=torch.float32)
    if lora: pipe.load_lora_weights(run.path / "lora")
    policy.call = getattr(pipe, policy.component).eval()
    with torch.no_grad(): theirs = policy.predict(x, time, cond)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * max(1.0, ours.abs().max().item()))
