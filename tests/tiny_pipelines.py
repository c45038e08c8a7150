"""Tiny pipelines of diffusers with random weights, of families that have no class here and of some
that have one.

`tiny_pipelines.json` says what they consist of: classes and configurations after diffusers' own
tests (Apache 2.0). Tokenizers spell bytes, so nothing is fetched."""

import importlib
import json
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'text' %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = ["<|im_start|>", "<|im_end|>"]
PICTURES = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL = ["<pad>", "</s>", "<unk>", "<s>", *TURNS, *PICTURES]
DENOISERS = ("transformer", "unet", "prior", "transformer_2")
# these draw at a million pixels, whatever the picture's size
OF_A_MILLION = ("pipeline_qwenimage_edit", "pipeline_qwenimage_edit_plus")


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


class PictureProcessor(transformers.Qwen2VLProcessor):
    "Qwen's processor of texts and pictures, without that of clips, which needs torchvision."

    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)

    def save_pretrained(self, save_directory, **more):
        self.tokenizer.save_pretrained(save_directory)
        self.image_processor.save_pretrained(save_directory)


def picture_processor():
    pictures = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    return PictureProcessor(pictures, tokenizer("$A", 512), None, chat_template=CHAT)


class Allowing(ModelMixin, ConfigMixin):
    "A checker of safety that lets everything pass."

    def __init__(self):
        super().__init__()
        self.register_buffer("place", torch.zeros(1), persistent=False)

    def check_text_safety(self, prompt):
        return True

    def check_video_safety(self, frames):
        return frames


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


OWN = {"Tokenizer": tokenizer, "Processor": picture_processor, "Allowing": Allowing}


def class_named(name, pipeline):
    "Return a class of diffusers or transformers, or of the module of a pipeline."
    for place in (transformers, diffusers, importlib.import_module(pipeline.__module__)):
        if hasattr(place, name):
            return getattr(place, name)
    package = importlib.import_module(pipeline.__module__.rpartition(".")[0])
    return getattr(package, name)


def part_of(pipeline, name, described):
    "Return a part of a pipeline: a number, a name, or the module that `described` describes."
    if not isinstance(described, dict) or "class" not in described:
        return described
    config = described.get("config", {})
    if described["class"] in OWN:
        return OWN[described["class"]](**config)
    kind = class_named(described["class"], pipeline)
    if hasattr(kind, "config_class") and issubclass(kind, transformers.PreTrainedModel):
        return kind(kind.config_class(**config)).eval()
    made = kind(**config)
    for method in described.get("then", ()):
        getattr(made, method)()
    if name in DENOISERS:
        return seeded(made, 2 if name == "transformer_2" else 1)
    return made.eval() if isinstance(made, torch.nn.Module) else made


def picture(width, height, hue=0):
    "Return a picture of a gradient."
    x = torch.linspace(0, 255, width).expand(height, width)
    y = torch.linspace(0, 255, height)[:, None].expand(height, width)
    pixels = torch.stack([x, y, torch.full_like(x, 40.0 * hue)], 2)
    return Image.fromarray(pixels.round().byte().numpy())


def argument_of(value):
    "Return an argument of a pipeline's call, with pictures in place of their sizes."
    if isinstance(value, dict) and "picture" in value:
        return picture(*value["picture"])
    return [argument_of(one) for one in value] if isinstance(value, list) else value


RECORD = json.loads((Path(__file__).parent / "tiny_pipelines.json").read_text())
# name -> arguments of a small image or clip
PIPELINES = {
    name: {key: argument_of(value) for key, value in record["call"].items()}
    for name, record in RECORD.items()
}


def make(name, seed=0):
    "Return a tiny pipeline of PIPELINES; the caller's random numbers stay as they are."
    record = RECORD[name]
    kind = getattr(diffusers, record["pipeline"])
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        parts = {key: part_of(kind, key, value) for key, value in record["parts"].items()}
    module = importlib.import_module(kind.__module__)
    if kind.__module__.rpartition(".")[2] in OF_A_MILLION:
        count = 3 if kind.__module__.endswith("edit") else 2
        module.calculate_dimensions = lambda area, ratio: (64, 64, None)[:count]
    made = kind(**parts)
    for key, value in record.get("attributes", {}).items():
        setattr(made, key, [tuple(one) for one in value])
    return made
