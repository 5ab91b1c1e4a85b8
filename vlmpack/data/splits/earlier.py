"""A run that an earlier version of vlmpack began: whether it goes on under this one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from vlmpack.data.config import DataConfig
from vlmpack.data.index.shard_index import IndexBuilder
from vlmpack.data.index.videos import first_video
from vlmpack.data.loading.read import SampleReader
from vlmpack.data.plan.state import DataState, Era
from vlmpack.data.splits.identity import short_digest
from vlmpack.data.splits.part_settings import build_settings
from vlmpack.data.splits.split import Split
from vlmpack.encode import Encoder
from vlmpack.errors import RunIdentityError


@dataclass(frozen=True)
class EarlierRuns:
    """What is known of states that earlier versions wrote.

    Args:
        config, split: the data, as they are now.
        encoder: today's.
        reader: of its samples.
    """

    config: DataConfig
    split: Split
    encoder: Encoder
    reader: SampleReader

    def taken_over(self, state: DataState) -> DataState:
        """A state of an encoder that gave these data the same ids, lengths and positions, under
        today's name of it; any other state as it is.

        Raises:
            RunIdentityError: the data have videos, and their positions were others.
        """
        last, former = state.eras[-1], self.encoder.former
        is_still = _is_of(state, former.stills)
        if not is_still and not _is_of(state, former.fingerprints):
            return state
        if is_still and self._video is not None:
            raise RunIdentityError(
                "this run was begun by a version of vlmpack that gave this family's videos other "
                f"tokens or positions, and its data have videos (the first is {self._video}); "
                "start a new run folder, or go on with that version (docs/video.md)"
            )
        renamed = {**last.identity, "encoder": self.split.identity["encoder"]}
        return replace(state, eras=(*state.eras[:-1], Era(last.start_batch, renamed)))

    def learnt_less(self, state: DataState) -> bool:
        """Whether the version that wrote it learnt fewer tokens of answers."""
        former = self.encoder.former
        return _is_of(state, former.fingerprints + former.stills[1:])

    @cached_property
    def _video(self) -> str | None:
        reader = self.reader
        index = IndexBuilder(reader.fetcher, reader.caps, reader.each_answer)
        found = first_video(self.split.fitted, index, build_settings(self.config, None))
        return None if found is None else f"{found.key} in {found.shard}"


def _is_of(state: DataState, fingerprints: tuple[str, ...]) -> bool:
    return state.identity.get("encoder") in [short_digest(name) for name in fingerprints]
