"""BranchGRPO (arXiv 2509.06040) in one file, for a FLUX pipeline: copy it, and change it.

It needs torch, diffusers and what the pipeline needs; nothing of the package `branchgrpo`.
`tests/test_single_file.py` holds it equal to the package, given its draws, in trees, log-densities,
advantages, loss, gradients and trained weights. Alone, it draws from one generator: a seed gives
other images than in the package. For another flow model, write a class like `Flux`. Left out:
adapters, several GPUs, checkpoints, evaluation, pruning. `main` trains a tiny model and saves
nothing.

For FLUX.1-dev: `Flux(pipeline, 720, 720, 3.5)`, `Options(max_batch=4, decode_batch=4)`, weights in
float32 (bfloat16 loses steps of 1e-5), `velocity` under bfloat16 autocast,
`denoiser.enable_gradient_checkpointing()`, and 20 bytes per parameter, 238 GB, split over GPUs.
Save `model.denoiser`; `train` also yields the averaged weights.

    python examples/branchgrpo_single_file.py --model branchgrpo/testbed/weights/tiny-flux
    --iterations 5

Notation: σ is the noise level, from 1 (noise) to 0 (image); v is the model's velocity; h = σ − σ'.
A tree has P prompts and depths 0 (roots) … T (leaves). The nodes of a depth lie in one tensor (P,
W, …), the K children of node n at n·K … n·K + K − 1, so that a view (P, W, K, …) shows families.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import Tensor


@dataclass(frozen=True)
class Options:
    "The paper's values: Sec. 4.2 and Table 2; s and beta: Sec. 4.4."

    steps: int = 20  # T
    splits: tuple[int, ...] = (0, 3, 6, 9)  # steps that branch ("Dense"): 16 leaves
    branch_factor: int = 2  # K
    s: float = 4.0  # of Eq. 2: small, siblings are alike; large, they are independent
    eta: float = 0.3  # noise level g = η of every step but the last
    shift: float = 3.0  # time shift of the noise levels
    beta: float = 1.0  # of Eq. 3; 0: the plain mean of the leaves
    advantage_clip: float = 5.0  # A_max
    clip_range: float = 1e-4  # ε of Eq. 5
    prompts: int = 32  # per iteration
    steps_per_rollout: int = 2  # optimiser steps, each on a part of the prompts
    learning_rate: float = 1e-5
    weight_decay: float = 1e-4
    max_grad_norm: float = 0.01
    ema_decay: float = 0.995  # the averaged weights move once per rollout
    max_batch: int | None = None  # most latents per call of the model; None: all nodes of a depth
    decode_batch: int = 8  # images per call of the VAE


class Flux:
    "A `FluxPipeline`: prompts become tensors, latents a velocity, finished latents images."

    def __init__(self, pipeline, height: int, width: int, guidance_scale: float):
        self.pipeline, self.denoiser, self.vae = pipeline, pipeline.transformer, pipeline.vae
        self.height, self.width, self.guidance_scale = height, width, guidance_scale
        patch = 2 * pipeline.vae_scale_factor
        self.grid = (height // patch, width // patch)
        # packed tokens
        self.latent_shape = (self.grid[0] * self.grid[1], self.denoiser.config.in_channels)

    @torch.no_grad()
    def encode(self, prompt: str) -> dict[str, Tensor]:
        "Return the embeddings of one prompt, one row each."
        length = min(512, self.pipeline.tokenizer_2.model_max_length)
        embeds, pooled, _ = self.pipeline.encode_prompt([prompt], None, max_sequence_length=length)
        return {"embeds": embeds, "pooled": pooled}

    def velocity(self, latents: Tensor, sigma: Tensor, text: dict[str, Tensor]) -> Tensor:
        """Return v (B, …) of `latents (B, …)`; `text` has B rows.

        FLUX.1-dev takes its guidance as an input.
        """
        dtype, device = self.denoiser.dtype, latents.device
        # row and column of every token
        ids = torch.zeros(*self.grid, 3, device=device, dtype=dtype)
        ids[..., 1] += torch.arange(self.grid[0], device=device)[:, None]
        ids[..., 2] += torch.arange(self.grid[1], device=device)[None, :]
        row = latents.new_ones(len(latents), dtype=torch.float32)
        return self.denoiser(
            hidden_states=latents.to(dtype),
            timestep=(row * sigma).to(dtype),
            guidance=row * self.guidance_scale if self.denoiser.config.guidance_embeds else None,
            pooled_projections=text["pooled"],
            encoder_hidden_states=text["embeds"],
            img_ids=ids.flatten(0, 1),
            txt_ids=torch.zeros(text["embeds"].shape[1], 3, device=device, dtype=dtype),
            return_dict=False,
        )[0]

    @torch.no_grad()
    def decode(self, latents: Tensor, at_once: int) -> Tensor:
        "Return images (B, 3, H, W) in [0, 1]."
        config, packed = self.vae.config, latents.to(self.vae.dtype)
        z = self.pipeline._unpack_latents(
            packed, self.height, self.width, self.pipeline.vae_scale_factor
        )
        z = z / config.scaling_factor + config.shift_factor
        images = torch.cat(
            [self.vae.decode(part, return_dict=False)[0] for part in z.split(at_once)]
        )
        return images.float().div(2).add(0.5).clamp(0, 1)


# ---------------------------------------------------------------------------------------------- the
# reverse process


def flow_sigmas(steps: int, shift: float) -> Tensor:
    """Return the T + 1 noise levels: uniform in time, then shifted: σ = shift·t / (1 + (shift −
    1)·t)."""
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return (shift * t / (1 + (shift - 1) * t)).float()


def flow_step(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, g: float
) -> tuple[Tensor, Tensor]:
    """Return mean (B, …) and std of the next latents: one Euler step of Eq. 1, in float32. Without
    noise, g = 0.

    Eq. 1: dz = (f z − (1 + ε²)/2 · g² ∇log p) dt + ε g dw. For a flow model a step is Gaussian:
    mean = x − h·v + ½ g² · score · h and std = g·√h, with score = −(x − (1 − σ)·x̂₀) / σ² and x̂₀ =
    x − σ·v.
    """
    x, v, h = x.float(), v.float(), sigma - sigma_next
    x0_hat = x - sigma * v
    score = -(x - (1 - sigma) * x0_hat) / sigma**2
    return x - h * v + 0.5 * g**2 * score * h, torch.as_tensor(g * h**0.5, dtype=torch.float32)


def log_density(children: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return log N(child; mean, std²) of `children (N, K, …)` under their N parents, (N, K),
    float32.

    It is the mean over a latent's elements, not their sum, as in all published code; β and ε are
    meant for it.
    """
    z = (children.float() - mean[:, None]) / std
    return -0.5 * z.square().flatten(2).mean(2) - torch.log(std) - 0.5 * math.log(2 * math.pi)


