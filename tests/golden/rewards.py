"""Write reward_texts.json and reward_pixels.safetensors: what the originals' own code makes of
prompts and pictures.

Run `python tests/golden/rewards.py HPSV2 IMAGEREWARD VIDEOALIGN` with clones of tgxs002/HPSv2
(866735e), THUDM/ImageReward (c1392c6) and KwaiVGI/VideoAlign (219ab9d). `torchvision` here stands
for the real one, which the originals import: its `resize` is Pillow's or torch's, `CenterCrop`
rounds (H − h) / 2, as transforms/functional.py.
"""

import ast
import contextlib
import enum
import gzip
import hashlib
import json
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

HERE = Path(__file__).parent
PROMPTS = [
    "",
    "  Two   spaces,\na line\tand a tab ",
    "Café &amp; bar, 5 &lt; 6: &amp;quot;open&amp;quot;",
    "don’t “quote” — the ﬁrst Ｆｕｌｌ width… schÃ¶n",
    "ÉCOLE İstanbul ΣΟΦΟΣ straße 北京的猫 🦊🏽 naïve cafe\u0301",
    "{braces} 100% <b>bold</b> #tag a_b/c\\d 3.14 I'LL",
    "word " * 300,
]
SIZES = [(37, 211), (211, 37), (300, 451), (45, 320), (12, 12), (7, 9)]
SIDE = 12


def picture(h, w):
    y, x, c = np.mgrid[:h, :w, :3]
    return ((x * x * 3 + y * y * 7 + x * y * 5 + 91 * c) % 256).astype(np.uint8)


class Mode(enum.Enum):
    BICUBIC = "bicubic"


def resize(image, size, mode=Mode.BICUBIC):
    if isinstance(image, torch.Tensor):  # transforms/_functional_tensor.py
        options = dict(mode="bicubic", align_corners=False, antialias=True)
        return torch.nn.functional.interpolate(image[None], list(size), **options)[0]
    w, h = image.size  # transforms/_functional_pil.py
    size = (size, int(size * w / h)) if h <= w else (int(size * h / w), size)
    return image.resize(size[::-1], Image.Resampling.BICUBIC)


def centre_crop(image, side):
    left, top = (int(round((n - side) / 2.0)) for n in image.size)
    return image.crop((left, top, left + side, top + side))


def pad(image, padding, fill=0):
    return torch.nn.functional.pad(
        image, (padding[0], padding[2], padding[1], padding[3]), value=fill
    )


