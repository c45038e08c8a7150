import sys; sys.path.insert(0, "tools")
from compose import compose
F, M, O, T, C = (f"nbs/training/09_checkpoint{x}.ipynb" for x in ("_folders", "_manifest", "_origin", "_tensors", "s"))
compose("nbs/training/10_checkpoints.ipynb", "training.checkpoints", """
# Checkpoints
> Weights, optimiser, averages and the iteration are all that a killed run needs to go on, to the bit.

Every draw has an address, so no state of a random generator is saved. A checkpoint is a folder:

| name | what it is |
|---|---|
| `checkpoints/000010/` | a checkpoint of iteration 10: safetensors files, and the manifest `progress.json` |
| `000010.tmp`, `.old`, `.gone` | being written, being replaced, being deleted; the next start ends what a kill interrupted |
| `000010.damaged` | set aside at a start; it is neither counted nor deleted |

All processes write their slices at the same time, and any number of processes can read them.
A folder has its name only when everything is in it, so a reader sees a whole checkpoint or none. It is read only if
all its bytes are those that were written, and if it belongs to this run. If one is damaged, the checkpoint before it is
used; so more than one is kept.
""", """
import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import branchgrpo
from branchgrpo.training.config import Settings
from branchgrpo.training.distributed import any_process, from_main, local
from branchgrpo.training.files import (
    delete,
    recover,
    remove_folder,
    remove_temporaries,
    replace_folder,
    to_disk,
    write_text,
)
from branchgrpo.training.model import Learner
""", """
import tempfile

from accelerate import Accelerator
from fastcore.test import test_eq, test_fail

from branchgrpo.policy import GaussianFlow
from branchgrpo.training.config import TrainConfig
from branchgrpo.training.model import make_learner
from branchgrpo.training.resolve import resolve
""", [
"## The manifest finds damage before a file is loaded\nA disk may lose a file, cut it short, or give back other bytes. The manifest, `progress.json`, is written last. It holds how far the run had come, the size and the SHA-256 of every file, and a digest of itself. SHA-256 is fast where the processor has instructions for it, and `sha256sum` checks it without this package. Several threads read the files at once.",
(M, 5, [("def digest_of", "def file_digest_of")]), (M, 6, [("digest_of(", "file_digest_of(")]), (M, 10), (M, 11), (M, 12), (M, 13), (M, 14),
"A whole checkpoint of another format is not damaged. It is refused, and the message names the version that wrote it.",
(M, 16),
"Sizes are compared wherever a checkpoint is looked at, digests before one is loaded. Only a file that is missing or has other content is damage. A file that cannot be opened (too many open files, no permission) is an error: the same checkpoint may be sound in a minute.",
(M, 18), (M, 19), (M, 20),
"A folder as it is written, damaged in four ways, and in another format:",
(M, 22, [("(folder / \"a.safetensors\").write_text(\"all of them\")\nwrite_manifest", "folder = Path(tempfile.mkdtemp())\n(folder / \"a.safetensors\").write_text(\"all of them\")\nwrite_manifest")]), (M, 24),
"## The folder gets its name when all is in it",
(F, 5), (F, 6), (F, 17), (F, 18),
"A process that only looks at a run skips what is damaged. It renames nothing: the run may be training. The process that goes on with a run renames a damaged checkpoint.",
(F, 4), (F, 9), (F, 11), (F, 12), (F, 20),
"Besides the newest few, one of each `keep_every` iterations is kept.",
(F, 14), (F, 15),
"## A checkpoint belongs to one recipe and one model\nA checkpoint may be copied by hand, or read by a later version of the code. Each difference that matters is found before a weight is read, and is one line. A checkpoint of other numbers is refused: the rest of the run would be neither what the old version computes nor what this one does.",
(O, 4), (O, 6), (O, 7), (O, 8), (O, 9),
"## Tensors are safetensors files\nPyTorch's distributed checkpoint (DCP) has two file formats. Its own keeps an index in a pickle, and whoever loads a pickle runs what is in it. The other is Hugging Face's safetensors: names, shapes, numbers.\n\nA file's tensors are put together in memory before they are written. One file for each process would double the memory that a checkpoint needs; files of about 1 GiB need 1 GiB more.",
(T, 5), (T, 6), (T, 7), (T, 8),
"The thread that writes a process's files also takes their digests, so that the training does not wait for them.",
(T, 10), (T, 11),
"DCP reports what failed on one process to all, as one exception that is no `Exception`. The error itself is raised in its place, for example a full disk's `OSError`.",
(T, 13), (T, 14), (T, 16), (T, 17), (T, 18), (T, 19), (T, 20),
"What is read is what was written, of any shape and precision. A file of another kind is refused.",
(T, 22), (T, 24),
"## What is saved\nThree tables of tensors with the parameters' names. They are the live tensors: reading writes into them.",
(C, 5), (C, 7), (C, 8), (C, 9), (C, 12, [("def facts_of", "def checkpoint_facts")]),
"## Saving\nWith `checkpoint_async`, the state is copied to the CPU and a thread writes it while the training goes on. The folder is renamed at the first check after all processes have written.",
(C, 11), (C, 14), (C, 15),
"If a file cannot be written, what there is of the checkpoint is deleted, so that a full disk has room again. The checkpoints before it stay.",
(C, 17), (C, 18, [("facts_of(", "checkpoint_facts(")]), (C, 13), (C, 19), (C, 20),
"## Loading\nThe main process chooses the checkpoint for all. Each process reads its slices.",
(C, 22), (C, 23),
"A learner that was trained, saved and loaded into a fresh one takes the same next step, to the bit; written in a thread or not:",
(C, 25), 
"Weights that are not finite are never saved:",
(C, 27),
"**Change this, and see it break.** Leave out `optimizer` in `state_of`: AdamW starts with empty moments, and the resumed run differs from the whole one at its first step. Or let `seal_of` leave nothing out: the digest would have to contain itself, and no manifest is sound.",
])
V, R = "nbs/training/01_versions.ipynb", "nbs/training/01_runs.ipynb"
B, H = "nbs/training/11_blocks.ipynb", "nbs/training/11_held_out.ipynb"
P, Q = "nbs/19_prompts.ipynb", "nbs/19_prompt_files.ipynb"
import re, json
def sub(path, pattern, new):
    d = json.load(open(path))
    for c in d["cells"]:
        if c["cell_type"] == "code": c["source"] = re.sub(pattern, new, "".join(c["source"])).splitlines(keepends=True)
    open(path, "w").write(json.dumps(d, indent=1, ensure_ascii=False) + "\n")
