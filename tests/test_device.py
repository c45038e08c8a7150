"""Everything runs where it should on a GPU, shown on a virtual one: recipes, families, copies
inside the loops."""

import pytest
import torch
from accelerate import Accelerator
from slow import often
from torch import Tensor
from virtual_device import GPU, VirtualDevice, WrongDevice

from branchgrpo import recipes
from branchgrpo.policy import GaussianFlow
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.processes import RankGroup
from branchgrpo.training.resolve import resolve
from branchgrpo.training.trainer import Trainer
from branchgrpo.training.update import accumulate, shared_micro_batches

SMALL = dict(
    prompts_per_iteration=2, iterations=1, evaluation_prompts=2, evaluation_steps=3, tracker="none"
)
SHORT = dict(steps=4, splits=(0, 2))
CLIPS = dict(recipe="branchgrpo", prompts="clips", reward="motion", **SHORT)
FUNNEL = {"roots": 6, "prune_at": {6: 4, 8: 3}}
# fewer nodes than the recipes have: what matters here is each setting's name, and test_arithmetic
# counts the sizes
NARROW = {
    **dict.fromkeys(
        ("dancegrpo", "dancegrpo-tf0.6", "mixgrpo-shared", "dancegrpo-released"),
        {"branch_factor": 3},
    ),
    "g2rpo": {"branch_factor": 3},
    "stepwise-flow-grpo": {"branch_factor": 3, "steps": 5},
    "branchgrpo-released": {"steps": 8, "splits": (0, 2), "steps_per_pass": 4},
    "tp-grpo": {"roots": 3, "steps": 5},
    **dict.fromkeys(
        ("flow-grpo", "mixgrpo", "mixgrpo-flash", "dancegrpo-sd", "dense-grpo"), {"roots": 3}
    ),
    **dict.fromkeys(("uniform-subsample", "ovf"), {"roots": 4, "group_keep": 2}),
    **dict.fromkeys(("pro-grpo", "pro-grpo-flash", "pro-grpo-sd"), FUNNEL),
}
FAMILIES = {
    "sd3": dict(recipe="flow-grpo", backbone="tiny-sd3", guidance_scale=3.0, roots=4, steps=4),
    "sd": dict(recipe="branchgrpo", backbone="tiny-sd", **SHORT),
    "sd, guidance with gradient": dict(
        recipe="branchgrpo", guidance_scale=3.0, backbone="tiny-sd", guidance_grad=True, **SHORT
    ),
    "wan": dict(backbone="tiny-wan", **CLIPS),
    "wan-i2v": dict(backbone="tiny-wan-i2v", **CLIPS),
}
TWO = dict(reward="0.7*tiny-clip+0.3*tiny-hps")
MIXES = {
    "adapter": dict(lora_rank=4, kl=0.1, ratio="guard", passes=2, train_fraction=0.6),
    "kl": dict(kl=0.1, advantage="broadcast", transition="cps", eta=0.5),
    "leave-one-out": dict(advantage="leave-one-out", max_batch=3, train_batch=2),
    "leaf-backup": dict(
        advantage="leaf-backup", prune="parent-top1", group_selection="random", group_keep=2
    ),
    "joint": dict(
        advantage="joint", std="global", split_noise="scaled", prune="extreme", prune_keep=1
    ),
    "few nodes": dict(std="pooled", weights="edge", beta=1.0, group_selection="ovf", group_keep=2),
    "diverse": dict(
        group_selection="diverse", group_keep=2, diversity=0.5, reward_sum="decoupled", **TWO
    ),
    "weighted steps": dict(
        advantage="siblings", step_weights="inverse-gradient", transition="linear", eta=1.0
    )
    | dict(reward_sum="decoupled+batch", **TWO),
    "branches": dict(
        steps=5,
        splits=(),
        roots=2,
        side=(0, 2),
        branch_factor=3,
        merged={3: 2},
        noise_factors={0: 1.5},
    )
    | dict(previews="ode/2+x0", preview_at="after", advantage="granularities", step_weights="std"),
    "bf16": dict(
        mixed_precision="bf16", gradient_checkpointing=True, decode_batch=1, adaptive=True
    ),
    "sum": dict(reward="norm(0.7*tiny-clip+0.3*tiny-hps)", held_out="tiny-pickscore"),
}


@pytest.fixture
def gpu(monkeypatch):
    "A process whose device is the virtual GPU."
    monkeypatch.setattr(Accelerator, "device", property(lambda self: GPU))
    with VirtualDevice() as device:
        yield device


def trainer(tmp_path, **changes):
    return Trainer(TrainConfig.from_dict(SMALL | {"output": str(tmp_path / "run")} | changes))