# --------------------------------------------------------------------------------------------------
# the tree


def correlate(shared: Tensor, private: Tensor, s: float) -> Tensor:
    """Return the noise ξ (N, K, …) of siblings, from a shared draw (N, 1, …) and private ones (N,
    K, …).

    Eq. 2: ξ_b = (ξ_0 + s·η_b) / √(1 + s²). Each ξ_b is standard normal; two siblings have the
    covariance 1/(1 + s²).
    """
    return (shared + s * private) / math.sqrt(1 + s * s)


@dataclass
class Noise:
    "Standard normal numbers from one generator on the CPU."

    generator: torch.Generator
    s: float

    def roots(self, prompts: int, shape: tuple[int, ...]) -> Tensor:
        "Draw one initial latent (P, 1, …) for every prompt."
        return torch.randn(prompts, 1, *shape, generator=self.generator)

    def children(self, step: int, parents: int, branches: int, shape: tuple[int, ...]) -> Tensor:
        "Draw the noise (N, K, …) of the children of all parents at a step."
        private = torch.randn(parents, branches, *shape, generator=self.generator)
        if branches == 1:
            return private
        return correlate(torch.randn(parents, 1, *shape, generator=self.generator), private, self.s)


@dataclass
class Tree:
    "The trees of P prompts; lists over depths 0…T."

    latents: list[Tensor]  # (P, W, …)
    log_probs: list[Tensor]  # (P, W), of the edge into each node; 0 where a step draws no noise

    def part(self, rows: slice) -> "Tree":
        "Return the trees of some prompts."
        return Tree([x[rows] for x in self.latents], [p[rows] for p in self.log_probs])


