"""`verify` sees labels that do not teach what the assistant said, by a look of its own.

`verify` sees ids that are not those of `apply_chat_template`.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
from support.families import VISION_FAMILIES, tiny_family_folder
from support.images import conversation, file_of, picture
from support.shards import ROOT, TINY_MODEL

from vlmpack.encode import Encoder, chat, turns
from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.sample import VLMSample
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.proof.measure import Check
from vlmpack.proof.verify.answers import check_answers, check_ids


@pytest.fixture(scope="module")
def joining(tmp_path_factory):
    """The committed model with a template that ends in a space, which "nine" joins."""
    folder = tmp_path_factory.mktemp("joining")
    for name in ("config.json", *PROCESSOR_FILES):
        if (TINY_MODEL / name).is_file():
            shutil.copyfile(TINY_MODEL / name, folder / name)
    path = folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8")
    changed = template.replace("message['role'] + '\\n'", "message['role'] + ' '")
    changed = changed.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant '")
    assert changed.count("' '") == template.count("' '") + 1 and "assistant '" in changed
    path.write_text(changed, encoding="utf-8")
    return folder


def said(*answers):
    """A question with an image before each answer."""
    turns = [pair for a in answers for pair in (("user", [None, "?"]), ("assistant", [a]))]
    return conversation(*turns, images=tuple(file_of(picture(seed=n)) for n in range(len(answers))))


def checked(folder, *samples):
    used = Encoder(folder)
    return check_answers(used, [used.encode(sample) for sample in samples], samples)


def test_joined_answers_are_learnt(joining):
    used, sample = Encoder(joining), said("nine", "\nNo one", "  7")
    joined = [int(token) for token in used.encode(sample).labels if token >= 0]
    assert used.tokenizer.decode(joined[:1]) == " nine"
    found = checked(joining, sample, said("nine"))
    assert (found.status, found.detail[:6]) == ("pass", "4 of 4")


def test_answers_that_begin_inside_a_token_fail_where_tokens_go_by_their_start(
    joining, monkeypatch
):
    """The encoder's rule as it was."""

    def by_start(places, spans):
        return [any(a <= start < b for a, b in spans) for start, _ in places]

    monkeypatch.setattr(chat, "written_by", by_start)
    found = checked(joining, said("nine"))
    assert found.fails
    assert found.detail == "made-up: turn 1 answers 'nine'; its token 12, ' nine', is no label"
    assert not checked(joining, said("7")).fails, "no token joins it"


@pytest.mark.parametrize("side", ["first", "last"])
def test_spans_that_lack_a_character_fail(monkeypatch, side):
    """The labels that verify compares are all "the next token of their own sample"."""
    find = turns.AssistantTurns.spans
    cut = (1, 0) if side == "first" else (0, -len("<|im_end|>") - 1)

    def shorter(self, messages, text, **options):
        return [(a + cut[0], b + cut[1]) for a, b in find(self, messages, text, **options)]

    monkeypatch.setattr(turns.AssistantTurns, "spans", shorter)
    found = checked(TINY_MODEL, said("7 8 9"))
    assert found.fails and ("'7'" if side == "first" else "'9'") in found.detail


def test_an_excluded_answer_that_is_learnt_fails(monkeypatch):
    sample = said("seven", "nine")
    messages = tuple(replace(turn, learn=turn.text != "seven") for turn in sample.messages)
    excluding = replace(sample, messages=messages)
    assert checked(TINY_MODEL, excluding).detail.startswith("2 of 2")
    find = turns.AssistantTurns.spans

    def all_learnt(self, messages, text, *, only_excluded=False):
        return [] if only_excluded else find(self, messages, text)

    monkeypatch.setattr(turns.AssistantTurns, "spans", all_learnt)
    found = checked(TINY_MODEL, excluding)
    assert found.fails and "the data excludes the turn" in found.detail


