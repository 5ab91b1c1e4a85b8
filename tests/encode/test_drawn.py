"""Rollouts as samples: the sampler's tokens as they are, behind a prompt that must be the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.families import VISION_FAMILIES, tiny_family_folder
from support.rollout_records import compact_prompt, drawn_answers
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.encode.settings import EncoderSettings
from vlmpack.errors import DataError
from vlmpack.packing import IGNORE_INDEX

SETTINGS = EncoderSettings(rollouts=True)
PLAIN = Encoder(TINY_MODEL)
ENCODER = PLAIN.replace(rollouts=True)
ANSWERS = drawn_answers(PLAIN.tokenizer, (3, 2, 2, 2))
WITH_IMAGES = [each for each in ANSWERS if each.prompt.images]


def prompt_of(sample: Any) -> list[int]:
    """The prompt of a sample as plain training has it: what stands before the answer's tokens."""
    whole = PLAIN.encode(sample)
    learnt = (whole.labels != IGNORE_INDEX).nonzero()[:, 0]
    turns = torch.cat([torch.tensor([True]), learnt.diff() > 1])
    return whole.input_ids[: int(learnt[turns][-1]) + 1].tolist()


def test_tokens_are_the_samplers_own() -> None:
    rewritten = 0
    for each in ANSWERS:
        found = ENCODER.encode(each.sample)
        prompt = prompt_of(each.sample)
        assert found.input_ids.tolist() == [*prompt, *each.ids]
        learnt = [IGNORE_INDEX] * (len(prompt) - 1)
        assert found.labels.tolist() == [*learnt, *each.ids, IGNORE_INDEX]
        assert found.drawn is not None
        assert found.drawn.log_p.tolist() == list(each.log_probs)
        assert (found.drawn.temperature, found.drawn.is_raw) == (1.0, False)
        length = ENCODER.length(each.sample, each.prompt.sizes)
        assert length.num_tokens == found.length
        assert length.num_label_tokens == len(each.ids)
        plain = PLAIN.encode(each.sample)
        assert torch.equal(
            found.position_ids[:, : len(prompt)], plain.position_ids[:, : len(prompt)]
        )
        assert (found.media is None) == (not each.prompt.images)
        rollout = each.sample.rollout
        assert rollout is not None
        rewritten += ENCODER.drawn_tokens.is_written_otherwise(rollout)
    assert 0 < rewritten < len(ANSWERS), "answers of one token are written alike"


def test_prompts_may_be_expanded_or_not() -> None:
    for each in WITH_IMAGES:
        expanded = each.changed(prompt_token_ids=prompt_of(each.sample))
        assert expanded.record != each.record
        one, two = (ENCODER.encode(form.sample) for form in (each, expanded))
        assert torch.equal(one.input_ids, two.input_ids)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_every_familys_placeholders_are_expanded(family: str, tmp_path: Any) -> None:
    encoder = Encoder(tiny_family_folder(family, tmp_path / "model"), SETTINGS)
    tokenizer, end = encoder.tokenizer, sorted(encoder.drawn_tokens.ends)[0]
    plain = encoder.replace(rollouts=False)
    for each in WITH_IMAGES[:4]:
        said = each.changed(token_ids=[end], log_probs=[-1.0])
        compact = compact_prompt(tokenizer, said.prompt.messages[:-1])
        marker = tokenizer.convert_tokens_to_ids(encoder.chat.marker)
        assert compact.count(marker) == len(each.prompt.images)
        found = encoder.encode(said.changed(prompt_token_ids=compact).sample)
        whole = plain.encode(said.sample)
        count = whole.media_positions.shape[0]
        assert count > len(each.prompt.images)
        assert torch.equal(found.media_positions, whole.media_positions)
        shown = int(whole.media_positions[-1]) + 2
        assert torch.equal(found.input_ids[:shown], whole.input_ids[:shown])
        again = encoder.encode(said.changed(prompt_token_ids=found.input_ids[:-1].tolist()).sample)
        assert torch.equal(again.input_ids, found.input_ids)


def refused(each: Any) -> str:
    with pytest.raises(DataError) as caught:
        ENCODER.length(each.sample, each.prompt.sizes)
    with pytest.raises(DataError) as encoded:
        ENCODER.encode(each.sample)
    assert caught.value.error_class == "schema"
    assert encoded.value.reason == caught.value.reason
    return str(caught.value.reason)