sub("nbs/training/10_checkpoints.ipynb", r"(?<![\w./\"])checkpoints\(", "checkpoints_of(")

compose("nbs/training/09_runs.ipynb", "training.runs", """
# A run's folder
> A run is a folder that holds its settings, what happened, and the result.

| file | holds |
|---|---|
| `run.json` | settings, versions of packages, machine, state |
| `metrics.jsonl` | one row per iteration |
| `evaluations.jsonl`, `samples/` | one row and one image per evaluation |
| `checkpoints/000010/` | what a killed run goes on from |
| `model/` or `lora/` | the result |
| `.lock` | who trains it, while it is trained |
""", """
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import branchgrpo
from branchgrpo.refusals import EVERYWHERE, naming
from branchgrpo.registry import first_of, reason, shown
from branchgrpo.training.files import append_jsonl, is_temporary, read_jsonl, write_jsonl, write_text
from branchgrpo.training.output_paths import check_output, check_path
from branchgrpo.training.run_lock import LOCK
""", """
import tempfile

from fastcore.test import test_eq, test_fail

from branchgrpo.prompts import PromptSet
""", [
"## Rows of numbers",
(R, 4), (R, 5), (R, 6), (R, 7), (R, 8), (R, 9), (R, 10, [("def recorded(", "def recorded_run(")]),
"## What a run was made with\nA run records the versions of its packages, the commit of this package, and its machine. They do not decide whether a run is found again; they show where two runs may differ. Containers of GPU machines often have no git.",
(V, 4), (V, 8), (V, 5), (V, 7), (V, 9),
"## Opening a run\nThe same settings in the same folder continue the run, also to more iterations. Other settings are refused, so that nothing is lost.",
(R, 12), (R, 13, [("recorded(path", "recorded_run(path")]), (R, 14, [("recorded(path", "recorded_run(path")]),
"A prompt file that has changed is refused too: the runs before and after would be two experiments.",
(R, 16, [("def facts_of", "def prompt_facts")]), (R, 17, [("facts_of(", "prompt_facts(")]), (R, 18, [("facts_of(", "prompt_facts(")]), (R, 19), (R, 20, [("facts_of(", "prompt_facts(")]), (R, 21),
"What is refused, and what is not:",
(R, 22),
"**Change this, and see it break.** Remove `rewind`: a killed run that goes on has two rows for some iterations.",
])
compose("nbs/basics/05_prompts.ipynb", "prompts", """
# Prompts
> A set of prompts to train and to test on, by name: of the testbed, of the papers, of a file or folder, or of the hub.

| what | how it is named |
|---|---|
| the digits testbed | `digits`, `digit-pairs`, `clips`; for tuning `digit-pairs-tuning`, `clips-tuning` |
| the papers' sets | `hpdv2`, `pickapic`, `drawbench`, `partiprompts`, `geneval`, `t2i-compbench` |
| a file | `prompts.txt` (one prompt per line) or `prompts.jsonl` (`prompt`, and other fields: `image`, GenEval's `include`, …) |
| a folder | `train.txt` and `test.txt` (or `.jsonl`) in it |
| a data set of the hub | `owner/name` or `owner/name:column`, read by `datasets` |
| your own | a `PromptSet`, a list of texts, or an entry of the table `PROMPT_SETS` |
""", """
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchgrpo.registry import Registry, reason, shown, unknown
""", """
import tempfile

import datasets
from fastcore.test import test_eq, test_fail
from PIL import Image

datasets.disable_progress_bars()
""", [
"## A prompt set",
(Q, 5), (Q, 6), (Q, 7),
"## From one file\nA message about a file names the file, and the line if one is wrong.",
(Q, 9), (Q, 10), (Q, 11), (Q, 12), (Q, 13),
"## From rows to a set\nThe images of a `.jsonl` file lie beside it, and all have one size.",
(Q, 15), (Q, 16), (Q, 17), (Q, 18), (Q, 19),
"## From a file or a folder\nA file gives one list for both train and test. In a folder with only one of the two files, it serves as both.",
(Q, 21), (Q, 22), (Q, 23), (Q, 24, [("from PIL import Image\n\n", "")]),
"## From a data set of the hub\nOr from a local folder in the layout of `datasets`.",
(P, 7), (P, 8), (P, 10, [("import datasets\n\ndatasets.disable_progress_bars()\nfolder = Path(tempfile.mkdtemp())\n", "")]),
"## The papers' sets\nThey are looked for under `$BRANCHGRPO_DATA` (or `data/`) first, as a folder or a file of that name, then on the hub.",
(P, 12), (P, 13),
"## By name\nAn entry of the table is a `PromptSet` or a function that returns one. Those of the testbed are imported at first use.",
(P, 5), (P, 15), (P, 16, [("def is_hub_name", "def is_data_set_name")]), (P, 17, [("is_hub_name", "is_data_set_name"), ("n in (\"owner/data\", \"owner/data:text\", \"a/b.txt\", \"../a/b\")", "n in (\"owner/data\", \"owner/data:text\", \"a/b.txt\", \"../a\")")]), (P, 18), (P, 19), (P, 20, [("is_hub_name", "is_data_set_name")]), (P, 21), (P, 22, [("assert load_prompts(digits) is digits", "assert load_prompts(own := PromptSet([\"a cat\"], [\"a dog\"])) is own")]),
"A path, a folder and a paper's set in `$BRANCHGRPO_DATA`:",
(P, 24, [('two = folder / "hpdv2"', 'folder = folder / "data"\ntwo = folder / "hpdv2"'), ("two.mkdir()", "two.mkdir(parents=True)")]),
"What is missing gives one line:",
(P, 26),
"Your own set under a name:",
(P, 28),
"**Change this, and see it break.** Try `is_data_set_name` before `is_path` in `load_named`: the folder `data/hares` of your own is then looked for on the hub. Or read with `encoding=\"utf-8\"` in `read_lines`: the first prompt of a file from Windows then begins with an invisible mark, and the test of `windows.txt` fails.",
])
