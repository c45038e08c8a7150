"""Real architectures with random weights: FLUX.1-dev, SD3.5-Medium, SD-1.5, Wan2.1-1.3B, HPS's
vision tower.

Speed and memory do not depend on the weights, so no download is needed. `tiny` is the same at a
small size.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch

from branchgrpo.backbones.flux import FluxPolicy
from branchgrpo.backbones.memory import quantisation
from branchgrpo.backbones.published import kl_config
from branchgrpo.backbones.sd import SDPolicy
from branchgrpo.backbones.sd3 import SD35_MEDIUM, SD3Policy
from branchgrpo.backbones.wan import WanPolicy
from branchgrpo.rewards.hps import VIT_H14, pad_square

SMALL = {"num_layers": 2, "num_attention_heads": 2}
SMALL_TOWER = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "shift_factor": 0.1159,
    "scaling_factor": 0.3611,
}
SMALL_VAE = VAE | {"block_out_channels": [32] * 4, "layers_per_block": 1}


def built(model: type, config: dict, device, dtype: torch.dtype):
    "Return a frozen model with random weights, made on the device."
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model(**config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def random_rows(policy, prompts: list[str], tokens: int) -> dict[str, torch.Tensor]:
    "Return random conditioning of the right shapes, the same for the same prompt."
    rows = {name: [] for name in policy.blank()}
    for prompt in prompts:
        seed = int(hashlib.md5(prompt.encode()).hexdigest()[:8], 16)
        generator = torch.Generator().manual_seed(seed)
        for name, value in policy.blank().items():
            shape = (
                value.shape[1:]
                if value.dim() == 2
                else (min(tokens, value.shape[1]), *value.shape[2:])
            )
            rows[name].append(torch.randn(*shape, generator=generator))
    return policy.on_device(**{name: torch.stack(values) for name, values in rows.items()})


class RandomFlux(FluxPolicy):
    "FLUX.1-dev's architecture: 11.9 billion random weights."

    tokens = 512

    def encode(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        return random_rows(self, prompts, self.tokens)


class RandomSD3(SD3Policy):
    "SD3.5-Medium's architecture: 2.2 billion random weights."

    tokens = 333

    def encode(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        return random_rows(self, prompts, self.tokens)


def flux(device, side: int, tiny: bool, dtype: torch.dtype = torch.bfloat16) -> RandomFlux:
    "Return FLUX.1-dev at `side` × `side` pixels."
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel

    few = SMALL | {"num_single_layers": 2, "joint_attention_dim": 64, "pooled_projection_dim": 32}
    config = FluxPolicy.published[1] | (few if tiny else {})
    parts = SimpleNamespace(
        transformer=built(FluxTransformer2DModel, config, device, dtype),
        vae=built(AutoencoderKL, SMALL_VAE if tiny else VAE, device, dtype),
        vae_scale_factor=8,
        _unpack_latents=FluxPipeline._unpack_latents,
    )
    policy = RandomFlux(parts, side, side, 3.5)
    policy.tokens = 16 if tiny else RandomFlux.tokens
    return policy


def sd3(device, side: int, tiny: bool, dtype: torch.dtype = torch.bfloat16) -> RandomSD3:
    "Return SD3.5-Medium at `side` × `side` pixels."
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

    small = {"caption_projection_dim": 128, "dual_attention_layers": (0,)}
    small |= {"joint_attention_dim": 64, "pooled_projection_dim": 32}
    config = SD35_MEDIUM | SMALL | small if tiny else SD35_MEDIUM
    parts = SimpleNamespace(
        transformer=built(SD3Transformer2DModel, config, device, dtype),
        vae=built(AutoencoderKL, SMALL_VAE if tiny else VAE, device, dtype),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae_scale_factor=8,
    )
    policy = RandomSD3(parts, side, side, 4.5)
    policy.tokens = 16 if tiny else RandomSD3.tokens
    return policy


class RandomSD(SDPolicy):
    "Stable Diffusion 1.5's architecture: 0.86 billion random weights."

    def encode(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        return random_rows(self, prompts, 77)


class RandomWan(WanPolicy):
    "Wan2.1 1.3B's architecture: 1.4 billion random weights."

    def encode(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        return random_rows(self, prompts, 512)


SMALL_UNET = {
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 32,
}
SMALL_UNET |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8}
SMALL_UNET |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
SMALL_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "num_layers": 1,
    "text_dim": 32,
}


def sd(device, tiny: bool, dtype: torch.dtype = torch.bfloat16) -> RandomSD:
    "Return Stable Diffusion 1.5 at 512 × 512 pixels, guided by 5."
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel

    # runwayml's scheduler
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    parts = SimpleNamespace(
        unet=built(
            UNet2DConditionModel,
            SDPolicy.published[1] | (SMALL_UNET if tiny else {}),
            device,
            dtype,
        ),
        vae=built(
            AutoencoderKL,
            SMALL_VAE | {"latent_channels": 4} if tiny else kl_config(4, True),
            device,
            dtype,
        ),
        scheduler=DDIMScheduler(**betas, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        vae_scale_factor=8,
    )
    side = 64 if tiny else 512
    return RandomSD(parts, side, side, 5.0)


def wan(device, tiny: bool, dtype: torch.dtype = torch.bfloat16) -> RandomWan:
    "Return Wan2.1 1.3B at 480 × 480 pixels and 33 frames, guided by 5."
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    config = WanPolicy.published[1] | (SMALL_WAN if tiny else {})
    parts = SimpleNamespace(
        transformer=built(WanTransformer3DModel, config, device, dtype),
        vae=built(
            AutoencoderKLWan, {"base_dim": 8, "num_res_blocks": 1} if tiny else {}, device, dtype
        ),
        vae_scale_factor_spatial=8,
        vae_scale_factor_temporal=4,
    )
    side, frames = (32, 5) if tiny else (480, 33)
    return RandomWan(parts, side, side, 5.0, frames=frames)


class RandomReward:
    "HPS's vision tower with random weights: scores without meaning, at the real cost."

    def __init__(self, device, tiny: bool):
        from transformers import CLIPVisionConfig, CLIPVisionModel

        config = {
            name: value
            for name, value in VIT_H14["vision_config"].items()
            if name != "projection_dim"
        }
        config |= SMALL_TOWER if tiny else {}
        self.device = device
        self.model = built(
            lambda **known: CLIPVisionModel(CLIPVisionConfig(**known)),
            config,
            device,
            torch.float32,
        )
        self.weights = (
            torch.randn(config["hidden_size"], generator=torch.Generator().manual_seed(0)).to(
                device
            )
            / 36
        )

    @torch.no_grad()
    def __call__(self, images, prompts, metadata=None):
        images = images[:, :, 0] if images.dim() == 5 else images  # the first frame of a clip
        return (
            self.model(pad_square(images.to(self.device).float(), 224)).pooler_output @ self.weights
        )


def without_adapter(policy):
    """Undo what a trainer did to a policy: its adapter, its wrapped forward, checkpointing and
    compiled blocks."""
    denoiser = policy.denoiser
    if getattr(denoiser, "peft_config", None):
        denoiser.delete_adapters(list(denoiser.peft_config))
    if hasattr(denoiser, "_original_forward"):
        denoiser.forward = denoiser._original_forward
        del denoiser._original_forward
    denoiser._is_accelerate_prepared = False  # else accelerate leaves it as it is, without autocast
    for module in denoiser.modules():
        module._compiled_call_impl = None
    denoiser.disable_gradient_checkpointing()
    denoiser.requires_grad_(False)
    policy.call = denoiser
    return policy


@dataclass(frozen=True)
class Model:
    "A published size: how it is made, its name on the hub, and the rows of its calls."

    make: Callable  # (device, tiny) -> policy
    name: str
    rows: int  # of a batch
    sizes: dict[str, int] = field(default_factory=dict)  # where they are not the recipe's
    own_attention: bool = False  # attention that diffusers does not dispatch


MODELS = {
    "flux": Model(
        lambda device, tiny: flux(device, 32 if tiny else 720, tiny),
        "black-forest-labs/FLUX.1-dev",
        4,
    ),
    "sd3": Model(
        lambda device, tiny: sd3(device, 32 if tiny else 512, tiny),
        "stabilityai/stable-diffusion-3.5-medium",
        12,
        {"height": 512, "width": 512},
        own_attention=True,
    ),
    "wan": Model(
        partial(wan),
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        1,
        {"height": 480, "width": 480, "frames": 33},
    ),
}


def of_size(policy, side: int | None):
    "Return a policy of the same model for other pixels; the policy itself where none are given."
    if side is None:
        return policy
    other = type(policy)(policy.pipeline, side, side, policy.guidance_scale)
    other.tokens = policy.tokens
    return other


def quantised(policy, base: str, device):
    """Return a policy whose denoiser's linear layers are in 8 or 4 bits, as diffusers' own loader
    makes them of a file's weights."""
    from diffusers.quantizers import DiffusersAutoQuantizer

    quantizer = DiffusersAutoQuantizer.from_config(quantisation(base), pre_quantized=False)
    quantizer.validate_environment(torch_dtype=torch.bfloat16, device_map=None)
    denoiser = policy.denoiser
    values = dict(denoiser.named_parameters())
    quantizer.preprocess_model(model=denoiser, device_map={"": device}, keep_in_fp32_modules=[])
    for name in list(values):
        value = values.pop(name)
        if quantizer.check_if_quantized_param(denoiser, value, name, {}):
            quantizer.create_quantized_param(denoiser, value, name, device, {}, [])
    quantizer.postprocess_model(denoiser)
    denoiser.requires_grad_(False)
    return policy
