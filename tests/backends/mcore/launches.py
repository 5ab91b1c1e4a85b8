"""Ranks that work through several jobs of a test module, started when the first job is asked for.

A start of ranks takes seconds, a job a fraction of one: jobs share processes, and tests of one job
alone start only its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from backends.mcore.family_layouts import stem_of
from support import layouts
from support.families import tiny_family_folder
from support.forked import check_ranks
from support.layouts import Layout, Trained
from torch import Tensor


def once(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch that runs when first asked for with some arguments, not again after that; a failure
    is that of everyone who asks."""

    @cache
    def problem(*of: Any) -> BaseException | None:
        try:
            launch(*of)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the limit of a test is no AssertionError
            return error
        return None

    def ask(*of: Any) -> None:
        found = problem(*of)
        if found is not None:
            raise found

    return ask


def write_families(folder: Path, families: Sequence[str]) -> None:
    """Tiny model folders, by name."""
    for family in families:
        (folder / family).mkdir()
        tiny_family_folder(family, folder / family)


@dataclass
class FamilyLaunches:
    """What jobs `KIND:FAMILY:LAYOUT` wrote, beside the hf engine's steps on the same model folders.

    Args:
        script: what ranks run.
        folder: has the families' folders; everything is written there.
        jobs: by launch.
        by_name: layouts; that of a launch's first job says how many processes it has.
        after: by launch, the one whose files it needs.
    """

    script: str
    folder: Path
    jobs: Mapping[str, Sequence[str]]
    by_name: Mapping[str, Layout]
    after: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _launch(self) -> Callable[..., None]:
        def launch(name: str) -> None:
            if name in self.after:
                self._launch(self.after[name])
            processes = self.by_name[self.jobs[name][0].rsplit(":", 1)[1]].processes
            check_ranks([self.script, self.folder, *self.jobs[name]], processes)

        return once(launch)

    def done(self, job: str) -> Path:
        """The stem of a job's files."""
        self._launch(next(name for name, jobs in self.jobs.items() if job in jobs))
        return stem_of(self.folder, job)

    def trained(self, job: str, optimizer: str) -> Trained:
        """What a job's steps led to."""
        stem = self.done(job)
        return Trained.load(stem.with_name(f"{stem.name}-{optimizer}"))

    @cached_property
    def start(self) -> Callable[[str], dict[str, Tensor]]:
        """A family's weights before any step."""
        return cache(lambda family: layouts.start_weights(self.folder / family))

    @cached_property
    def expected(self) -> Callable[..., Trained]:
        """The hf engine's steps, of a family, an optimizer and as many steps."""
        return cache(
            lambda family, optimizer, steps=layouts.STEPS: layouts.train_reference(
                optimizer, steps, self.folder / family
            )
        )