def rows_of(text: dict[str, Tensor], rows: Tensor, width: int) -> dict[str, Tensor]:
    """Return the embeddings of the prompts that nodes belong to, from those (P, …) of all; `width`
    nodes per prompt."""
    return {name: values[rows // width] for name, values in text.items()}


@torch.no_grad()
def rollout(model: Flux, text: dict[str, Tensor], o: Options, noise: Noise) -> Tree:
    "Denoise the trees of P prompts: a split gives each node K children, any other step one."
    sigmas, device = flow_sigmas(o.steps, o.shift), model.denoiser.device
    prompts, shape = len(next(iter(text.values()))), model.latent_shape
    tree = Tree([noise.roots(prompts, shape).to(device)], [torch.zeros(prompts, 1, device=device)])
    for i in range(o.steps):
        x = tree.latents[i].flatten(0, 1)
        width, branches = len(x) // prompts, o.branch_factor if i in o.splits else 1
        everyone = torch.arange(len(x), device=device).split(o.max_batch or len(x))
        v = torch.cat(
            [model.velocity(x[rows], sigmas[i], rows_of(text, rows, width)) for rows in everyone]
        )
        if i < o.steps - 1:
            mean, std = flow_step(x, v, sigmas[i], sigmas[i + 1], o.eta)
            # x'_b = mean + std·ξ_b. Who stores latents in bfloat16 rounds them here: the
            # log-density is of what is stored, else the ratio of Eq. 5 is not 1 before the first
            # update.
            children = mean[:, None] + std * noise.children(i, len(x), branches, shape).to(device)
            log_probs = log_density(children, mean, std)
        else:
            # the image is decoded from this step's mean: noise would only blur it, so there is
            # nothing to train
            children = flow_step(x, v, sigmas[i], sigmas[i + 1], 0.0)[0][:, None]
            log_probs = torch.zeros(len(x), 1, device=device)
        tree.latents.append(children.reshape(prompts, width * branches, *shape))
        tree.log_probs.append(log_probs.reshape(prompts, width * branches))
    return tree


# --------------------------------------------------------------------------------------------------
# credit


def fuse_rewards(tree: Tree, rewards: Tensor, beta: float) -> list[Tensor]:
    """Return the fused reward r̄(n) of every node, (P, W) per depth, from the leaves' rewards (P,
    leaves).

    Eq. 3: r̄(n) = Σ_ℓ w_ℓ r_ℓ over the leaves ℓ below n, w = softmax of β·log p(ℓ|n). Since log
    p(ℓ|n) adds up along the path, one softmax over siblings per level gives the same: of β·log
    p(c|n) + log Z(c), from the leaves upwards.
    """
    values, log_z = [rewards.float()], torch.zeros_like(rewards, dtype=torch.float32)
    for d in range(len(tree.latents) - 1, 0, -1):
        family = (*tree.log_probs[d - 1].shape, -1)  # (P, W, K)
        score = (beta * tree.log_probs[d] + log_z).view(family)
        top = score.amax(-1, keepdim=True)
        weights = (score - top).exp()
        total = weights.sum(-1, keepdim=True)
        values.insert(0, (weights / total * values[0].view(family)).sum(-1))
        log_z = (top + total.log()).squeeze(-1)
    return values


def depthwise_advantages(values: list[Tensor], clip: float, eps: float = 1e-8) -> list[Tensor]:
    """Return A (P, W) per depth; an edge takes its child's.

    Eq. 4: A_d(n) = (r̄(n) − mean_d) / (std_d + ϵ) over all nodes of depth d of one tree, clipped to
    ±A_max. Two nodes get ±0.71 whatever their rewards are; a depth whose values differ only by
    rounding gets 0.
    """
    advantages = []
    for value in values:
        width = value.shape[1]
        low, high = value.amin(1, keepdim=True), value.amax(1, keepdim=True)
        alike = high - low <= 8 * torch.finfo(torch.float32).eps * torch.maximum(
            low.abs(), high.abs()
        )
        deviation = torch.where(alike, 0.0, value - value.sum(1, keepdim=True) / width)
        std = (deviation.square().sum(1, keepdim=True) / max(1, width - 1)).sqrt()
        advantages.append((deviation / (std + eps)).clamp(-clip, clip))
    return advantages


# --------------------------------------------------------------------------------------------------
# the update


def edge_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float
) -> Tensor:
    """Return −min(ρA, clip(ρ, 1 − ε, 1 + ε)·A) of every edge, ρ = p_θ / p_old.

    Eq. 5 is its mean over edges; no KL.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    return -torch.minimum(
        ratio * advantage, ratio.clamp(1 - clip_range, 1 + clip_range) * advantage
    )


def accumulate(
    model: Flux,
    text: dict[str, Tensor],
    tree: Tree,
    advantages: list[Tensor],
    o: Options,
    first: bool = True,
) -> float:
    """Add the gradient of the mean loss over all edges that drew noise, and return that loss.

    In the first step after a rollout the policy is the one that drew it, so ρ is exactly 1: the old
    log-density is the new one without its gradient. The rollout's own may differ in the last bits,
    where its batches had another size.
    """
    sigmas, total = flow_sigmas(o.steps, o.shift), 0.0
    edges = sum(tree.log_probs[d].numel() for d in range(1, o.steps))
    for i in range(o.steps - 1):
        parents, width = tree.latents[i].flatten(0, 1), tree.latents[i].shape[1]
        family = (len(parents), -1)  # siblings share their parent's call of the model
        children = tree.latents[i + 1].reshape(*family, *model.latent_shape)
        old, advantage = tree.log_probs[i + 1].reshape(family), advantages[i + 1].reshape(family)
        for rows in torch.arange(len(parents), device=parents.device).split(
            o.max_batch or len(parents)
        ):
            x = parents[rows]
            v = model.velocity(x, sigmas[i], rows_of(text, rows, width))
            log_prob = log_density(
                children[rows], *flow_step(x, v, sigmas[i], sigmas[i + 1], o.eta)
            )
            before = log_prob.detach() if first else old[rows]
            loss = edge_loss(log_prob, before, advantage[rows], o.clip_range).sum() / edges
            loss.backward()
            total += loss.item()
    return total


# --------------------------------------------------------------------------------------------------
# training

# images (B, 3, H, W) in [0, 1] and their B prompts → B scores
Reward = Callable[[Tensor, list[str]], Tensor]


def train(
    model: Flux,
    reward: Reward,
    draws: Iterable[list[str]],
    o: Options,
    noise_of: Callable[[int], Noise],
):
    """Train on the prompts of every iteration in `draws`; yield (iteration, mean reward, loss,
    averaged weights)."""
    parameters = list(model.denoiser.requires_grad_(True).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=o.learning_rate, weight_decay=o.weight_decay)
    average = [p.detach().clone() for p in parameters]
    for iteration, prompts in enumerate(draws):
        # one by one: neighbours change the last bits
        encoded = [model.encode(prompt) for prompt in prompts]
        text = {name: torch.cat([one[name] for one in encoded]) for name in encoded[0]}
        tree = rollout(model, text, o, noise_of(iteration))
        leaves = tree.latents[-1]
        images = model.decode(leaves.flatten(0, 1), o.decode_batch)
        scores = reward(images, [prompt for prompt in prompts for _ in range(leaves.shape[1])])
        rewards = scores.to(leaves.device).view(leaves.shape[:2])
        advantages = depthwise_advantages(fuse_rewards(tree, rewards, o.beta), o.advantage_clip)
        losses = []
        for part in range(min(o.steps_per_rollout, len(prompts))):
            rows = slice(part, None, o.steps_per_rollout)
            of_part = {name: values[rows] for name, values in text.items()}
            of_edges = [advantage[rows] for advantage in advantages]
            losses.append(accumulate(model, of_part, tree.part(rows), of_edges, o, first=part == 0))
            torch.nn.utils.clip_grad_norm_(parameters, o.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average, parameters):
                mean.sub_((1 - o.ema_decay) * (mean - parameter))
        yield iteration, rewards.mean().item(), sum(losses) / len(losses), average


def redness(images: Tensor, prompts: list[str]) -> Tensor:
    "Score how red images are. Put your reward here: HPS, PickScore, a check of your own."
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description="BranchGRPO in one file.")
    parser.add_argument(
        "--model",
        required=True,
        help="a folder of a tiny FLUX pipeline; a large one needs Options()",
    )
    parser.add_argument("--prompts", help="a text file, one prompt per line")
    parser.add_argument("--size", type=int, default=32, help="height and width in pixels")
    parser.add_argument(
        "--guidance-scale", type=float, default=1.0, help="what the model was made for"
    )
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # Options() is the paper's
    o = Options(steps=6, splits=(0, 2), eta=0.9, prompts=4, learning_rate=2e-4)
    pipeline = DiffusionPipeline.from_pretrained(given.model, dtype=torch.float32)
    pipeline = pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()
    model = Flux(pipeline, given.size, given.size, given.guidance_scale)
    lines = (
        Path(given.prompts).read_text(encoding="utf-8").splitlines()
        if given.prompts
        else ["a red 3", "a blue 7"]
    )
    texts = [line.strip() for line in lines if line.strip()]
    generator = torch.Generator().manual_seed(given.seed)
    places = (
        torch.randint(len(texts), (o.prompts,), generator=generator)
        for _ in range(given.iterations)
    )
    draws = ([texts[i] for i in some] for some in places)
    for iteration, mean, loss, _ in train(
        model, redness, draws, o, lambda _: Noise(generator, o.s)
    ):
        print(f"iteration {iteration + 1}: reward {mean:.4f}, loss {loss:.2e}")


if __name__ == "__main__":
    main()
