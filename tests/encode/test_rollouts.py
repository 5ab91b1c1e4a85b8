"""A record's `rollout`: what is read, what is refused, and what its log-probabilities serve for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.rollout_records import rollout
from support.shards import ROOT

from vlmpack.encode.rollouts import (
    READINGS,
    Sampling,
    reading_of,
    refuse_reading,
    rollout_of,
)
from vlmpack.errors import DataError


def test_all_that_a_sampler_says_is_read() -> None:
    found = rollout_of(rollout())
    assert found is not None
    assert (found.token_ids, found.log_probs) == ((5, 7, 2), (-0.5, -1.25, -0.125))
    assert (found.prompt_token_ids, found.finish) == ((1, 3, 3, 4), "stop")
    assert (found.reward, found.rewards) == (1.0, {"exact": 1.0})
    assert (found.group, found.number, found.policy_version) == ("a", 0, 3)
    assert found.sampling == Sampling(temperature=1.0, log_probs="raw")
    assert found.server == {"name": "vllm", "version": "0.33.0"}
    assert found.document() == rollout()


def test_what_may_be_left_out() -> None:
    bare = {
        "reward": 0,
        "group": "a",
        "number": 1,
        "policy_version": 0,
        "sampling": {"temperature": 0.5, "log_probs": "raw", "top_k": -1, "min_p": None},
        "finish": "length",
        "rewards": None,
    }
    found = rollout_of(bare)
    assert found is not None and found.token_ids == () and found.sampling.top_k == 0
    assert rollout_of(found.document()) == found
    assert rollout_of(None) is None


def test_the_documented_record_is_read() -> None:
    page = (ROOT / "docs" / "rollouts.md").read_text()
    [text] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    found = rollout_of(json.loads(text)["rollout"])
    assert found is not None and found.document() == json.loads(text)["rollout"]


def test_groups_are_told_apart_by_digest() -> None:
    names = [*(f"g{n}" for n in range(1000)), "half of a pair: \ud800"]
    digests = {rollout_of(rollout(group=name)).group_digest for name in names}
    assert len(digests) == len(names)
    assert all(-(1 << 63) <= digest < 1 << 63 for digest in digests)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": "5 7 2"}, "rollout.token_ids is '5 7 2'; expected a list"),
    ({"token_ids": [5, 7.0, 2]}, r"rollout.token_ids\[1\] is 7.0; expected the id of a token"),
    ({"token_ids": [5, True, 2]}, r"rollout.token_ids\[1\] is True"),
    ({"token_ids": [5, -1, 2]}, r"rollout.token_ids\[1\] is -1"),
    ({"prompt_token_ids": [None]}, r"rollout.prompt_token_ids\[0\] is missing"),
    ({"log_probs": [-1.0, 0.5, 0]}, r"rollout.log_probs\[1\] is 0.5; expected a log-probability"),
    ({"log_probs": [float("nan")] * 3}, r"rollout.log_probs\[0\] is nan"),
    ({"log_probs": [float("-inf")] * 3}, r"rollout.log_probs\[0\] is -inf"),
    ({"log_probs": [-1.0]}, "rollout.log_probs has 1 entries for the 3 of rollout.token_ids"),
    ({"token_ids": None}, "rollout.log_probs has 3 entries for the 0 of rollout.token_ids"),
    ({"prompt_token_ids": None}, "rollout.prompt_token_ids is missing beside rollout.token_ids"),
    ({"reward": "1"}, "rollout.reward is '1'; expected a number"),
    ({"reward": None}, "rollout.reward is missing; expected a number"),
    ({"reward": 10**400}, "rollout.reward is an int; expected a number"),
    ({"log_probs": [-(10**400)] * 3}, r"rollout.log_probs\[0\] is an int; expected"),
    ({"reward": float("inf")}, "rollout.reward is inf; expected a number"),
    ({"rewards": {"exact": None, "box": "x"}}, "rollout.rewards.box is 'x'; expected a number"),
    ({"group": 3}, "rollout.group is 3; expected a text"),
    ({"group": ""}, "rollout.group is ''; expected a text"),
    ({"number": -1}, "rollout.number is -1; expected a whole number from 0"),
    ({"number": 1.5}, "rollout.number is 1.5; expected a whole number from 0"),
    ({"policy_version": None}, "rollout.policy_version is missing; expected a whole number"),
    ({"finish": "eos"}, "rollout.finish is 'eos'; expected stop or length"),
    ({"advantage": 1.0}, "rollout has the key 'advantage'; expected token_ids, log_probs"),
    ({"server": {"name": "vllm", "url": "x"}}, "rollout.server has the key 'url'; expected name"),
    ({"server": "vllm"}, "rollout.server is a string; expected an object"),
    ({"sampling": None}, "rollout.sampling is missing; expected an object"),
    ({"sampling": {"log_probs": "raw"}}, "rollout.sampling.temperature is missing"),
    ({"sampling": {"temperature": 1.0}}, "rollout.sampling.log_probs is missing; expected raw or"),
    ({"sampling": {"temperature": 1, "log_probs": "raw", "seed": 1}}, "has the key 'seed'"),
    (
        {"sampling": {"log_probs": "raw", "temperature": -1.0}},
        "rollout.sampling.temperature is -1.0; expected a number from 0",
    ),
    (
        {"sampling": {"log_probs": "raw", "temperature": 1, "top_p": 1.5}},
        "rollout.sampling.top_p is 1.5; expected a number from 0 to 1",
    ),
    (
        {"sampling": {"log_probs": "raw", "temperature": 1, "top_k": 2.5}},
        "rollout.sampling.top_k is 2.5; expected a whole number",
    ),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_what_is_not_as_expected_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        rollout_of(rollout(**changes))
    assert caught.value.error_class == "schema"


def test_another_kind_is_refused() -> None:
    with pytest.raises(DataError, match="rollout is a list; expected an object"):
        rollout_of([rollout()])


def sampling(log_probs: str, **changes: float) -> Sampling:
    values: dict[str, Any] = {"temperature": 1.0, "log_probs": log_probs, **changes}
    return Sampling(**values)


REFUSE = "refused"
TABLE = [
    # nothing truncated, temperature 1
    (sampling("raw"), "exact"),
    (sampling("after_temperature"), "exact"),
    (sampling("processed"), "exact"),
    # another temperature
    (sampling("raw", temperature=0.7), "raw"),
    (sampling("after_temperature", temperature=0.7), "exact"),
    (sampling("processed", temperature=0.7), "exact"),
    # truncation and penalties
    *(
        (sampling(log_probs, temperature=temperature, **change), expected)
        for change in (
            {"top_p": 0.9},
            {"top_k": 20},
            {"min_p": 0.1},
            {"repetition_penalty": 1.1},
            {"presence_penalty": 0.5},
            {"frequency_penalty": -0.5},
        )
        for temperature in (1.0, 0.7)
        for log_probs, expected in (
            ("raw", REFUSE),
            ("after_temperature", REFUSE),
            ("processed", "truncated"),
        )
    ),
    # nothing is drawn
    *((sampling(log_probs, temperature=0.0), REFUSE) for log_probs in ("raw", "processed")),
]


@pytest.mark.parametrize("given, expected", TABLE)
def test_what_log_probabilities_serve_for(given: Sampling, expected: str) -> None:
    if expected != REFUSE:
        assert reading_of(given) == expected
        return
    with pytest.raises(DataError) as caught:
        reading_of(given)
    if given.temperature:
        assert "vLLM: --logprobs-mode processed_logprobs" in caught.value.reason
        assert "SGLang: sampling_logprobs_mode" in caught.value.reason
    else:
        assert "temperature is 0" in caught.value.reason


@pytest.mark.parametrize("old", ["recomputed", "sampler"])
@pytest.mark.parametrize("correction", ["none", "truncated", "masked"])
def test_what_an_objective_may_do_with_them(old: str, correction: str) -> None:
    served = {
        "exact": True,
        "raw": (old, correction) == ("recomputed", "none"),
        "truncated": correction != "none",
    }
    assert {*served} == {*READINGS}
    for reading in READINGS:
        fault = refuse_reading(reading, old=old, correction=correction)
        assert (fault is None) == served[reading], (reading, old, correction)
        if fault is not None and reading == "raw":
            assert "SGLang: its default" in fault.reason
            assert "use objective.old: recomputed" in fault.reason
