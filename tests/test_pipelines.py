"""A policy of any pipeline: it trains one that nobody knows, and refuses what it cannot follow."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils.torch_utils import randn_tensor
from peft import LoraConfig
from slow import often
from test_sharding import BEGIN, END, processes
from tiny_pipelines import PIPELINES, make, picture
from torch import nn
from torch.utils.checkpoint import checkpoint

from branchgrpo.backbones.any_pipeline import AnyPolicy, hold
from branchgrpo.backbones.loading import load_backbone
from branchgrpo.backbones.memory import QUANTISED
from branchgrpo.backbones.qwen_image import QwenImagePolicy
from branchgrpo.backbones.self_check import as_probed, gap, make_probe, norm_of, stock_call
from branchgrpo.cli import main
from branchgrpo.evaluation.evaluate import Evaluator
from branchgrpo.evaluation.fields import Evaluation
from branchgrpo.evaluation.policies import load_policy
from branchgrpo.evaluation.sampling import drawing_process
from branchgrpo.machine.findings import is_small, lacking
from branchgrpo.machine.reached import card_share
from branchgrpo.policy import Ragged
from branchgrpo.prompts import load_prompts
from branchgrpo.training.checks import check_run
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.export import adapter_line, scales, write_lora
from branchgrpo.training.resolve import resolve
from branchgrpo.training.trainer import Trainer

PROMPTS = ["a red cat", "two blue birds over the sea", "x", "a green house beside a tree"]
WIDTH = 12


class Answerer(ModelMixin, ConfigMixin):
    "A denoiser of tokens, with attention to texts of any length."

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, channels: int = 4, width: int = WIDTH):
        super().__init__()
        self.into = nn.Linear(channels + 1, width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, channels)
        self.gradient_checkpointing = False
        self.forgets = False  # the text, when activations are computed again

    def mix(self, x, text):
        q, k, v = self.to_q(x), self.to_k(text), self.to_v(text)
        return x + torch.softmax(q @ k.mT, -1) @ v

    def forward(self, latents, age, texts):
        rows = []
        for x, t, text in zip(latents, age, texts):
            x = torch.tanh(self.into(torch.cat([x, t.expand(len(x), 1)], 1)))
            if self.gradient_checkpointing and torch.is_grad_enabled():
                text = text * 0.5 if self.forgets else text
                x = checkpoint(self.mix, x, text, use_reentrant=False)
            else:
                x = self.mix(x, text)
            rows.append(self.out(x))
        return [torch.stack(rows)]


class StrangePipeline(DiffusionPipeline):
    """A loop that no one has seen: tokens in an order of its own, a time that grows, an output of
    the other sign, texts of any length. `lie` is what it does besides."""

    def __init__(self, transformer, scheduler):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.lie = ""

    def encode_prompt(self, prompt, device=None):
        texts = [prompt] if isinstance(prompt, str) else prompt
        rows = []
        for text in texts:
            text = "cut" if self.lie == "deaf" else text
            letters = torch.tensor([float(byte) for byte in text.encode()])
            rows.append(torch.sin(letters[:, None] * torch.arange(1, WIDTH + 1) / 20))
        return {"texts": rows, "kind": "letters"}

    @torch.no_grad()
    def __call__(
        self,
        prompt,
        height=8,
        width=8,
        num_inference_steps=10,
        guidance_scale=2.0,
        generator=None,
        output_type="pil",
        return_dict=True,
    ):
        count = 1 if isinstance(prompt, str) or self.lie == "one" else len(prompt)
        prompt = prompt[0] if self.lie == "one" and not isinstance(prompt, str) else prompt
        height -= height % 2 if self.lie == "even" else 0
        if self.lie == "copy":
            copy.deepcopy(self.scheduler)
        texts = self.encode_prompt(prompt)["texts"]
        nothing = [torch.zeros_like(text[:1]) for text in texts]
        shape = (count, height * width // 4, 4)
        x = randn_tensor(shape, generator=generator)
        if self.lie == "early":
            texts = [text + randn_tensor(text.shape, generator=generator) for text in texts]
        if self.lie == "picture":
            x[:, ::2] = 0.3
        if self.lie == "loud":
            x = 3 * x
        self.scheduler.set_timesteps(num_inference_steps)
        if self.lie == "one step":  # allowed: it cannot take one
            height += 0 // (num_inference_steps // 2)
        if self.lie == "broken" and num_inference_steps == 4:
            raise ZeroDivisionError("division of 4")
        if self.lie == "package":
            raise NameError("name 'transforms' is not defined")
        memory = 0.0
        for i, t in enumerate(self.scheduler.timesteps):
            age = 1 - t.expand(count) / 1000
            guided = self.transformer(x.flip(1), age, texts)[0].flip(1)
            scale = guidance_scale
            if self.lie == "index" and i >= 0.3 * num_inference_steps:
                scale = 1.0
            if self.lie == "time" and age[0] > 0.5:  # allowed: a function of time
                scale = 1.0
            if scale > 1:
                free = self.transformer(x.flip(1), age, nothing)[0].flip(1)
                guided = free + scale * (guided - free)
            if self.lie == "history":
                memory = 0.5 * memory + guided
                guided = guided + 0.1 * memory
            if self.lie == "noise":
                guided = guided + 0.01 * torch.randn_like(guided)
            if self.lie == "rows":
                guided = guided + 0.01 * guided.mean(0, keepdim=True)
            if self.lie == "cut":
                guided = guided.detach()
            if self.lie == "half cut":
                guided = 0.5 * guided + 0.5 * guided.detach()
            x = self.scheduler.step(-guided, t, x, return_dict=False)[0]
            if self.lie == "between":
                x = x * 0.99
        if self.lie == "tail":
            x = x + memory + self.transformer.config.channels / 50 * num_inference_steps
        images = torch.sigmoid(x[..., :3].mT.unflatten(2, (height // 2, width // 2)))
        images = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return (images,)


def strange(lie="", scheduler=None):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        transformer = Answerer().eval()
    pipeline = StrangePipeline(transformer, scheduler or FlowMatchEulerDiscreteScheduler(shift=2.0))
    pipeline.lie = lie
    return pipeline


def redness(images, prompts):
    return images[:, 0].flatten(1).mean(1) - images[:, 1].flatten(1).mean(1)


DOCUMENTED = ("z-image", "flux2-klein", "sdxl", "sana", "ltx", "hunyuan-video-1.5", "wan2.2")

SMALL = {
    "recipe": "branchgrpo",
    "iterations": 2,
    "steps": 4,
    "splits": (0, 1),
    "branch_factor": 2,
    "prompts_per_iteration": 2,
    "evaluate_every": 0,
    "tracker": "none",
    "learning_rate": 1e-3,
}


def trainer(output, pipeline, **changes):
    config = TrainConfig(output=str(output), **SMALL | changes)
    return Trainer(config, policy=pipeline, reward=redness, prompts=PROMPTS)


@pytest.fixture(autouse=True)
def quiet(recwarn):
    yield


def test_a_pipeline_that_nobody_knows_trains(tmp_path):
    pipeline = strange()
    before = {name: p.clone() for name, p in pipeline.transformer.named_parameters()}
    changes = {"gradient_checkpointing": True, "kl": 0.01, "ema_used": True}
    run = trainer(tmp_path / "run", pipeline, **changes).fit(quiet=True)
    assert len(run.metrics) == 2
    assert all(row["rollout_mismatch"] < 1e-5 for row in run.metrics)
    assert all(row["grad_norm"] > 0 for row in run.metrics)
    after = dict(pipeline.transformer.named_parameters())
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    checks = run.info["checks"]
    assert [check["steps"] for check in checks][0] == 4
    assert checks[0]["found"]["output"] < 1e-6
    assert checks[0]["found"]["checkpointing"] < 1e-5
    assert run.info["settings"]["height"] == 8  # the pipeline's own
    assert type(pipeline) is StrangePipeline


def test_texts_of_three_lengths_are_one_batch():
    policy = hold(strange())
    conditioning = policy.encode(PROMPTS)
    assert isinstance(conditioning["text0-0.0"], Ragged)
    x = torch.randn(4, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    calls = []
    policy.call = lambda *inputs: calls.append(len(inputs[0])) or policy.denoiser(*inputs)
    together = policy.predict(x, torch.tensor(0.7), conditioning)
    assert calls == [4, 4]  # with text and without
    alone = [
        policy.predict(x[n : n + 1], torch.tensor(0.7), policy.encode([PROMPTS[n]]))
        for n in range(4)
    ]
    assert gap(together, torch.cat(alone)) < 1e-5


def test_guidance_gets_no_gradient_unless_it_is_asked_for():
    policy = hold(strange())
    assert policy.learned.weights == pytest.approx({(0, 0): -2.0, (1, 0): 1.0}, abs=1e-3)
    assert policy.learned.against == {(1, 0)}
    x = torch.zeros(1, *policy.latent_shape)
    conditioning = policy.encode(["a"])
    policy.denoiser.requires_grad_(True)
    sizes = []
    for full in (False, True):
        policy.guidance_grad = full
        policy.denoiser.zero_grad()
        policy.predict(x, torch.tensor(0.5), conditioning).sum().backward()
        sizes.append(float(policy.denoiser.out.bias.grad.sum()))
    # of out.bias: −w x with the unconditional part held, −1 with both
    tokens = x.shape[1]
    assert sizes == pytest.approx([-2.0 * 4 * tokens, -1.0 * 4 * tokens])


REFUSED = {
    "index": "the output of step 2 of 4 differs by .*it depends on the index of the step",
    "early": "it depends on random numbers that are drawn before the first step",
    "history": "it depends on what was computed in earlier steps",
    "noise": "two calls with the same inputs differ",
    "between": "latents change by 0.01 between the steps 0 and 1",
    "picture": "of its first latents are no noise; they hold a picture",
    "loud": "its first latents have the std",
    "deaf": "its output is the same for two prompts; are their texts cut off",
    "cut": "the gradient of its latents is 0",
    "half cut": "a finite difference of its latents is 2.00 of the gradient",
    "tail": "the image differs by",
    "broken": r"its own call of 4 steps fails \(division of 4\)",
}


@pytest.mark.parametrize("lie", REFUSED)
def test_what_a_tree_cannot_follow_is_refused(lie, tmp_path):
    with pytest.raises(ValueError, match=REFUSED[lie]) as refusal:
        trainer(tmp_path / "run", strange(lie))
    assert str(refusal.value).startswith("backbone: StrangePipeline cannot be trained: ")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_what_three_steps_hide_the_runs_own_steps_show():
    hold(strange("index")).self_check(1)
    with pytest.raises(ValueError, match="index of the step"):
        hold(strange("index")).self_check(10)


def test_guidance_by_time_is_allowed():
    hold(strange("time")).self_check(10)


def test_a_package_that_diffusers_does_not_find_is_named_as_the_cause():
    "As Cosmos 2, which needs torchvision, and says that `transforms` is not defined."
    cause = r"call of 4 steps fails \(name 'transforms' is not defined; it may need a package"
    with pytest.raises(ValueError, match=f"^backbone: StrangePipeline cannot .* {cause}"):
        hold(strange("package")).self_check(4)


def test_a_pipeline_that_steps_by_copies_of_its_scheduler_is_refused():
    "As LTX-2 steps its sound, and SkyReels' diffusion forcing each part of a clip."
    with pytest.raises(ValueError, match="cannot be driven .it steps by copies of its FlowMatch"):
        _ = hold(strange("copy")).latent_shape


def test_a_diffusion_whose_last_step_changes_nothing_is_drawn_and_not_trained():
    policy = hold(make("stable-diffusion"), **PIPELINES["stable-diffusion"])
    policy.pipeline.scheduler.register_to_config(set_alpha_to_one=False, steps_offset=0)
    assert len(policy.own_levels(4)[0]) == 4
    with pytest.raises(ValueError, match="^backbone: .* so its last step changes nothing"):
        resolve(TrainConfig(recipe="dancegrpo-sd", steps=4), policy=policy)


def test_a_pipeline_that_cannot_take_one_step_is_allowed():
    "As Mochi, whose levels are made of two halves."
    hold(strange("one step")).self_check(4)


def test_a_picture_that_is_encoded_by_chance_is_encoded_as_the_mean():
    policy = hold(make("flux-fill"), **PIPELINES["flux-fill"])
    checked = policy.self_check(2, gradients=False)
    assert checked.found["output"] < 1e-6
    assert "a picture is encoded as the mean of what its VAE would draw" in str(checked)
    assert "mean" not in str(hold(strange()).self_check(2, gradients=False))


def test_rows_that_see_each_other_get_calls_of_their_own():
    policy = hold(strange("rows"))
    checked = policy.self_check(4)
    assert "one row per call, since rows of a batch differ by" in str(checked)
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    both = policy.predict(x, torch.tensor(0.5), policy.encode(PROMPTS[:2]))
    alone = policy.predict(x[:1], torch.tensor(0.5), policy.encode(PROMPTS[:1]))
    assert torch.equal(both[:1], alone)


def test_a_pipeline_that_draws_one_of_two_prompts_gets_calls_of_one():
    "As Cosmos 3."
    checked = hold(strange("one")).self_check(4)
    assert "one row per call, since two prompts: latents are (1, 16, 4)" in str(checked)
    assert checked.found["rows"] == 0


def test_a_scheduler_that_draws_noise_is_refused():
    noisy = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    with pytest.raises(ValueError, match="has stochastic_sampling: True, which draws noise"):
        hold(strange(scheduler=noisy)).self_check(4)


def test_a_model_that_forgets_under_checkpointing_is_refused_by_its_cause(tmp_path):
    pipeline = strange()
    pipeline.transformer.forgets = True
    with pytest.raises(ValueError, match="gradient checkpointing changes the gradient by .*fault"):
        trainer(tmp_path / "run", pipeline, gradient_checkpointing=True)
    pipeline.transformer.disable_gradient_checkpointing()
    trainer(tmp_path / "run", pipeline)  # without it, it may


def test_what_the_pipeline_does_not_take_is_refused():
    with pytest.raises(ValueError, match="num_frames: StrangePipeline takes no such argument"):
        hold(strange(), num_frames=9)
    with pytest.raises(ValueError, match="height: StrangePipeline draws 8 pixels where 9"):
        _ = hold(strange("even"), height=9, width=8).latent_shape


def saved(name, folder):
    "Save a tiny pipeline; return the fields by which a run finds it in its size."
    make(name).save_pretrained(folder)
    return {"backbone": str(folder)} | PIPELINES[name]


def test_a_pipeline_that_is_not_counted_has_no_share_of_a_card(tmp_path):
    given = saved("z-image", tmp_path / "base")
    s = replace(resolve(TrainConfig()), **given)
    assert not is_small(s.backbone)
    assert card_share(s, torch.device("cuda")) is None
    of_object = replace(s, backbone="ZImagePipeline")  # as a run names a pipeline that it is given
    assert card_share(of_object, torch.device("cuda")) is None


INT8 = {"lora_rank": 2, "mixed_precision": "bf16", "base_dtype": "int8"}


def test_int8_without_its_package_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(QUANTISED, "int8", ("a_package_of_nobody", 1.0))
    given = SMALL | INT8 | saved("z-image", tmp_path / "base")
    with pytest.raises(ValueError, match="^base_dtype: 'int8' needs a_package_of_nobody; pip"):
        Trainer(TrainConfig(output=str(tmp_path / "run"), **given), reward=redness, prompts=PROMPTS)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_adapter_over_int8_trains(tmp_path):
    pytest.importorskip("torchao")
    given = SMALL | INT8 | saved("z-image", tmp_path / "base")
    config = TrainConfig(output=str(tmp_path / "run"), **given)
    run = Trainer(config, reward=redness, prompts=PROMPTS).fit(quiet=True)
    assert all(row["grad_norm"] > 0 for row in run.metrics)
    assert [row["rollout_mismatch"] for row in run.metrics] == [0, 0]


@pytest.mark.slow
def test_bfloat16_passes_the_check_with_its_limits(tmp_path):
    changes = {"lora_rank": 2, "mixed_precision": "bf16", "base_dtype": "bfloat16"}
    given = SMALL | changes | saved("z-image", tmp_path / "base")
    config = TrainConfig(output=str(tmp_path / "run"), gradient_checkpointing=True, **given)
    run = Trainer(config, reward=redness, prompts=PROMPTS).fit(quiet=True)
    assert all(row["grad_norm"] > 0 for row in run.metrics)
    assert [row["rollout_mismatch"] for row in run.metrics] == [0, 0]
    assert run.info["checks"][0]["found"]["checkpointing"] < 1e-3


@pytest.mark.slow
def test_an_expert_that_stays_frozen_is_named(tmp_path):
    pipeline = make("wan2.2")
    changes = {"height": 16, "width": 16, "frames": 9, "iterations": 1}
    run = trainer(tmp_path / "run", pipeline, **changes).fit(quiet=True)
    notes = " ".join(run.info["checks"][0]["notes"])
    assert "is drawn by transformer_2, which is frozen, and trains nothing" in notes
    assert run.metrics[0]["rollout_mismatch"] < 1e-5


def gradient_of(policy, latents, time, conditioning):
    "The gradient of a random sum of outputs at all weights."
    direction = torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))
    policy.denoiser.requires_grad_(True).zero_grad()
    (policy.predict(latents, time, conditioning).float() * direction).sum().backward()
    grads = [p.grad.flatten() for p in policy.denoiser.parameters() if p.grad is not None]
    policy.denoiser.requires_grad_(False)
    return torch.cat(grads)


OURS = ("tiny-flux", "tiny-sd3", "tiny-sd", "tiny-wan", "tiny-wan-i2v", "qwen-image")


def by_its_class(name, full):
    "Return a policy of a family that has a class here."
    if name != "qwen-image":
        return load_backbone(name, guidance_grad=full)
    policy = QwenImagePolicy(make(name), 32, 32, 4.0, full)
    policy.set_text(400, "bad quality")
    return policy


def first_frames(prompts):
    "Return a frame of noise for each prompt, in 8 bits."
    seeds = [torch.Generator().manual_seed(len(prompt)) for prompt in prompts]
    return [torch.randint(0, 256, (3, 24, 40), generator=seed) / 255 for seed in seeds]


@pytest.mark.parametrize("name", often(OURS, ["tiny-sd3"]))
@pytest.mark.parametrize("full", often((False, True), [False]))
def test_the_families_compute_what_their_pipelines_do(name, full):
    by_hand = by_its_class(name, full)
    call = by_hand.drawing(4)
    del call["num_inference_steps"]
    driven = hold(
        by_hand.pipeline, guidance_grad=full, **call | {"frames": call.pop("num_frames", None)}
    )
    if name == "tiny-wan-i2v":
        by_hand.first_frames = driven.first_frames = first_frames
    prompts = ["a red 3", "two green 5s", "a red 3"]
    x = torch.randn(3, *by_hand.latent_shape, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(by_hand.own_levels(4), driven.own_levels(4)):
        assert (ours is None) == (theirs is None)
        assert ours is None or gap(ours, theirs) < 1e-6
    time = by_hand.own_levels(4)[0][1]
    at = [(policy, x, time, policy.encode(prompts)) for policy in (by_hand, driven)]
    assert gap(*[policy.predict(*inputs) for policy, *inputs in at]) < 1e-5
    assert gap(*[gradient_of(*inputs) for inputs in at]) < 2e-5
    assert float((by_hand.decode(x) - driven.decode(x)).abs().max()) < 1e-6


@pytest.mark.parametrize("name", often((*DOCUMENTED, "chroma", "lumina2"), ["z-image"]))
def test_pipelines_of_no_family_agree_with_themselves(name):
    policy = hold(make(name), **PIPELINES[name])
    checked = policy.self_check(4)
    assert max(checked.found[what] for what in ("output", "step", "latents", "image")) < 1e-5
    assert isinstance(policy, AnyPolicy)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_chroma_is_refused_under_checkpointing_for_what_diffusers_drops(dtype, tmp_path):
    "It changes the gradient by 6 %, which no rounding hides."
    changes = {"height": 16, "width": 16, "gradient_checkpointing": True}
    with pytest.raises(ValueError, match="checkpointing changes the gradient.*ChromaTransformer"):
        trainer(tmp_path / "run", make("chroma").to(dtype), **changes)


@pytest.mark.slow
def test_lumina2_is_refused_where_it_looks_at_the_step(tmp_path):
    policy = hold(make("lumina2"), height=32, width=32, cfg_trunc_ratio=0.3)
    with pytest.raises(ValueError, match="index of the step"):
        policy.self_check(10)
    assert json.dumps(hold(make("lumina2"), height=32, width=32).self_check(4).to_dict())


def test_a_new_adapter_has_a_gradient_where_the_check_looks():
    "In HunyuanVideo-1.5 nothing reads the last layer, and the A of a new adapter has none."
    policy = hold(make("hunyuan-video-1.5"), **PIPELINES["hunyuan-video-1.5"])
    policy.denoiser.add_adapter(LoraConfig(r=2, target_modules=list(policy.lora_targets)))
    probe = make_probe(policy, steps=4, rows=1)
    with as_probed(policy, probe.weights):
        assert norm_of(probe.gradient()[1:]) > 1e-3


def test_the_adapter_of_a_pipeline_that_loads_none_is_read_by_its_denoiser(tmp_path, monkeypatch):
    "As how_to_draw.md says it for HunyuanVideo-1.5, whose α is not r here."
    policy = hold(make("hunyuan-video-1.5"))
    assert not hasattr(policy.pipeline, "load_lora_weights")
    target = list(policy.lora_targets)
    given = LoraConfig(r=2, lora_alpha=6, target_modules=target, init_lora_weights=False)
    policy.denoiser.add_adapter(given)
    state = {name: p for name, p in policy.denoiser.named_parameters() if "lora_" in name}
    (tmp_path / "lora").mkdir()
    write_lora(policy, tmp_path / "lora", state)
    monkeypatch.chdir(tmp_path / "lora")
    read = make("hunyuan-video-1.5")
    exec(adapter_line(policy), {"pipe": read})
    adapted = [name for name, part in read.transformer.named_modules() if hasattr(part, "scaling")]
    assert adapted == list(scales(policy.denoiser))
    for name in adapted:
        ours, theirs = (of.get_submodule(name) for of in (policy.denoiser, read.transformer))
        x = torch.randn(3, ours.in_features, generator=torch.Generator().manual_seed(0))
        assert gap(ours(x), theirs(x)) < 1e-6
        assert gap(ours(x), ours.base_layer(x)) > 1e-3


def test_the_doctor_asks_for_no_weights_of_a_guider(tmp_path):
    make("hunyuan-video-1.5").save_pretrained(tmp_path)
    assert lacking(tmp_path) == []
    (tmp_path / "guider/guider_config.json").unlink()
    assert lacking(tmp_path) == ["guider"]


REWARD = """
def redness(images, prompts):
    return images[:, 0].flatten(1).mean(1) - images[:, 1].flatten(1).mean(1)
