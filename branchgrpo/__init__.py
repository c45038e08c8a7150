"""Tree-structured GRPO for diffusion and flow models: every method is a plan over one tree engine.

The public names are loaded when they are first used, so `import branchgrpo` is fast.
"""

import logging
import warnings
from importlib import import_module

__version__ = "0.2.0"

_PUBLIC = {
    # the method
    "RolloutPlan": "plan",
    "Window": "windows",
    "Tree": "tree",
    "Noise": "noise",
    "rollout": "rollouts",
    "replay": "rollouts",
    "Predictor": "rollouts",
    "Judge": "rollouts",
    "flow_sigmas": "samplers",
    "flow_transition": "transition",
    "ddim_transition": "transition",
    "TRANSITIONS": "transition",
    "sibling_noise": "noise",
    "fuse_rewards": "fusion",
    "depthwise_advantages": "credit",
    "estimate_advantages": "credit",
    "CreditOptions": "credit",
    "ADVANTAGES": "credit",
    "PRUNINGS": "pruning",
    "keep_edges": "pruning",
    "select_max_variance": "selection",
    "SELECTIONS": "selection",
    "edge_loss": "objective",
    "RATIOS": "objective",
    "STEP_WEIGHTS": "training.credit",
    "Policy": "policy",
    "GaussianFlow": "policy",
    "plan_cost": "plan",
    "RECIPES": "recipes",
    "plan_of": "planning",
    "process_of": "planning",
    # what surrounds it
    "PromptSet": "prompts",
    "PROMPT_SETS": "prompts",
    "load_prompts": "prompts",
    "REWARDS": "rewards.names",
    "load_reward": "rewards.names",
    "FAMILIES": "backbones.names",
    "BACKBONES": "backbones.names",
    "load_backbone": "backbones.loading",
    "TrainConfig": "training.config",
    "Trainer": "training.trainer",
    "Callback": "training.trainer",
    "Run": "training.runs",
    "view_run": "viewing.page",
    "compare": "analysis.compare",
    "sample": "evaluation.sampling",
    "evaluate": "evaluation.evaluate",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name):
    "Load a public name from its module at its first use."
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__():
    return sorted(__all__)


# Messages of other libraries that help no user: the images stay the same, and an empty list names
# no module.
_NO_NEWS = (
    "requires torchvision (not installed); falling back to",
    "should be kept in float32: []",
)


def _is_news(record: logging.LogRecord) -> bool:
    "Return whether a library's message helps a user."
    text = record.getMessage()
    return not any(part in text for part in _NO_NEWS)


for _name in ("transformers.utils.import_utils", "diffusers.models.modeling_utils"):
    logging.getLogger(_name).addFilter(_is_news)

# In bf16 on a CPU, torch says that it takes a slower rms_norm.
warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