def normaliser(mean, std):
    return lambda x: (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def stand_in():
    "Make a module `torchvision` with what the three originals use of it."
    one = {
        name: types.ModuleType(f"torchvision{name}")
        for name in ("", ".transforms", ".transforms.functional", ".io")
    }
    sys.modules |= {module.__name__: module for module in one.values()}
    t, f = one[".transforms"], one[".transforms.functional"]
    one[""].transforms, one[""].io, t.functional = t, one[".io"], f
    f.resize, f.pad = (lambda i, s, interpolation=None, antialias=True: resize(i, s)), pad
    t.InterpolationMode, t.RandomResizedCrop = Mode, None
    t.Compose = lambda steps: lambda x: [x := step(x) for step in steps][-1]
    t.Resize = lambda n, interpolation=None: lambda image: resize(image, n)
    t.CenterCrop = lambda n: lambda image: centre_crop(image, n)
    t.ToTensor = lambda: (
        lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    )
    t.Normalize = normaliser


def functions(path, names, **known):
    "Return the functions of a file without its imports."
    space = dict(known)
    for node in ast.parse(path.read_text()).body:
        if getattr(node, "name", None) in names or isinstance(node, ast.Assign):
            with contextlib.suppress(NameError):
                exec(compile(ast.Module([node], []), str(path), "exec"), space)
    return space


def clip_words(folder):
    "OpenAI's tokeniser, as hpsv2 copies it, with the first 400 merges of its vocabulary."
    import importlib.util

    source = folder / "hpsv2/src/open_clip"
    merges = (
        gzip.decompress((source / "bpe_simple_vocab_16e6.txt.gz").read_bytes())
        .decode()
        .split("\n")[1:401]
    )
    short = Path(tempfile.mkdtemp()) / "merges.gz"
    short.write_bytes(gzip.compress("\n".join(["#", *merges]).encode()))
    spec = importlib.util.spec_from_file_location("tokenizer", source / "tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._tokenizer = module.SimpleTokenizer(str(short))
    clean = [module.whitespace_clean(module.basic_clean(p)).lower() for p in PROMPTS]
    ids = [row[: row.index(max(row)) + 1] for row in module.tokenize(PROMPTS).tolist()]
    return {"merges": merges, "clean": clean, "ids": ids}


def bert_words():
    """The tokeniser in Python that ImageReward's transformers had, with a vocabulary of single
    letters."""
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    letters = [chr(c) for c in range(33, 127) if not chr(c).isupper()] + list("北京的猫’“”—…ß")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *("##" + x for x in letters),
        "word",
        "cafe",
    ]
    file = Path(tempfile.mkdtemp()) / "vocab.txt"
    file.write_text("\n".join(words))
    tokenizer = BertTokenizerLegacy(str(file))
    tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    options = dict(padding="max_length", truncation=True, max_length=35)  # ImageReward.py, score
    return {"vocabulary": words, "ids": [tokenizer(p, **options)["input_ids"] for p in PROMPTS]}


def video_numbers(folder):
    """VideoAlign's question, number of frames and size of a frame, with the settings of its
    train.sh."""
    import math

    asked = functions(folder / "prompt_template.py", {"build_prompt"})
    seen = functions(
        folder / "vision_process.py",
        {"round_by_factor", "ceil_by_factor", "floor_by_factor", "smart_resize", "smart_nframes"},
        math=math,
    )
    texts = [asked["build_prompt"](p, ["VQ", "MQ", "TA"], "detailed_special") for p in PROMPTS]
    clips = [
        (total, fps) for total in (2, 3, 5, 9, 33, 81, 121, 2000) for fps in (8, 16, 23.976, 24)
    ]
    frames = [[t, fps, seen["smart_nframes"]({"fps": 2.0}, t, fps)] for t, fps in clips]
    sizes = [
        (480, 832),
        (832, 480),
        (720, 720),
        (32, 32),
        (100, 1000),
        (1080, 1920),
        (37, 211),
        (336, 588),
        (10, 900),
    ]
    limits = dict(factor=28, min_pixels=seen["VIDEO_MIN_PIXELS"], max_pixels=200704)
    found = [[h, w, *seen["smart_resize"](h, w, **limits)] for h, w in sizes]
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    return {"question_sha256": digests, "frames": frames, "sizes": found}


def texts(hps, imagereward, videoalign):
    found = {"prompts": PROMPTS, "clip": clip_words(Path(hps)), "bert": bert_words()}
    found |= {"videoalign": video_numbers(Path(videoalign)), "sizes": SIZES, "side": SIDE}
    (HERE / "reward_texts.json").write_text(json.dumps(found, ensure_ascii=False) + "\n")


def pixels(hps, imagereward, videoalign):
    stand_in()
    # without its __init__, which imports all of it
    package = sys.modules["open_clip"] = types.ModuleType("open_clip")
    package.__path__ = [str(Path(hps) / "hpsv2/src/open_clip")]
    from open_clip.transform import image_transform

    rule = functions(
        Path(imagereward) / "ImageReward/ImageReward.py", {"_transform", "_convert_image_to_rgb"}
    )
    rule |= vars(sys.modules["torchvision.transforms"]) | {"BICUBIC": Mode.BICUBIC}
    found = {}
    for h, w in SIZES:
        image = Image.fromarray(picture(h, w))
        found[f"imagereward.{h}x{w}"] = rule["_transform"](SIDE)(image)
        if max(h, w) != SIDE:  # hpsv2 does not pad what has the size
            found[f"hps.{h}x{w}"] = image_transform(SIDE, is_train=False, resize_longest_max=True)(
                image
            )
    save_file(
        {key: value.contiguous() for key, value in found.items()},
        HERE / "reward_pixels.safetensors",
    )


if __name__ == "__main__":
    texts(*sys.argv[1:])
    pixels(*sys.argv[1:])
