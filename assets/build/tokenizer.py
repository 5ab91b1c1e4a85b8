"""Byte-level BPE tokenizer and chat template in Qwen2.5-VL's format, trained on our templates.

In: the question templates and a little English. Out: tokenizer.json, tokenizer_config.json and
chat_template.jinja in the model folder. Digits never merge (Qwen2's pre-tokenizer splits them)
and every byte has a token, so any text can be encoded.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from assets.build import questions

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NUM_BPE_TOKENS = 568

ENGLISH = """
user assistant system The quick brown fox jumps over the lazy dog. This is a small model that
reads digits in a picture. What is in the image? Please look at the picture and describe it.
There is one, there are two, and there are three. Yes, it is. No, it is not. Which of them is the
best answer to the question? You can see a number on the left and a number on the right. I would
like to know how many of these are here, where they are and what they mean. Thank you for that.
one two three four five six seven eight nine zero first second third same even odd
"""

CHAT_TEMPLATE = """\
{%- set images = namespace(n=0) -%}
{%- set videos = namespace(n=0) -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{%- set images.n = images.n + 1 -%}
{%- if add_vision_id -%}{{- 'Picture ' ~ images.n ~ ': ' -}}{%- endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{%- set videos.n = videos.n + 1 -%}
{%- if add_vision_id -%}{{- 'Video ' ~ videos.n ~ ': ' -}}{%- endif -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def training_texts(seed: int) -> list[str]:
    """Questions as they will be asked, plus the English paragraph."""
    rng = np.random.default_rng(seed)
    texts = [ENGLISH, "system", "user", "assistant", *questions.LABELS, "same"] * 20
    for index in range(4000):
        num_images = 1 + index % 3
        tasks = questions.IMAGE_TASKS if num_images > 1 else questions.IMAGE_TASKS[:-1]
        rows = [questions.draw_row(rng, 4, "read") for _ in range(num_images)]
        turn = questions.ask(rng, questions.pick(rng, tasks), rows, num_images - 1)
        placed = questions.place_images(rng, turn, num_images)
        texts += [*placed.prompt.split(questions.IMAGE_MARK), placed.answer]
        texts.append(questions.ask_text(rng).prompt)
    return texts


def train_bpe(seed: int) -> Tokenizer:
    """A byte-level BPE with Qwen2's normalizer, pre-tokenizer and decoder."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path, seed: int = 0) -> Qwen2Tokenizer:
    """Train and save the tokenizer and the chat template under `folder`."""
    tokenizer = Qwen2Tokenizer(
        tokenizer_object=train_bpe(seed),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=[t for t in SPECIAL_TOKENS[1:] if t != "<|im_end|>"],
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The same tokenizer and chat template for another model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, folder / name)