def whole_run(t) -> dict:
    """Evaluate, train one iteration, save and export; read the checkpoint again; return the
    iteration's metrics."""
    run = t.fit()
    t.resume(run)
    assert t.progress.iteration == 1
    return run.metrics[0]


CHOSEN = ("branchgrpo-deppru", "branchgrpo-mix", "branchgrpo-released", "flow-dppo", "gardo")
CHOSEN += ("flow-cps", "grpo-guard", "stepwise-flow-grpo", "tp-grpo", "treegrpo")
NAMED = (
    "advantage",
    "std",
    "prune",
    "selection",
    "group_selection",
    "window",
    "stochastic",
    "transition",
    "ratio",
)
NAMED += ("loss", "loss_mean", "reward_sum", "step_weights", "step_unit", "split_noise", "weights")


def test_the_chosen_recipes_and_settings_take_every_name_that_a_recipe_takes():
    tables = [
        {"recipe": name, "backbone": "tiny-sd" if name.endswith("-sd") else "tiny-flux"}
        for name in CHOSEN
    ]
    tables += [{"recipe": "branchgrpo"} | SHORT | changes for changes in MIXES.values()] + [
        *LOOPS.values()
    ]
    tried = [resolve(TrainConfig.from_dict(table)) for table in tables]
    for setting in NAMED:
        taken = {getattr(recipes.get(name).values, setting) for name in recipes.names()}
        assert taken <= {getattr(s, setting) for s in tried}, setting


DAILY = ("branchgrpo-deppru", "flow-cps", "treegrpo")  # of the chosen ones, by `make test`


@pytest.mark.parametrize("recipe", often(recipes.names(), DAILY))
def test_recipe_on_a_gpu(gpu, tmp_path, recipe):
    row = whole_run(trainer(tmp_path, recipe=recipe, **NARROW.get(recipe, {})))
    assert row["grad_norm"] > 0 and row["rollout_mismatch"] < 1e-5


@pytest.mark.parametrize("name", often(FAMILIES, ("sd, guidance with gradient", "wan-i2v")))
def test_family_on_a_gpu(gpu, tmp_path, name):
    assert whole_run(trainer(tmp_path, **FAMILIES[name]))["grad_norm"] > 0


@pytest.mark.parametrize("name", often(MIXES, ("adapter", "bf16", "joint")))
def test_settings_on_a_gpu(gpu, tmp_path, name):
    assert (
        whole_run(trainer(tmp_path, recipe="branchgrpo", **(SHORT | MIXES[name])))["grad_norm"] > 0
    )


def test_a_policy_of_your_own_and_its_reference_on_a_gpu(gpu, tmp_path):
    """A trainer moves the denoiser; the copy that the KL term compares with moves, too.

    Found on an H200.
    """
    config = TrainConfig.from_dict(
        SMALL | SHORT | {"output": str(tmp_path / "run"), "kl": 0.1, "evaluate_every": 0}
    )
    policy, reward = GaussianFlow(shape=(4,)), lambda images, prompts: images.flatten(1).mean(1)
    t = Trainer(config, policy=policy, reward=reward, prompts=["a", "b", "c"])
    assert t.step()["grad_norm"] > 0 and t.step()["kl"] > 0


def test_embeddings_on_a_gpu(gpu, tmp_path):
    t = trainer(tmp_path, recipe="branchgrpo", embeddings=str(tmp_path / "embeddings"), **SHORT)
    assert whole_run(t)["grad_norm"] > 0
    assert t.policy.pipeline.text_encoder.device.type == "cpu"


def test_a_shared_tree_on_a_gpu(gpu, tmp_path, monkeypatch):
    "One of two processes that share each tree; what the other would send is what this one has."
    group = RankGroup(0, 2, lambda own: torch.stack([own, own]))
    monkeypatch.setattr("branchgrpo.training.collection.make_group", lambda *_: group)
    # the other sent other outputs
    monkeypatch.setattr("branchgrpo.training.trainer.check_mismatch", lambda *_: None)
    for changes in ({"recipe": "branchgrpo", **SHORT}, {"recipe": "pro-grpo", **FUNNEL}):
        assert trainer(tmp_path, **changes).step()["grad_norm"] >= 0


LOOPS = {
    "flux": dict(recipe="branchgrpo", max_batch=3, **SHORT),
    "flux, adapter": dict(recipe="branchgrpo", **(SHORT | MIXES["adapter"])),
    "flux, solver": dict(recipe="mixgrpo-flash", branch_factor=2),
    "flux, previews": dict(
        recipe="branchgrpo", previews="ode+2", preview_levels="even", advantage="gains", **SHORT
    ),
    **FAMILIES,
}


