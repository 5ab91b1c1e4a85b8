"""Drawn answers with their rewards, as records of files.

A record is the conversation up to the answer, the answer's text, and what was drawn:

    {"messages": [..., {"role": "assistant", "content": "7"}], "images": ["images/0f....png"],
     "rollout": {"token_ids": [...], "log_probs": [...], "reward": 1.0, "group": ..., ...}}

Records of the best answers have no `rollout`, and those of pairs have `chosen` and `rejected`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from vlmpack.encode.rollouts import LogProbs, Rollout, Sampling
from vlmpack.encode.sample import ImagePart, Message, TextPart, VideoPart
from vlmpack.errors import ExtensionError, VlmpackError, schema_error
from vlmpack.evaluation.metrics import METRICS, Metric
from vlmpack.evaluation.predictions import Prediction, Question
from vlmpack.evaluation.sampling import Drawn
from vlmpack.handed_over import calling
from vlmpack.words import kind_of, raised, unfit_signature

Reward = Callable[[Prediction], float | None]
"""What an answer earns; None where the question has nothing that it could count."""
Form = Literal["rollouts", "best", "pairs"]
FILES: Mapping[Form, str] = {each: f"{each}.jsonl" for each in ("rollouts", "best", "pairs")}
NAMED: Mapping[str, Metric] = {"exact": METRICS["exact_match"], **METRICS}
"""Metrics by the names that rewards have."""


def rewards_of(given: Sequence[str] | Mapping[str, Callable[[Any], Any]]) -> dict[str, Reward]:
    """Rewards by name.

    Args:
        given: names of metrics; or functions by name, which get a prediction (attributes question,
            truth, answer, task, shapes) and return a number, or None.

    Raises:
        VlmpackError: none, a name that is no metric's, or no function.
    """
    if not given:
        raise VlmpackError(f"no reward: expected one or more of {', '.join(NAMED)}")
    if not isinstance(given, Mapping):
        if unknown := [name for name in given if name not in NAMED]:
            raise VlmpackError(f"reward {unknown[0]!r}: expected one of {', '.join(NAMED)}")
        return {name: partial(_share, NAMED[name]) for name in given}
    for name, function in given.items():
        if not callable(function):
            raise VlmpackError(f"rewards[{name!r}] is {kind_of(function)}; expected a function")
        if unfit := unfit_signature(function, 1):
            raise VlmpackError(f"rewards[{name!r}] takes {unfit}; expected one, a prediction")
    return {name: partial(_called, name, function) for name, function in given.items()}


def _share(metric: Metric, prediction: Prediction) -> float | None:
    return metric([prediction]).share


def _called(name: str, function: Callable[[Any], Any], prediction: Prediction) -> float | None:
    with calling(f"reward {name}", lambda e: ExtensionError(f"reward {name} {raised(e)}")):
        value = function(prediction)
    if value is None or (isinstance(value, int | float) and math.isfinite(value)):
        return None if value is None else float(value)
    raise ExtensionError(
        f"reward {name} returned {repr(value)[:100]}; expected a finite number, or None where "
        "there is nothing to count"
    )


def earned(question: Question, answer: Drawn, rewards: Mapping[str, Reward]) -> dict[str, float]:
    """What an answer earns, by name; what has nothing to count is left out.

    Raises:
        DataError: (schema) nothing counts.
        ExtensionError: a program's reward fails.
    """
    prediction = Prediction.of(question, answer.text.strip())
    values = {name: reward(prediction) for name, reward in rewards.items()}
    counted = {name: value for name, value in values.items() if value is not None}
    if not counted:
        raise schema_error(
            f"{' and '.join(rewards)}: nothing to count in this record; expected a reward that "
            "counts something in every record",
            key=question.key,
            shard=question.shard,
        )
    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What all rollouts of a sampling have in common.

    Args:
        sampling: fields by name, as of `Sampling.fields`.
        server: its name and version.
    """

    policy_version: int
    sampling: Mapping[str, float]
    log_probs: LogProbs
    server: Mapping[str, str]

    def rollout(
        self,
        answer: Drawn,
        *,
        prompt: Sequence[int],
        group: str,
        number: int,
        rewards: Mapping[str, float],
    ) -> dict[str, Any]:
        """The value of a record's `rollout`."""
        return Rollout(
            token_ids=answer.token_ids,
            log_probs=answer.log_probs,
            prompt_token_ids=tuple(prompt),
            reward=sum(rewards.values()),
            rewards=rewards,
            group=group,
            number=number,
            policy_version=self.policy_version,
            sampling=Sampling(**cast(Any, self.sampling), log_probs=self.log_probs),
            finish=answer.finish,
            server=self.server,
        ).document()


def conversation_record(question: Question, files: Sequence[str]) -> dict[str, Any]:
    """The turns before the answer, as a record has them.

    Args:
        files: names of the question's image files, in token order.
    """
    stills = [
        files[part.index]
        for message in question.messages
        for part in message.shown
        if isinstance(part, ImagePart)
    ]
    inputs = question.inputs
    more = {
        "images": stills,
        "task": question.task,
        "tools": list(inputs.tools),
        "chat_template_kwargs": dict(inputs.variables),
    }
    turns = [_turn(message, files) for message in question.messages]
    return {"messages": turns} | {name: value for name, value in more.items() if value}


def _turn(message: Message, files: Sequence[str]) -> dict[str, Any]:
    content: Any = [_part(part, files) for part in message.parts]
    if not message.shown:
        content = message.text
    left_out = {} if message.learn or message.role != "assistant" else {"loss": False}
    return {"role": message.role, "content": content, **message.fields, **left_out}


def _part(part: TextPart | ImagePart | VideoPart, files: Sequence[str]) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ImagePart():
            return {"type": "image"}
        case VideoPart():
            frames = files[part.index : part.index + len(part.times)]
            when = {"times": list(part.times)} if part.fps is None else {"fps": part.fps}
            return {"type": "video", "frames": list(frames), **when}


def in_form(group: Sequence[Mapping[str, Any]], form: Form) -> list[dict[str, Any]]:
    """The records that one prompt's rollouts become.

    The best answer is the first of those that earned most. Pairs set it against the first of those
    that earned least; where all earned the same there is none. Answers that are empty or were cut
    at their longest are no answers to learn from, and are left out of both.

    Args:
        group: records of the rollouts to one prompt, by number.
    """
    if form == "rollouts":
        return [dict(record) for record in group]
    usable = [
        record
        for record in group
        if record["rollout"]["finish"] == "stop" and record["messages"][-1]["content"].strip()
    ]
    if not usable:
        return []
    best = max(usable, key=_reward)  # max and min take the first of equals
    plain = {name: value for name, value in best.items() if name != "rollout"}
    if form == "best":
        return [plain]
    worst = min(usable, key=_reward)
    if _reward(best) == _reward(worst):
        return []
    chosen, rejected = (each["messages"][-1]["content"] for each in (best, worst))
    return [{**plain, "messages": plain["messages"][:-1], "chosen": chosen, "rejected": rejected}]


def _reward(record: Mapping[str, Any]) -> float:
    return float(record["rollout"]["reward"])