@pytest.mark.cases(
    quick=("qwen2_5_vl", "internvl", "gemma3"), slow=("qwen3_5", "gemma4", "mistral3")
)
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_answers_between_written_out_images_are_found(name, tmp_path):
    """In every family's spelling of an image, and beside a text that spells its marker."""
    folder = tiny_family_folder(name, tmp_path)
    sample = said("nine", "\nNo one", "x\n")
    assert checked(folder, sample).detail.startswith("3 of 3")
    marker = Encoder(folder).chat.marker
    spelt = conversation(("user", [marker]), ("assistant", ["y"]))
    assert checked(folder, spelt).status == "too few"


LANGUAGE_MODEL = ROOT / "assets/tiny-qwen3"
WRITES = r"' It is Nine.\n'; the chat template writes "
ALTERED = {
    "upper case": ("message['content'] | upper", rf"{WRITES}' IT IS NINE.\n'"),
    "cut": ("message['content'][:7]", f"{WRITES}' It is '"),
    "replaced": ("message['content'] | replace('Nine', '9')", rf"{WRITES}' It is 9.\n'"),
    "left out": ("''", f"{WRITES}''"),
    "trimmed": ("message['content'] | trim", ""),
    "as it is": ("message['content']", ""),
}


@pytest.mark.parametrize("way", ALTERED)
def test_answers_that_the_template_alters_fail(way, tmp_path):
    """Marks round an answer are labels all the same."""
    words, expected = ALTERED[way]
    for name in ("config.json", *PROCESSOR_FILES):
        if (LANGUAGE_MODEL / name).is_file():
            shutil.copyfile(LANGUAGE_MODEL / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        f"{{% if message['role'] == 'assistant' %}}{{{{ {words} }}}}"
        "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    sample = conversation(("user", ["?"]), ("assistant", [" It is Nine.\n"]))
    found = checked(tmp_path, sample)
    assert found.fails == bool(expected)
    assert expected in found.detail
    other = conversation(("user", ["?"]), ("assistant", ["777"]))
    assert checked(tmp_path, other).fails == (way == "left out"), "it alters no figures"
    excluded = replace(sample, messages=tuple(replace(t, learn=False) for t in sample.messages))
    whole = replace(sample, messages=(*excluded.messages, *other.messages))
    assert checked(tmp_path, whole).fails == (way == "left out"), "the altered one is not learnt"


PLAIN = conversation(("user", ["Is it?"]), ("assistant", ["Yes."]))
SHOWN = conversation(
    ("system", ["Be terse."]),
    ("user", [None, "Which?", None]),
    ("assistant", ["The first."]),
    ("user", ["Why?"]),
    ("assistant", ["It is red."]),
    images=tuple(file_of(picture(seed=seed)) for seed in range(2)),
)


def checked_ids(encoder: Encoder, *samples: VLMSample) -> Check | None:
    return check_ids(encoder, [encoder.encode(sample) for sample in samples], samples)


@pytest.mark.cases(quick=("qwen2_5_vl", "gemma3"), slow=("internvl", "qwen3_5", "gemma4"))
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_conversations_have_the_ids_of_apply_chat_template(name: str, tmp_path: Any) -> None:
    encoder = Encoder(tiny_family_folder(name, tmp_path))
    spelt = conversation(("user", [encoder.chat.marker]), ("assistant", ["y"]))
    found = checked_ids(encoder, PLAIN, SHOWN, spelt)
    assert found is not None and found.status == "pass"
    assert found.detail.startswith("2 of 3 conversations, as apply_chat_template has them from lis")


@pytest.mark.parametrize("sample", [PLAIN, SHOWN], ids=["text", "images"])
def test_another_text_fails(sample: VLMSample, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the answer's words are altered on their way into ids."""
    tokenise = ChatEncoder._tokenise

    def altered(self: ChatEncoder, text: str, literals: bool) -> Any:
        return tokenise(self, text.replace("red", "rad").replace("Yes", "Yas"), literals)

    monkeypatch.setattr(ChatEncoder, "_tokenise", altered)
    found = checked_ids(Encoder(TINY_MODEL), sample)
    assert found is not None and found.fails
    assert "made-up: token" in found.detail and "by apply_chat_template" in found.detail