TRIED = ("flux", "flux, previews", "sd, guidance with gradient", "wan-i2v")


@pytest.mark.parametrize("name", often(LOOPS, TRIED))
def test_a_rollout_uploads_noise_and_nothing_else(gpu, tmp_path, name):
    t = trainer(tmp_path, **LOOPS[name])
    x = t.collect(0)
    in_steps = [transfer for transfer in gpu.transfers if transfer.within("take_step")]
    # where images are scored
    in_steps = [transfer for transfer in in_steps if not transfer.within("preview")]
    assert [transfer.kind for transfer in in_steps] == ["upload"] * len(
        x.tree.plan.stochastic - {x.tree.steps - 1}
    )
    assert all(transfer.within("draw_children") for transfer in in_steps)


def test_a_pruning_step_waits_for_its_rewards_once(gpu, tmp_path):
    t = trainer(tmp_path, recipe="pro-grpo", **FUNNEL)
    plan = t.collect(0).tree.plan
    names = ("prune_or_split", "join_edges")
    in_steps = [transfer for transfer in gpu.transfers if any(map(transfer.within, names))]
    of_engine = [transfer.kind for transfer in in_steps if not transfer.within("own_scores")]
    assert of_engine == ["download", "upload"] * len(plan.prune_at)


@pytest.mark.parametrize("name", often(LOOPS, TRIED))
def test_a_micro_batch_copies_nothing_and_waits_for_nothing(gpu, tmp_path, name):
    t = trainer(tmp_path, **LOOPS[name])
    x = t.collect(0)
    t.credit(x)
    batches = shared_micro_batches(t.learner, x.tree, x.edge_mask)
    counts = []
    for some in (batches[:1], batches):
        gpu.transfers.clear()
        accumulate(t.learner, x, some)
        counts.append(len(gpu.transfers))
    assert len(batches) > 1
    assert counts[0] == counts[1], gpu.transfers


ROWS = torch.tensor([0, 1])
REFUSED = {
    "an index on the GPU into the CPU": lambda x, on_cpu: on_cpu[ROWS.to(GPU)],
    "a gather from the CPU": lambda x, on_cpu: on_cpu.gather(0, ROWS.to(GPU)[None]),
    "a gather by an index on the CPU": lambda x, on_cpu: x.gather(0, ROWS[None]),
    "a sum of both": lambda x, on_cpu: x + on_cpu,
    "a number on the GPU and a vector on the CPU": lambda x, on_cpu: x.sum() * on_cpu,
    "a mask on the CPU": lambda x, on_cpu: x.masked_fill(on_cpu > 0, 0.0),
    "a concatenation": lambda x, on_cpu: torch.cat([x, on_cpu]),
    "a stack of numbers": lambda x, on_cpu: torch.stack([x.sum(), on_cpu.sum()]),
    "numpy": lambda x, on_cpu: x.numpy(),
    "a generator of the CPU": lambda x, on_cpu: torch.randn(
        2, device=x.device, generator=torch.Generator()
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_virtual_device_refuses(what):
    with VirtualDevice():
        x, on_cpu = torch.ones(3, 4, device=GPU), torch.ones(3, 4)
        with pytest.raises(WrongDevice):
            REFUSED[what](x, on_cpu)


def transfers_of(operation) -> list[str]:
    "The kinds of transfers of an operation on a tensor of the GPU."
    with VirtualDevice() as device:
        x = torch.ones(3, 4).to(GPU)
        device.transfers.clear()
        operation(x)
        return [transfer.kind for transfer in device.transfers]


@pytest.mark.parametrize(
    ("operation", "kinds"),
    [
        (lambda x: x.sum().item(), ["wait"]),
        (lambda x: bool(x.isfinite().all()), ["wait"]),
        (lambda x: x.tolist(), ["wait"]),
        (lambda x: x[x > 0], ["wait"]),
        (lambda x: x[ROWS], ["upload"]),
        (lambda x: torch.tensor([1.0], device=x.device), ["upload"]),
        (lambda x: x.cpu(), ["download"]),
        (lambda x: x.to(GPU) + torch.arange(4, device=GPU), []),
        (lambda x: (x * torch.tensor(2.0)).mean(0).repeat_interleave(3), []),
    ],
)
def test_virtual_device_counts(operation, kinds):
    assert transfers_of(operation) == kinds


def test_virtual_device_watches_what_is_computed_again():
    weight = torch.nn.Linear(2, 2)

    def layer(x: Tensor) -> Tensor:
        return weight(x) * torch.ones(2, device=x.device)

    with VirtualDevice():
        x = torch.ones(3, 2).to(GPU).requires_grad_()
        weight.to(GPU)
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
        assert x.grad is not None and x.grad.device == GPU
