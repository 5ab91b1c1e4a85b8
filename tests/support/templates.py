"""Chat templates as published, cut to what decides the assistant's turns, and for each the regular
expression of what the assistant wrote, end of turn included."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from support.shards import ROOT, TINY_MODEL

from vlmpack.encode.chat import ChatEncoder


class Template(NamedTuple):
    """A template.

    Args:
        text: Jinja.
        answer: matches what the assistant wrote in a rendered conversation.
        special: its special tokens.
        takes_parts: whether content is a list of parts.
        marker: what it writes for an image.
        system: whether it takes a system prompt.
    """

    text: str
    answer: str
    special: tuple[str, ...]
    takes_parts: bool = False
    marker: str = ""
    system: bool = True


def template_text(name: str) -> str:
    """The Jinja of `tests/support/jinja/NAME.jinja`."""
    return (ROOT / f"tests/support/jinja/{name}.jinja").read_text(encoding="utf-8")


_CHATML = ("<|im_start|>", "<|im_end|>")
_CHATML_ANSWER = r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>"

QWEN2_5 = Template(
    template_text("qwen2_5"),
    _CHATML_ANSWER,
    _CHATML,
)
"""A default system prompt."""

NO_PROMPT = Template(
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n'}}{% endfor %}",
    _CHATML_ANSWER,
    _CHATML,
)
"""ChatML without a generation prompt."""

LLAMA_3 = Template(
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    r"(?<=<\|start_header_id\|>assistant<\|end_header_id\|>\n\n).*?<\|eot_id\|>",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"),
)
"""White space around a turn is stripped."""

GEMMA_3 = Template(
    template_text("gemma_3"),
    r"(?<=<start_of_turn>model\n).*?<end_of_turn>",
    ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<bos>"),
    takes_parts=True,
    marker="<start_of_image>",
)
"""The assistant is called model; the system prompt goes into the first user's turn."""

MISTRAL = Template(
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% endif %}{% endfor %}",
    r"(?<=\[/INST\]).*?</s>",
    ("[INST]", "[/INST]", "<s>", "</s>"),
    system=False,
)
"""No generation prompt, and none needed."""

MISTRAL_V3 = Template(
    template_text("mistral_v3"),
    r"(?<=\[/INST\]) .*?</s>",
    ("[INST]", "[/INST]", "<s>", "</s>"),
    system=False,
)
"""A space before the answer. The system prompt is written where the last turn is the user's only:
into a prompt, but into no whole conversation."""

MISTRAL_MOVES = MISTRAL_V3._replace(
    text=MISTRAL_V3.text.replace(
        "loop.last and",
        "message == (loop_messages | selectattr('role', 'equalto', 'user') | list)[-1] and",
    ),
    system=True,
)
"""The system prompt moves to the last user's turn."""

SMOLVLM = Template(
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    r"(?<=\nAssistant:).*?<end_of_utterance>",
    ("<|im_start|>", "<end_of_utterance>", "<image>"),
    takes_parts=True,
    marker="<image>",
)
"""Idefics3's as well: no header token; a space before the answer."""

INTERNVL = Template(
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\\n' }}{% elif content['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>\\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{'<|im_start|>assistant\\n' }}{% endif %}",
    _CHATML_ANSWER,
    (*_CHATML, "<IMG_CONTEXT>"),
    takes_parts=True,
    marker="<IMG_CONTEXT>",
)

LLAVA_ONEVISION = Template(
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    "{# Render all images first #}{% for content in message['content'] | "
    "selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\\n' + content['text'] }}{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ '\\n' + content['text'] }}{% endgeneration %}{% endfor %}{% endif %}"
    "{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    r"(?<=<\|im_start\|>assistant )\n.*?<\|im_end\|>",
    (*_CHATML, "<image>"),
    takes_parts=True,
    marker="<image>",
)
"""Marks what the assistant writes, but for the end of its turn; its generation prompt ends in
another character than the turn's head."""

CHATML_MARKED = Template(
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n' }}{% endif %}",
    _CHATML_ANSWER,
    _CHATML,
)

QWEN3_LIKE = Template(
    "{%- set last = namespace(index=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set last.index = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' and loop.index0 > last.index "
    "%}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content + "
    "'<|im_end|>\\n' }}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    _CHATML_ANSWER,
    _CHATML,
)
"""Thoughts of earlier turns are dropped."""

SMOLLM3 = Template(
    template_text("smollm3"),
    r"<\|im_start\|>assistant\n.*?<\|im_end\|>\n",
    _CHATML,
)
"""Its system prompt takes `/no_think`, a word that it does not write; its marks hold the header."""

TEMPLATES = {
    "qwen2.5": QWEN2_5,
    "no prompt": NO_PROMPT,
    "llama-3": LLAMA_3,
    "gemma-3": GEMMA_3,
    "mistral": MISTRAL,
    "mistral-v3": MISTRAL_V3,
    "mistral-moves": MISTRAL_MOVES,
    "smolvlm": SMOLVLM,
    "internvl": INTERNVL,
    "llava-onevision": LLAVA_ONEVISION,
    "marked": CHATML_MARKED,
    "qwen3": QWEN3_LIKE,
}


