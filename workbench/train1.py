import sys; sys.path.insert(0, "tools")
from compose import compose
D, K, S, G = (f"nbs/training/{x}.ipynb" for x in ("20_distributed", "04_ranks", "13_stops", "22_signals"))
A, Z, L, V = (f"nbs/training/{x}.ipynb" for x in ("18_activations", "18_speed", "04_model", "21_averages"))
compose("nbs/training/01_processes.ipynb", "training.processes", """
# Processes that work together
> Processes share prompts, several may share one tree, and all of them fail and stop together.

Started on several GPUs, a run is one process per GPU. `ranks_per_prompt` of them form a group, and a group has its own
prompts: with 1, every process has its own.
What one process notices, a signal or an error, all must act on at the same point: a process that stops alone leaves the
others waiting in their next exchange.
""", """
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object, reduce
from torch import Tensor

from branchgrpo.option_values import variable
from branchgrpo.training.config import Settings
from branchgrpo.training.signals import Preempted
""", """
from types import SimpleNamespace

from fastcore.test import test_eq, test_fail

from branchgrpo.policy import GaussianFlow
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.resolve import resolve
""", [
"## The launch\nOne kind of launch is right: one process per GPU, started by torchrun or accelerate. Accelerate's own FSDP and DeepSpeed would wrap the model a second time, so they are refused.",
(D, "7cbaf8f4"), (D, "377b18af"),
"## Groups that share prompts",
(K, "c9a5175f"), (K, "ad2accf7"),
"Four processes with four prompts: each has its own, or two processes share two of them.",
(K, "80e716a9"), (K, "c920d8de"), (K, "a10c7c18", [("distributed.new_group", "dist.new_group"), ("distributed.all_gather", "dist.all_gather")]),
"## Exchanges\nThe largest number, a flag that any process may set, and a decision of the main process.",
(D, "fe1b67f3"), (D, "69cc93b8"), (D, "c528218e"), (D, "b0d16c74"), (D, "c6a23a91"),
"## An error of one process is an error of all\nWhat can fail on one process alone, a reward above all, runs inside `together`: the processes first count their errors, and then go on or stop together.",
(K, "fd9cd1c8"), (K, "badefbb7"),
"In one process an error passes as it is.",
(K, "8bf68f42"),
"## A process that is gone\nA process that was killed can report nothing. Its connections close, and the next exchange of the others fails; one that is stuck keeps them waiting for `timeout_minutes`. Both errors come from deep inside PyTorch, and this is the line that a user sees.",
(K, "ca036853", [("distributed.DistError", "dist.DistError"), ("def of_another", "def lost_process_error"), ("started again, the run goes on from its last checkpoint", "started again, the run goes on from its last checkpoint")]), (K, "6cedf2a2", [("of_another(", "lost_process_error(")]),
"## A signal stops all processes\nWhether a process was asked to stop is checked often, also while a GPU works. The processes' hosts agree on it by a group of their own, over the network: no GPU waits. A rollout and an evaluation check before each step, scoring between chunks of images, the first optimiser step between micro-batches ([signals](02_signals.ipynb) has the table).",
(D, "1c2f2ec2"), (D, "fedeba48"), (D, "357c6537"), (S, "4bf01829"), (S, "53379772"),
"With one process, no other is asked:",
(S, "e429205b"),
"**Change this, and see it break.** Raise the error inside `together` at once instead of counting first: with two processes of which one fails, the other waits for it until `timeout_minutes` are over.",
])
compose("nbs/training/06_speed.ipynb", "training.speed", """
# Faster, or smaller: the same numbers
> Compiled blocks, attention kernels, TensorFloat-32, activations computed again, and weights sharded over many GPUs.

None of these changes the equations; kernels may round differently, and TensorFloat-32 rounds more.

| setting | what it does | what it costs |
|---|---|---|
| `compile` | compiles each class of repeated blocks once (regional compilation) | seconds at the first calls |
| `attention` | sets the attention kernel by diffusers' name | a package, for some kernels |
| `tf32` | multiplies float32 matrices in TensorFloat-32 on a GPU | 13 bits of the mantissa |
| `checkpoint_blocks: n` | with `gradient_checkpointing`, computes only every n-th block again | memory for the others |
| `sharding` | keeps a slice of every weight on each GPU | exchanges between GPUs |
| (always) | adapters under autocast do not cast their inputs to float32 and back | nothing: the bits are the same |
""", """
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from branchgrpo.option_values import variable
from branchgrpo.registry import unknown
from branchgrpo.training.config import Settings
""", """
import tempfile

from diffusers import FluxTransformer2DModel
from fastcore.test import test_close, test_eq, test_fail

from branchgrpo.backbones.base import load
from branchgrpo.policy import GaussianFlow
from branchgrpo.testbed.quiet import quiet
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.model import make_trainable
from branchgrpo.training.trainer import Trainer

quiet()
""", [
"## What is checked before anything is loaded",
(Z, "f40278cc"), (Z, "f50beee1"), (Z, "21192601"),
"## The blocks of a denoiser\nA diffusers model declares the classes of the blocks that it repeats: `_repeated_blocks`, or `_no_split_modules` where a family declares only those that must not be split.",
(D, "46250ab5"), (D, "6f41aac0", [("from diffusers import FluxTransformer2DModel\n\n", "")]), (Z, "4502b22b"), (Z, "80c81b88"), (Z, "4f413524"),
"## Compilation\nAll blocks of a class share the compiled code. A graph is compiled per class, batch size and mode (with and without gradient); more graphs than the limit are an error.",
(Z, "4669dd4a"), (Z, "bd8eb36a"),
"The number of graphs stays constant after the first iteration, with an adapter, checkpointing and bf16 too, and for a recipe that trains other edges at every iteration, since its batches are filled up (`pad_batches`). Backend `eager` captures the graphs and executes PyTorch's own kernels, so that nothing rounds differently:",
(Z, "a6b02174"), (Z, "8087256c"),
"## Attention kernels and TensorFloat-32",
(Z, "2c75206d"), (Z, "ebe8ce46"), (Z, "e53918dc"),
"## Activations: every n-th block is computed again\nCheckpointing of all blocks (`gradient_checkpointing`) makes a backward pass a third slower. `checkpoint_blocks: 2` computes every second block again and keeps what the others computed: half of that price, more memory. diffusers calls one function for every block whose activations are not kept. Ours numbers the blocks in the order of their first calls, and checkpoints every n-th.",
(A, "6557f84d"), (A, "3b991f4f"),
"The gradient is the same for every n. The fewer blocks are computed again, the more is kept; with these few blocks, n = 2 and n = 3 keep the same:",
(A, "b1f15b5f"), (A, "6cf943d6"), (A, "744dd8e7"),
"## Adapters under autocast\nAn adapter casts its input to float32, its own dtype; autocast casts it back at once. Without the first cast the bits are the same, and the second copy is not kept for the backward pass.",
(A, "75612c50"), (A, "0fcfd435"), (A, "92cec171"),
"## All of them on a policy",
(Z, "7d02fa39"), (Z, "1925d3a5"), (Z, "f3f70cca"),
"## Weights sharded over many GPUs\nA model of $N$ parameters needs $20N$ bytes to be trained in full: weights, gradient, AdamW's two moments and the averaged weights, in float32. For FLUX.1-dev's 11.9 billion that is 238 GB, more than one GPU has. `fully_shard` of PyTorch (FSDP2) splits all of it over the processes; before a block runs, its weights are gathered, and after its backward its gradient is summed and split again.\n\n| setting | weights, gradient, AdamW | gradient between processes | used for |\n|---|---|---|---|\n| `sharding: none` | whole, on every GPU | averaged at the last micro-batch (DDP) | an adapter |\n| `sharding: full` | $1/n$ of $n$ GPUs | reduced at every micro-batch | full fine-tuning |\n| `sharding: hybrid` | $1/g$ of the $g$ GPUs of a node | reduced in the node, then over nodes | full fine-tuning on several nodes |",
(D, "b7f1a9c2"), (D, "0c1fcbdb"),
"The blocks' inputs are not cast: positions and their sines stay float32. The root casts its inputs, as a pipeline in bfloat16 does, and returns float32.",
(D, "d05a4c59"),
"`fill_sharded` gives a sharded module its weights from the first process, which alone has read them; the others may hold empty parameters.",
(D, "d93571f9", [("def fill(", "def fill_sharded(")]),
"A rollout calls the denoiser a hundred times and changes no weight. So the weights are gathered at the first call and stay gathered until the rollout ends. Later calls wait for no other process.",
(D, "faa85d1e"), (D, "f95f439e"),
"A slice of a parameter is a `DTensor`. What works element by element, such as averaging, works on slices.",
(D, "35a3c0a2"), (D, "980f7f25"), (D, "8fe62a99"),
"A group of one process, on the CPU: the same outputs, and slices that are the wholes.",
(D, "bf2a3717", [("test_eq(flux(**rows)[0], before)", "assert torch.equal(flux(**rows)[0], before), \"the same outputs\"")]),
"What two and four processes do together is tested in `tests/test_sharding.py`: the same trees, gradients and checkpoints as one process.\n\n**Change this, and see it break.** In `fill_sharded`, pass `state` instead of `dict(state)`: the function of PyTorch empties the table, the second module (the KL reference) gets nothing, and `tests/test_sharding.py` fails. Or remove `dynamic=False` and the limit in `compile_blocks`: PyTorch then compiles again and again for sizes that vary.",
])
compose("nbs/training/03_learner.ipynb", "training.learner", """
# What is trained
> Full fine-tuning or an adapter, AdamW, averaged weights, and the policy before training as a reference.
""", """
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from branchgrpo.backbones.base import declared, empty_denoiser, family, largest_rank, load, save_memory
from branchgrpo.backbones.base import resolve as folder_of
from branchgrpo.backbones.loading import is_reader
from branchgrpo.rollout import nothing
from branchgrpo.training.config import Settings
from branchgrpo.training.distributed import check_launch, check_processes, fill, local, mesh_of, plain_class, shard
from branchgrpo.training.ranks import check_ranks
from branchgrpo.training.speed import compile_blocks, speed_up
""", """
from fastcore.test import test_close, test_eq, test_fail

from branchgrpo.policy import GaussianFlow
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.resolve import resolve
""", [
"## Processes and precision", (L, "a7fc33ac"),
"## The policy\nA name is loaded; an object is used as it is.",
(L, "339b6415"), (L, "d0e967e0"), (L, "60bce5a7"), (L, "2b731c0c", [("lambda: check_rank(policy, 4)", "lambda: check_rank(GaussianFlow(), 4)")]),
"## Trained parameters", (L, "ee3ef8f9"),
"## Averaged weights\nEvery `ema_every` optimiser steps the average $\\bar\\theta$ moves by the share that the decay $d$ leaves:\n\n$$\\bar\\theta \\leftarrow d\\,\\bar\\theta + (1 - d)\\,\\theta.$$\n\nDanceGRPO's decay is constant. Flow-GRPO's begins lower (`ema_ramp`): after $n$ steps it is $\\min\\left(d, (1 + n)/(10 + n)\\right)$. The averages lie beside the weights, on their device and in their slices.",
(V, "0db15877"),
"A constant decay is reached at the first step, and the average of a jump follows $1 - d^n$:",
(V, "80da7836"),
"With a ramp and an average at every eighth step the numbers are those of Flow-GRPO's `EMAModuleWrapper` (`flow_grpo/ema.py`):",
(V, "0b7cf19f"),
"## The learner",
(L, "40050492"), (L, "e05761ab"), (L, "c75e221f"),
"The reference of the KL term: a frozen copy after full fine-tuning; the same model with its adapter off for LoRA.",
(L, "7bedbb38"), (L, "a1d4a820"),
"On several GPUs, DDP wraps the module, or the module is sharded. Sharding comes before the optimiser, so AdamW's moments and the averages are slices too.",
(L, "1e285509"), (L, "cd94d480"), (L, "ef83dfbf"), (L, "1b2fc01d"), (L, "edc45dbc"),
"The reference does not move with the policy:",
(L, "920b8a4c"),
"**Change this, and see it break.** Return `policy` itself from `frozen_copy`: the KL term is 0 at every iteration, and nothing holds the policy near its start. Or leave out `.clone()` in `AveragedWeights`: the average is the parameter itself and follows it at once.",
])