"""


def drawn_by_the_run(run, steps, latents):
    "The image that a run's policy draws from these latents."
    policy = load_policy(str(run))
    conditioning = policy.encode(["a red cat"])
    process = drawing_process(policy, steps)
    with torch.no_grad():
        for i in range(steps):
            output = policy.predict(latents, process.times[i], conditioning)
            latents = process.step(i, latents, output, False).mean
        return policy.decode(latents)


@pytest.mark.slow
@pytest.mark.parametrize("rank", (0, 2))
@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_documented_commands_serve_a_pipeline_of_no_family(name, rank, tmp_path, monkeypatch):
    "train → resume → evaluate → sample → export → stock diffusers, as how_to_draw.md says."
    monkeypatch.chdir(tmp_path)
    make(name).save_pretrained("base")
    Path("redness.py").write_text(REWARD)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    sizes = [f"--{key}={value}" for key, value in PIPELINES[name].items()]
    given = [f"--backbone={tmp_path / 'base'}", "--reward=redness.py:redness", *sizes]
    given += ["--prompts=prompts.txt", "--steps=4", "--splits=0,1", "--branch-factor=2"]
    given += ["--prompts-per-iteration=2", "--evaluate-every=1", "--evaluation-prompts=1"]
    given += ["--tracker=none", "--output=run", "--checkpoint-every=1", "--embeddings=texts"]
    given += [f"--lora-rank={rank}", "--learning-rate=1e-3"]
    assert main(["train", *given, "--iterations=1"]) == 0
    assert main(["train", *given, "--iterations=2"]) == 0  # it goes on
    run = tmp_path / "run"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert main(["evaluate", "run", "--limit=1"]) == 0
    assert main(["sample", "run", "--prompt=a red cat", "--output=drawn.png"]) == 0
    assert main(["doctor", f"--backbone={tmp_path / 'base'}", *sizes]) == 0
    exported = run / ("lora" if rank else "model")
    code = (exported / "how_to_draw.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(exported)
    place = {}
    exec(code[: code.index("drawn = ")], place)
    steps = place["draw"].pop("num_inference_steps")
    stock = hold(place["pipe"], **renamed(place["draw"]))
    record, images = stock_call(stock, "a red cat", steps, seed=1)
    ours = drawn_by_the_run(run, steps, record[0].latents)
    assert float((ours - stock.as_images(images)).abs().max()) < 1e-4
    base = hold(make(name), **renamed(place["draw"]))
    changed = base.predict(record[0].latents, torch.tensor(1.0), base.encode(["a red cat"]))
    assert gap(changed, record[0].output) > 1e-5  # trained weights, not those of the base


def renamed(draw):
    "The arguments of a pipeline's call as those of a policy."
    return {("frames" if name == "num_frames" else name): value for name, value in draw.items()}


def with_pictures(folder):
    "Return a set of two prompts of one text with pictures of two sizes, and one of another text."
    rows = []
    for n, (text, size) in enumerate([("make it red", 32), ("make it red", 48), ("no sky", 32)]):
        picture(size, 32, hue=n).save(folder / f"{n}.png")
        rows.append({"prompt": text, "image": f"{n}.png"})
    lines = "\n".join(json.dumps(row) for row in rows)
    (folder / "edits.jsonl").write_text(lines + "\n")
    return load_prompts(str(folder / "edits.jsonl"))


EDITORS = ("flux-kontext", "qwen-image-edit")


def editor(name):
    "Return a policy of a pipeline that edits a picture, without one."
    return hold(make(name), **{key: v for key, v in PIPELINES[name].items() if key != "image"})


@pytest.mark.parametrize("name", often(EDITORS, EDITORS[:1]))
def test_prompts_with_a_picture_train_evaluate_and_export(name, tmp_path):
    prompts = with_pictures(tmp_path)
    policy = editor(name)
    sizes = {"height": policy.height, "width": policy.width, "embeddings": str(tmp_path / "texts")}
    config = TrainConfig(output=str(tmp_path / "run"), **SMALL | sizes | {"splits": (0,)})
    made = Trainer(config, policy=policy, reward=redness, prompts=prompts)
    run = made.fit(quiet=True)
    assert [row["rollout_mismatch"] for row in run.metrics] == [0, 0]
    assert all(row["grad_norm"] > 0 for row in run.metrics)
    assert len(policy.encoded.kept) == 4  # three pictures and the check's: each is encoded once
    conditioning = policy.encode(prompts.train[:2])
    x = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    both = policy.predict(torch.cat([x, x]), torch.tensor(0.5), conditioning)
    assert gap(both[:1], both[1:]) > 1e-4  # one text, two pictures
    evaluation = Evaluation(backbone=name, prompts="edits", steps=4, rewards=("red",))
    given = {"policy": policy, "prompts": prompts, "rewards": {"red": redness}}
    assert Evaluator(evaluation, tmp_path / "seen", given=given).run()["images"] == 3
    drawn = (tmp_path / "run/model/how_to_draw.md").read_text()
    assert "pipe('a cat', image=picture, **draw)" in drawn
    record, images = stock_call(policy, prompts.train[1], 4, seed=1)
    process, latents = drawing_process(policy, 4), record[0].latents
    row = policy.encode([prompts.train[1]])
    with torch.no_grad():
        for i in range(4):
            output = policy.predict(latents, process.times[i], row)
            latents = process.step(i, latents, output, False).mean
        assert float((policy.decode(latents) - policy.as_images(images)).abs().max()) < 1e-5


def test_a_pipeline_that_edits_needs_a_picture_for_each_prompt(tmp_path):
    policy = editor("qwen-image-edit")
    with pytest.raises(ValueError, match="^prompts: QwenImageEditPipeline draws after a picture;"):
        trainer(tmp_path / "run", policy, height=32, width=32)
    assert not (tmp_path / "run").exists()


def test_prompts_with_pictures_are_refused_by_a_pipeline_of_texts(tmp_path):
    config = TrainConfig(output=str(tmp_path / "run"), **SMALL)
    with pytest.raises(ValueError, match="^prompts: they have pictures, and StrangePipeline is"):
        Trainer(config, policy=strange(), reward=redness, prompts=with_pictures(tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_with_offload_trains_a_pipeline_of_no_family(tmp_path):
    given = SMALL | saved("z-image", tmp_path / "base") | {"iterations": 1, "offload": True}
    config = TrainConfig(output=str(tmp_path / "run"), vae_tiling=True, **given)
    run = Trainer(config, reward=redness, prompts=PROMPTS).fit(quiet=True)
    assert run.metrics[0]["rollout_mismatch"] == 0


TRAINED_BY_ALL = """
run = t.fit(quiet=True)
row = run.metrics[-1]
result = {name: torch.tensor(row[name]) for name in ("rollout_mismatch", "grad_norm")}
result |= {"sharded": torch.tensor(len(sharded_parts(t.policy.denoiser)))}
result |= {f"w.{name}": value for name, value in everything(t.learner.parameters).items()}
if rank == 0: torch.save(result, out)
t.accelerator.wait_for_everyone()
"""


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ("none", "full"))
def test_two_processes_train_a_pipeline_of_no_family(sharding, tmp_path):
    table = json.loads(json.dumps(SMALL | saved("z-image", tmp_path / "base")))
    table |= {"iterations": 1, "reward": "tiny-clip", "prompts": "digits", "sharding": sharding}
    found = {}
    for count in (1, 2):
        more = {"output": str(tmp_path / f"run{count}")}
        more |= {} if count == 2 else {"sharding": "none"}
        code = BEGIN + TRAINED_BY_ALL + END
        found[count] = processes(count, code, table | more, tmp_path / f"{count}.pt")
    assert (found[2]["sharded"] > 0) == (sharding == "full")
    assert found[2]["rollout_mismatch"] < 1e-5
    assert gap(found[2]["grad_norm"], found[1]["grad_norm"]) < 1e-3
    for name, value in found[1].items():
        assert not name.startswith("w.") or gap(found[2][name], value) < 1e-3, name


def test_two_experts_refuse_several_processes_before_a_run():
    policy = hold(make("wan2.2"), **PIPELINES["wan2.2"])
    s = replace(resolve(TrainConfig(steps=4, splits=(0, 1))), **PIPELINES["wan2.2"])
    notes = check_run(s, policy)
    assert "is drawn by transformer_2, which is frozen, and trains nothing" in notes[0]
    for asked in ({"processes": 2}, {"s": replace(s, sharding="full")}):
        with pytest.raises(ValueError, match="has two denoisers, and trains in one process only"):
            check_run(**{"s": s, "policy": policy} | asked)
