"""What a sampler says of an answer that it has drawn: a record's `rollout`.

    "rollout": {"token_ids": [785, 8251, 151645], "log_probs": [-0.1, -1.2, -0.01],
                "prompt_token_ids": [151644, ...],
                "reward": 1.0, "rewards": {"exact": 1.0},
                "group": "train/000017", "number": 0, "policy_version": 3,
                "sampling": {"temperature": 1.0, "log_probs": "processed", ...},
                "finish": "stop", "server": {"name": "vllm", "version": "0.33.0"}}

Samplers mean different things by a log-probability. The policy that is trained is the one that was
drawn from, so `reading_of` decides by how it was drawn what it serves for:

    exact      of exactly that distribution, with all tokens in it
    truncated  of exactly that distribution, which lacks tokens or has penalties
    raw        of logits before they were divided by the temperature
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, get_args

from vlmpack.errors import DataError, schema_error
from vlmpack.words import kind_of

LogProbs = Literal["raw", "after_temperature", "processed"]
"""What log-probabilities are of. `raw` is of the model's logits, `after_temperature` of these over
the temperature. `processed` is of exactly what was drawn from, after truncation and penalties."""
Finish = Literal["stop", "length"]
Reading = Literal["exact", "truncated", "raw"]

READINGS: tuple[Reading, ...] = get_args(Reading)
MOST_IDS = 1 << 20
"""Tokens of an answer, or of its prompt, that are read at most."""
ROUNDING = 1e-3
"""Log-probabilities may lie so much above 0, where a server has summed rounded probabilities."""

PROCESSED = "vLLM: --logprobs-mode processed_logprobs; SGLang: sampling_logprobs_mode"
DIVIDED = "vLLM: --logprobs-mode processed_logprobs; SGLang: its default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer was drawn, and what its log-probabilities are of."""

    temperature: float
    log_probs: LogProbs
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def changes(self) -> tuple[str, ...]:
        """What truncates the distribution or penalises tokens, in words."""
        plain = Sampling(temperature=self.temperature, log_probs=self.log_probs)
        values, without = asdict(self), asdict(plain)
        return tuple(f"{name} {values[name]}" for name in values if values[name] != without[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An answer that a policy has drawn, what it earned, and how it was drawn.

    Args:
        token_ids: of the answer, in order; empty where the record has none.
        log_probs: of each of them.
        prompt_token_ids: what the sampler saw before it, image placeholders expanded or not.
        reward: what the answer earned in all.
        rewards: its parts by name.
        group: answers of one group are compared with each other.
        number: of the answer in its group.
        policy_version: of the weights that drew it.
        server: name and version of what drew it.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict, hash=False)
    group: str
    number: int
    policy_version: int
    sampling: Sampling
    finish: Finish
    server: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def group_digest(self) -> int:
        """64 bits that stand for the group."""
        return int.from_bytes(
            blake2b(self.group.encode(errors="surrogatepass"), digest_size=8).digest(), signed=True
        )

    def document(self) -> dict[str, Any]:
        """As a record has it."""
        values = {name: getattr(self, name) for name in _KEYS}
        kept = {name: value for name, value in values.items() if value not in ((), {})}
        lists = {name: list(value) for name, value in kept.items() if isinstance(value, tuple)}
        return kept | lists | {"sampling": asdict(self.sampling)}


def rollout_of(value: object) -> Rollout | None:
    """What a record's `rollout` holds; None where there is none.

    Raises:
        DataError: (schema) what was found, what was expected, and at which key.
    """
    if value is None or value == "":
        return None
    given = _object(value, "rollout", _KEYS)
    said = _object(given.get("sampling"), "rollout.sampling", (*_SAMPLING,))
    if said.get("top_k") == -1:  # no limit, as vLLM and SGLang say it
        said["top_k"] = 0
    needed = ("temperature", "log_probs")
    values: dict[str, Any] = {name: _list(given, name, kind) for name, kind in _LISTS.items()}
    values |= {name: _read(given, name, "rollout", kind) for name, kind in _FIELDS.items()}
    rollout = Rollout(
        **values,
        rewards=_named(given, "rewards", _NUMBER),
        server=_named(given, "server", _TEXT, ("name", "version")),
        sampling=Sampling(
            **{
                name: _read(said, name, "rollout.sampling", kind)
                for name, kind in _SAMPLING.items()
                if name in said or name in needed
            }
        ),
    )
    counts = [len(rollout.token_ids), len(rollout.log_probs)]
    if counts[0] != counts[1]:
        raise schema_error(
            f"rollout.log_probs has {counts[1]:,} entries for the {counts[0]:,} of "
            "rollout.token_ids; expected one for each token of the answer"
        )
    if rollout.token_ids and not rollout.prompt_token_ids:
        raise schema_error(
            "rollout.prompt_token_ids is missing beside rollout.token_ids; expected the ids of the "
            "prompt that the sampler saw"
        )
    return rollout


def reading_of(sampling: Sampling) -> Reading:
    """What the log-probabilities of an answer serve for.

    Raises:
        DataError: (schema) there was nothing to draw, or they are of another distribution and
            cannot become those of the one that was drawn from.
    """
    if sampling.temperature == 0:
        raise schema_error(
            "rollout.sampling.temperature is 0: the answer was not drawn, so no policy learns from "
            "it. Expected a temperature above 0"
        )
    if sampling.changes:
        if sampling.log_probs == "processed":
            return "truncated"
        raise schema_error(
            f"rollout.sampling has {' and '.join(sampling.changes)}, and log_probs "
            f"{sampling.log_probs!r}, which are of the distribution before. Expected 'processed' "
            f"({PROCESSED}), or draw without truncation and penalties"
        )
    return "raw" if sampling.log_probs == "raw" and sampling.temperature != 1 else "exact"


def refuse_reading(reading: Reading, *, old: str, correction: str) -> DataError | None:
    """The fault of log-probabilities that an objective needs for more than they serve for.

    Args:
        old, correction: knobs of the objective.
    """
    if reading == "raw" and (old == "sampler" or correction != "none"):
        knob = "objective.old sampler" if old == "sampler" else f"objective.correction {correction}"
        return schema_error(
            "rollout.sampling has log_probs 'raw' at a temperature that is not 1, so they are not "
            f"those of the distribution that was drawn from, which {knob} needs. Sample with "
            f"processed ones ({DIVIDED}), or use objective.old: recomputed and "
            "objective.correction: none"
        )
    if reading == "truncated" and correction == "none":
        return schema_error(
            "rollout.sampling truncates the distribution or has penalties, so the answer was drawn "
            "from another policy than the one that is trained. Draw without them, or use "
            "objective.correction: truncated. That needs objective.old: recomputed"
        )
    return None


_KEYS = tuple(Rollout.__dataclass_fields__)


class _Kind(NamedTuple):
    """Values of one kind, what they are called, and what is kept of one."""

    fits: Callable[[Any], bool]
    expected: str
    make: Callable[[Any], Any] = lambda value: value


def _number(low: float, high: float, expected: str) -> _Kind:
    return _Kind(lambda value: type(value) in _NUMBERS and low <= value <= high, expected, float)


def _whole(high: int, expected: str) -> _Kind:
    return _Kind(lambda value: type(value) is int and 0 <= value <= high, expected)


def _one_of(names: tuple[str, ...]) -> _Kind:
    return _Kind(lambda value: value in names, " or ".join(names))


_NUMBERS = (int, float)
_HIGH = 1e100
_TEXT = _Kind(lambda value: isinstance(value, str) and value != "", "a text")
_NUMBER = _number(-_HIGH, _HIGH, "a number")
_COUNT = _whole((1 << 63) - 1, "a whole number from 0")
_ID = _whole((1 << 31) - 1, "the id of a token")
_FIELDS: Mapping[str, _Kind] = {
    "reward": _NUMBER,
    "group": _TEXT,
    "number": _COUNT,
    "policy_version": _COUNT,
    "finish": _one_of(get_args(Finish)),
}
_LISTS: Mapping[str, _Kind] = {
    "token_ids": _ID,
    "log_probs": _number(-_HIGH, ROUNDING, "a log-probability, a number of at most 0"),
    "prompt_token_ids": _ID,
}
_SAMPLING: Mapping[str, _Kind] = {
    "temperature": _number(0, _HIGH, "a number from 0"),
    "top_p": _number(0, 1, "a number from 0 to 1"),
    "top_k": _COUNT,
    "min_p": _number(0, 1, "a number from 0 to 1"),
    "repetition_penalty": _number(0, _HIGH, "a number from 0"),
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "log_probs": _one_of(get_args(LogProbs)),
}


def _object(value: object, where: str, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys of an object that have a value; all are known where no names are given."""
    if not isinstance(value, dict):
        raise schema_error(f"{where} is {kind_of(value)}; expected an object")
    for key in value:
        if known and key not in known and value[key] is not None:
            raise schema_error(f"{where} has the key {key[:60]!r}; expected {', '.join(known)}")
    return {key: item for key, item in value.items() if item is not None}


def _read(given: Mapping[str, Any], name: str, where: str, kind: _Kind) -> Any:
    return _checked(given.get(name), f"{where}.{name}", kind)


def _checked(value: object, where: str, kind: _Kind) -> Any:
    if not kind.fits(value):
        short = isinstance(value, int | float | str) and len(str(value)[:61]) <= 60
        found = repr(value) if short else kind_of(value)
        raise schema_error(f"{where} is {found}; expected {kind.expected}")
    return kind.make(value)


def _named(
    given: Mapping[str, Any], name: str, kind: _Kind, known: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What an object that may be left out holds."""
    where = f"rollout.{name}"
    values = _object(given.get(name, {}), where, known)
    return {key: _read(values, key, where, kind) for key in values}


def _list(given: Mapping[str, Any], name: str, kind: _Kind) -> tuple[Any, ...]:
    values = _checked(given.get(name, []), f"rollout.{name}", _LIST)
    wrong = next((place for place, value in enumerate(values) if not kind.fits(value)), None)
    if wrong is not None:
        _checked(values[wrong], f"rollout.{name}[{wrong}]", kind)
    return tuple(map(kind.make, values))


_LIST = _Kind(
    lambda value: isinstance(value, list) and len(value) <= MOST_IDS,
    f"a list of at most {MOST_IDS:,} entries",
)
