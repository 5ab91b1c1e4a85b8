"""The exception tree. Everything a user can cause derives from VlmpackError.

A message says what was found, what was expected, and which setting to change. `assert` is only for
invariants of our own. An assertion that fires is a bug in vlmpack.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

ErrorClass = Literal["transport", "integrity", "decode", "schema", "too_long"]
Value = TypeVar("Value")


class VlmpackError(Exception):
    """Base of every error a user can cause or act on. The CLI prints it without a traceback."""

    exit_code = 1


class OpenFilesError(VlmpackError):
    """The process may open no more files. No sample is left out because of it."""


def refuse_full_table(error: BaseException) -> None:
    """Raise OpenFilesError where an error, of torch too, says that no file can be opened."""
    number = getattr(error, "errno", None)  # None: torch's, or a loader's that torch raises anew
    if number in _FULL or (number is None and any(said in str(error) for said in _SAID_FULL)):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise OpenFilesError(
            f"too many open files: this process may open {most}. Raise the limit before the launch "
            "(ulimit -n 4096), or lower data.num_workers"
        ) from error


_FULL = (errno.EMFILE, errno.ENFILE)
_SAID_FULL = (*map(os.strerror, _FULL), "items of ancdata")
"""The last one is torch's, of a tensor that came from a loader process without its file."""


@contextmanager
def naming_full_table() -> Iterator[None]:
    """Turn the block's errors over too many open files into errors that the user can act on."""
    try:
        yield
    except VlmpackError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # torch's clean-up raises others on top of it
            refuse_full_table(cause)
            cause = cause.__cause__ or cause.__context__
        raise


@contextmanager
def writing(place: object, error: type[VlmpackError] = VlmpackError) -> Iterator[None]:
    """Turn the block's write errors into errors that name the place for the user."""
    try:
        yield
    except OSError as found:
        refuse_full_table(found)
        raise error(f"{place} cannot be written: {found.strerror or found}") from found


UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""The exceptions of our parsers, and Python's, for a malformed file."""


class RecipeError(VlmpackError):
    """A recipe with one problem or several; `problems` lists them all, one readable line each."""

    exit_code = 2

    def __init__(self, problems: Sequence[str] | str) -> None:
        # A string is one problem. torch gives one too: a worker's error, built from its traceback.
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in the recipe:"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.problems,))


class CapabilityError(VlmpackError):
    """A combination that this build, model family or machine cannot do."""


class PackingError(VlmpackError, ValueError):
    """Samples or a padded batch that cannot be packed as they are."""


class ModelError(VlmpackError):
    """A model folder that is missing, incomplete, or of an unknown architecture."""