def _marked(template: Template, *swaps: tuple[str, str]) -> Template:
    text = template.text
    for old, new in swaps:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    return template._replace(text=text)


_A = "{% generation %}", "{% endgeneration %}"
_CHATML_SPLIT = (
    "{{- '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
    f"{_A[0]}{{{{- message.content + '<|im_end|>' }}}}{_A[1]}{{% else %}}"
    "{{- message.content + '<|im_end|>' }}{% endif %}{{- '\\n' }}"
)

MARKED = {
    "qwen2.5": _marked(
        QWEN2_5,
        (
            "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}",
            _CHATML_SPLIT,
        ),
    ),
    "no prompt": _marked(
        NO_PROMPT,
        (
            "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
            "'\\n'}}",
            _CHATML_SPLIT,
        ),
    ),
    "llama-3": _marked(
        LLAMA_3,
        ("+ message['content'] | trim + '<|eot_id|>' %}", " %}"),
        (
            "{{ content }}",
            "{{ content }}{% if message['role'] == 'assistant' %}"
            f"{_A[0]}{{{{ message['content'] | trim + '<|eot_id|>' }}}}{_A[1]}{{% else %}}"
            "{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}",
        ),
    ),
    "gemma-3": _marked(
        GEMMA_3,
        (
            "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}",
            "    {%- if message['role'] == 'assistant' -%}\n"
            "    {% generation %}{%- for item in message['content'] -%}{%- if item['type'] == "
            "'image' -%}{{ '<start_of_image>' }}{%- else -%}{{ item['text'] | trim }}{%- endif -%}"
            "{%- endfor -%}{{- '<end_of_turn>' -}}{% endgeneration %}{{- '\\n' -}}\n"
            "    {%- elif message['content'] is string -%}\n"
            "        {{ message['content'] | trim }}",
        ),
        (
            "    {{ '<end_of_turn>\n' }}",
            "    {%- if message['role'] != 'assistant' -%}{{ '<end_of_turn>\n' }}{%- endif -%}",
        ),
    ),
    "mistral": _marked(
        MISTRAL,
        (
            "{{ message['content'] + eos_token}}",
            f"{_A[0]}{{{{ message['content'] + eos_token}}}}{_A[1]}",
        ),
    ),
    "mistral-v3": _marked(
        MISTRAL_V3,
        (
            '{{- " " + message["content"]|trim + eos_token}}',
            f'{_A[0]}{{{{- " " + message["content"]|trim + eos_token}}}}{_A[1]}',
        ),
    ),
    "mistral-moves": _marked(
        MISTRAL_MOVES,
        (
            '{{- " " + message["content"]|trim + eos_token}}',
            f'{_A[0]}{{{{- " " + message["content"]|trim + eos_token}}}}{_A[1]}',
        ),
    ),
    "smolvlm": _marked(
        SMOLVLM,
        (
            "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}",
            "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
            "{% if message['role'] == 'assistant' %}:{% generation %}"
            "{% if message['content'][0]['type'] != 'image' %}{{ ' ' }}{% endif %}"
            "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
            "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
            "{{ '<end_of_utterance>' }}{% endgeneration %}{{ '\\n' }}{% else %}",
        ),
        ("<end_of_utterance>\n{% endfor %}", "<end_of_utterance>\n{% endif %}{% endfor %}"),
    ),
    "internvl": _marked(
        INTERNVL,
        (
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}",
            "{% if message['role'] == 'assistant' %}{% generation %}"
            "{% for content in message['content'] %}{{ content['text'] }}{% endfor %}"
            "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}",
        ),
        ("{{'<|im_end|>\\n'}}{% endfor %}", "{{'<|im_end|>\\n'}}{% endif %}{% endfor %}"),
    ),
    "llava-onevision": LLAVA_ONEVISION,
    "marked": CHATML_MARKED,
    "qwen3": _marked(
        QWEN3_LIKE,
        (
            "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content + "
            "'<|im_end|>\\n' }}",
            "{{- '<|im_start|>assistant\\n' }}{% generation %}"
            "{{- '<think>\\n\\n</think>\\n\\n' + message.content + '<|im_end|>' }}"
            "{% endgeneration %}{{- '\\n' }}",
        ),
        (
            "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
            _CHATML_SPLIT,
        ),
    ),
}
"""The same with `{% generation %}` marks round what the assistant wrote, end of turn included: what
transformers' own mask needs. Their texts are the published ones'. In these no image is written by
InternVL's assistant."""


@cache
def chat_encoder(template: Template) -> ChatEncoder:
    """The tiny model's tokenizer with a published template and its special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(TINY_MODEL))
    tokenizer.add_special_tokens({"additional_special_tokens": list(template.special)})
    named = {"bos_token": ("<|begin_of_text|>", "<bos>", "<s>"), "eos_token": ("</s>",)}
    for name, tokens in named.items():
        for token in tokens:
            if token in template.special:
                setattr(tokenizer, name, token)
    tokenizer.chat_template = template.text
    return ChatEncoder(tokenizer, takes_images=template.takes_parts, marker=template.marker)
