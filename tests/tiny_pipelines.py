"""Tiny pipelines of diffusers with random weights, of families that have no class here.

Configurations follow diffusers' own tests; tokenizers spell bytes, so nothing is fetched."""

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'text' %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "</s>", "<unk>", "<s>", "<|im_start|>", "<|im_end|>"]


def tokenizer(ends, length):
    "A tokenizer of bytes: `ends` is what it puts around a text, $A."
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate([*SPECIAL, *letters])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    around = [(token, vocab[token]) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single=ends, special_tokens=around)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
        model_max_length=length,
        additional_special_tokens=SPECIAL[4:],
    )
    fast.chat_template = CHAT
    return fast


def seeded(module, seed=1):
    "Weights that are neither empty nor zero, so that outputs depend on everything."
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim >= 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.7 / p[0].numel() ** 0.5)
            elif not torch.isfinite(p).all() or (p == 0).all():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    return module.eval()


def t5():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, vocab_size=400
    )
    return transformers.T5EncoderModel(config).eval()


def qwen3(kind):
    return kind(
        transformers.Qwen3Config(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=400,
            max_position_embeddings=512,
        )
    ).eval()


def small_vae(**more):
    given = {"block_out_channels": [8, 16], "norm_num_groups": 4, "sample_size": 32}
    blocks = len((given | more)["block_out_channels"])
    given["down_block_types"] = ["DownEncoderBlock2D"] * blocks
    given["up_block_types"] = ["UpDecoderBlock2D"] * blocks
    return diffusers.AutoencoderKL(**given | more)


def z_image():
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=small_vae(latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=qwen3(transformers.Qwen3Model),
        tokenizer=tokenizer("$A", 512),
        transformer=seeded(transformer),
    )


def flux2_klein():
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=256,
        axes_dims_rope=[4, 4, 4, 4],
        guidance_embeds=False,
    )
    vae = diffusers.AutoencoderKLFlux2(
        sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    config = transformers.Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=400,
        max_position_embeddings=512,
    )
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=transformers.Qwen3ForCausalLM(config).eval(),
        tokenizer=tokenizer("$A", 512),
        transformer=seeded(transformer),
    )


def sdxl():
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(4, 8),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=80,  # 6 · 8 + 32
        cross_attention_dim=64,
        norm_num_groups=1,
    )
    config = transformers.CLIPTextConfig(
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=3,
        vocab_size=400,
        projection_dim=32,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=small_vae(),
        text_encoder=transformers.CLIPTextModel(config).eval(),
        text_encoder_2=transformers.CLIPTextModelWithProjection(config).eval(),
        tokenizer=tokenizer("<s> $A </s>", 77),
        tokenizer_2=tokenizer("<s> $A </s>", 77),
        unet=seeded(unet),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            steps_offset=1,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
        ),
        add_watermarker=False,
    )


def sana():
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=32,
    )
    vae = diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    config = transformers.Gemma2Config(
        head_dim=16,
        hidden_size=8,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        num_key_value_heads=2,
        vocab_size=400,
        attn_implementation="eager",
    )
    return diffusers.SanaPipeline(
        tokenizer=tokenizer("<s> $A", 512),
        text_encoder=transformers.Gemma2Model(config).eval(),
        vae=vae.eval(),
        transformer=seeded(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def ltx():
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=t5(),
        tokenizer=tokenizer("$A </s>", 128),
        transformer=seeded(transformer),
    )


def hunyuan_video_15():
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        text_embed_2_dim=32,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="t2v",
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    config = transformers.Qwen2_5_VLTextConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_scaling=rope,
        rope_theta=1000000.0,
        vocab_size=400,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
    )
    return diffusers.HunyuanVideo15Pipeline(
        text_encoder=transformers.Qwen2_5_VLTextModel(config).eval(),
        tokenizer=tokenizer("$A", 2048),
        transformer=seeded(transformer),
        vae=vae.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=t5(),
        tokenizer_2=transformers.ByT5Tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    )


def wan22():
    def expert(seed):
        return seeded(
            diffusers.WanTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=12,
                text_dim=32,
                freq_dim=256,
                ffn_dim=32,
                num_layers=2,
                rope_max_seq_len=32,
            ),
            seed,
        )

    vae = diffusers.AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    config = transformers.UMT5Config(
        d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, vocab_size=400
    )
    return diffusers.WanPipeline(
        tokenizer=tokenizer("$A </s>", 64),
        text_encoder=transformers.UMT5EncoderModel(config).eval(),
        vae=vae.eval(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=expert(1),
        transformer_2=expert(2),
        boundary_ratio=0.875,
    )


def chroma():
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[4, 4, 8],
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=small_vae(latent_channels=4, shift_factor=0.0609, scaling_factor=1.5035),
        text_encoder=t5(),
        tokenizer=tokenizer("$A </s>", 64),
        transformer=seeded(transformer),
        image_encoder=None,
        feature_extractor=None,
    )


def lumina2():
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=8,
        num_layers=2,
        num_attention_heads=1,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=[4, 2, 2],
        cap_feat_dim=8,
    )
    config = transformers.Gemma2Config(
        head_dim=4,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=2,
        sliding_window=2,
        vocab_size=400,
    )
    return diffusers.Lumina2Pipeline(
        transformer=seeded(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=small_vae(
            latent_channels=4,
            shift_factor=0.0609,
            scaling_factor=1.5035,
            block_out_channels=[4, 4, 4, 4],
        ),
        text_encoder=transformers.Gemma2Model(config).eval(),
        tokenizer=tokenizer("<s> $A", 256),
    )


# name -> (maker, sizes of a small image or clip)
PIPELINES = {
    "z-image": (z_image, {"height": 32, "width": 32}),
    "flux2-klein": (flux2_klein, {"height": 16, "width": 16}),
    "sdxl": (sdxl, {"height": 32, "width": 32}),
    "sana": (sana, {"height": 32, "width": 32}),
    "ltx": (ltx, {"height": 32, "width": 32, "frames": 9}),
    "hunyuan-video-1.5": (hunyuan_video_15, {"height": 16, "width": 16, "frames": 9}),
    "wan2.2": (wan22, {"height": 16, "width": 16, "frames": 9}),
    "chroma": (chroma, {"height": 16, "width": 16}),
    "lumina2": (lumina2, {"height": 32, "width": 32}),
}


def make(name, seed=0):
    "Return a tiny pipeline of PIPELINES; the caller's random numbers stay as they are."
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return PIPELINES[name][0]()