@contextmanager
def as_model_error(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn such errors of the block into a ModelError that says what failed, and why."""
    try:
        yield
    except kinds as error:
        raise ModelError(f"{what}: {error}") from error


class DataError(VlmpackError):
    """One sample or shard that cannot be used.

    Args:
        error_class: the policy in `data.on_error` that applies; `too_long` obeys `data.over_long`
            instead.
        offset: byte offset of the sample in the shard, where one is known.
        file: what is damaged, where that is not the shard: the tar of a saved pack.
    """

    image: int | None = None
    """The image that cannot be used, where other processes open the sample's other images. Set in
    the process that raised it alone."""

    def __init__(
        self,
        reason: str,
        *,
        error_class: ErrorClass,
        key: str | None = None,
        shard: str | None = None,
        offset: int | None = None,
        file: str | None = None,
    ) -> None:
        self.reason = reason
        self.error_class = error_class
        self.key, self.shard, self.offset, self.file = key, shard, offset, file
        sample = None if key is None else repr(key)
        places = (("sample", sample), (_kind(shard or ""), shard), ("offset", offset))
        where = ", ".join(f"{what} {place}" for what, place in places if place is not None)
        super().__init__(f"{where}: {reason}" if where else reason)

    def __reduce__(self) -> tuple[object, ...]:
        # DataLoader workers pickle exceptions; keyword-only arguments need their own recipe.
        return partial(type(self), **self._facts()), (self.reason,)

    def _facts(self) -> dict[str, Any]:
        names = ("error_class", "key", "shard", "offset", "file")
        return {name: getattr(self, name) for name in names}

    def located(
        self, *, key: str | None = None, shard: str | None = None, offset: int | None = None
    ) -> DataError:
        """The same error with the place filled in where it was not known before."""
        known = {name: value for name, value in self._facts().items() if value is not None}
        return type(self)(self.reason, **{"key": key, "shard": shard, "offset": offset, **known})

    def reworded(self, reason: str) -> DataError:
        """The same error of the same place, with another reason."""
        return type(self)(reason, **self._facts())


def or_error(call: Callable[..., Value], *arguments: Any) -> Value | DataError:
    """What a call returns, or the DataError that it raises."""
    try:
        return call(*arguments)
    except DataError as error:
        return error


def or_raise(value: Value | DataError) -> Value:
    """The value. An error that stands in its place is raised."""
    if isinstance(value, DataError):
        raise value
    return value


def _kind(shard: str) -> str:
    return "file" if shard.endswith((".jsonl", ".json", ".csv", ".tsv", ".parquet")) else "shard"


class RefusedError(DataError):
    """A store says that a shard is missing or may not be read; asking again would not help."""


transport_error = partial(DataError, error_class="transport")
"""A shard or an image that is out of reach."""
integrity_error = partial(DataError, error_class="integrity")
"""Bytes that are damaged, or other ones than were indexed."""
decode_error = partial(DataError, error_class="decode")
"""An image or a video that cannot be decoded."""
schema_error = partial(DataError, error_class="schema")
"""A record or a conversation that is not as expected."""


class DataLimitError(VlmpackError):
    """Too many bad samples: the skip budget of the run is spent."""


class EmptyDataError(VlmpackError):
    """A source, split or epoch without a single usable sample."""


class CheckpointError(VlmpackError):
    """A checkpoint that is incomplete, damaged, or does not fit this run."""


class PacksError(VlmpackError):
    """A folder of packs that is unfinished, damaged, or made with other settings than the recipe's.
    The message lists every difference."""


class ReferenceCacheError(VlmpackError):
    """Log-probabilities of a reference model that are missing, or of another model, data or
    computation. The message lists every difference."""


class RunIdentityError(VlmpackError):
    """A run folder whose identity differs from the recipe's; the message lists every difference."""


class RunDirError(VlmpackError):
    """A run folder that cannot be written, or that another process is using."""


class VerificationError(VlmpackError):
    """`training.verify` found that packed samples do not compute what each computes alone."""


class NonFiniteError(VlmpackError):
    """A loss or gradient that is not finite before the optimizer step, or such trained tensors
    before they are saved or exported."""


class DeviceMemoryError(VlmpackError):
    """A step does not fit the memory of a GPU."""


class TrainabilityError(VlmpackError):
    """What the recipe trains gets no gradient, or what it freezes has moved."""


class ReplicaError(VlmpackError):
    """Ranks that should hold the same weights, moments, data position or seeds do not."""


class SentinelError(VlmpackError):
    """A sample has other losses in its row than alone through the plain path."""


class ExtensionError(VlmpackError):
    """A source, objective, metric or callback of the program's own that fails; names it."""

    def going_on(self, whence: str) -> ExtensionError:
        """The same, with what is left of the run; `whence` follows "the same call goes on"."""
        return type(self)(f"{self}. Mend it, or leave it out: the same call goes on {whence}")


class ObjectiveError(ExtensionError):
    """A program's own objective that fails, on the rank with its samples. Other ranks wait in a
    collective of that step and learn it by this rank's end."""


class Preempted(VlmpackError):
    """SIGTERM was honoured: a checkpoint was saved at a step boundary and the run can resume."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later