def test_another_prompt_is_refused_where_it_differs() -> None:
    each = WITH_IMAGES[0]
    prompt = prompt_of(each.sample)
    other = [*prompt]
    other[-3] = 40
    said = refused(each.changed(prompt_token_ids=other))
    tokenizer = PLAIN.tokenizer
    assert f"from token {len(prompt) - 3} of {len(prompt)} on" in said
    assert f"it has 40 ({tokenizer.decode([40])!r}) in {tokenizer.decode(other[-7:])!r}" in said
    expected = f"{prompt[-3]} ({tokenizer.decode(prompt[-3:-2])!r})"
    assert f"Expected {expected} in {tokenizer.decode(prompt[-7:])!r}" in said
    assert "images have" not in said
    shorter = refused(each.changed(prompt_token_ids=prompt[:-2]))
    assert f"from token {len(prompt) - 2} of {len(prompt)} on: it has nothing in" in shorter


def test_images_of_another_size_are_named() -> None:
    each = WITH_IMAGES[0]
    prompt = prompt_of(each.sample)
    image = PLAIN.placeholder_id
    place = prompt.index(image)
    said = refused(each.changed(prompt_token_ids=[*prompt[:place], image, *prompt[place:]]))
    count = prompt.count(image)
    assert f"Its images have {count + 1} tokens, and {count} here" in said
    none = refused(each.changed(prompt_token_ids=[t for t in prompt if t != image]))
    assert f"Its images have 0 tokens, and {count} here" in none, "a server that dropped the image"


def test_answers_are_checked() -> None:
    each, rows = WITH_IMAGES[0], PLAIN.chat.rows
    assert rows is not None
    ids, end = [20, 21, 22], each.ids[-1]

    def with_ids(*ids: int, **changes: Any) -> Any:
        log_probs = [-1.0] * len(ids)
        return each.changed(token_ids=[*ids], log_probs=log_probs, **changes)

    assert f"token_ids[1] is {rows}, but the model has {rows} tokens" in refused(
        with_ids(20, rows, end)
    )
    image = PLAIN.placeholder_id
    assert f"token_ids[0] is {image} ('<|image_pad|>'), the placeholder" in refused(
        with_ids(image, 20, end)
    )
    assert "ends with 22" in (said := refused(with_ids(*ids)))
    assert f"{end} ('<|im_end|>')" in said and "or finish: length" in said
    cut = with_ids(*ids, finish="length")
    assert ENCODER.encode(cut.sample).input_ids.tolist()[-3:] == ids
    ENCODER.encode(with_ids(20, end - 1, end).sample)


def test_what_no_policy_learns_from() -> None:
    each = WITH_IMAGES[0]
    plain = replace(each, record={"messages": each.record["messages"]})
    assert "has no 'rollout'" in refused(plain)
    bare = each.changed(token_ids=None, log_probs=None, prompt_token_ids=None)
    assert "rollout has no token_ids" in (said := refused(bare))
    assert "objective.name: sft or dpo" in said
    PLAIN.encode(bare.sample)
    assert "temperature is 0" in refused(each.changed({"temperature": 0.0}))
    assert "rollout.sampling has top_p 0.9, and log_probs 'raw'" in refused(
        each.changed({"top_p": 0.9})
    )
    two = replace(each, record={**each.record, "chosen": "a", "rejected": "b"})
    two.record["messages"] = two.record["messages"][:-1]
    assert "the record is a pair" in refused(two)
    ends = [*each.record["messages"], {"role": "user", "content": "and?"}]
    assert "end with the user's" in refused(replace(each, record={**each.record, "messages": ends}))


def test_draws_say_their_temperature() -> None:
    each = WITH_IMAGES[0]
    for log_probs, is_raw in (("raw", True), ("after_temperature", False), ("processed", False)):
        drawn = {"temperature": 0.7, "log_probs": log_probs}
        found = ENCODER.encode(each.changed(drawn).sample).drawn
        assert found is not None and (found.temperature, found.is_raw) == (0.7, is_raw)


def test_answers_of_a_group_share_their_prompt() -> None:
    encoder = ENCODER.replace(share_prefix=True)
    group = [each for each in ANSWERS if each.record["rollout"]["group"] == "prompt 0-0"]
    found = [encoder.encode(each.sample).prefixes for each in group]
    assert len(group) == 3 and {*found} == {found[0]}
    assert found[0][-1].length == len(prompt_of(group[0].sample)) - 1


def test_fingerprints_of_others_stay() -> None:
    assert PLAIN.fingerprint == Encoder(TINY_MODEL, EncoderSettings()).fingerprint
    assert ENCODER.fingerprint != PLAIN.fingerprint
    assert ENCODER.fingerprint_parts["samples"] == "rollouts"
