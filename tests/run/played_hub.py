"""A stand-in of huggingface_hub's client that keeps its signatures."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from huggingface_hub import CommitOperationDelete, HfApi, ModelInfo

from vlmpack.activity import ACTIVITY
from vlmpack.run.card import RUN_KEY


class Hub:
    """Calls as huggingface_hub would take them, written down.

    Args:
        files: of the repository; None: there is none.
        fails: the call that does.
        private: whether its owner alone can read the repository.
        run: which run its card names; None for a card of no run.
    """

    def __init__(
        self,
        files: tuple[str, ...] | None = None,
        fails: str = "",
        *,
        private: bool = True,
        run: str | None = "r1",
    ) -> None:
        self.files, self.fails, self.private, self.run = files, fails, private, run
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.stages: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(HfApi, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs).arguments
            self.calls.append((name, {k: v for k, v in bound.items() if k != "self"}))
            self.stages[name] = ACTIVITY.stage
            if name == self.fails:
                raise ConnectionError("503 from the hub")
            if name == "repo_exists":
                return self.files is not None
            if name == "repo_info":
                card = {"license": "mit"} | ({} if self.run is None else {RUN_KEY: self.run})
                files = [{"rfilename": each} for each in self.files or ()]
                return ModelInfo(
                    id="o/n", private=self.private, siblings=files, cardData=card, sha="c0"
                )
            return SimpleNamespace(commit_url="https://huggingface.co/o/n/commit/1")

        return call

    def made(self) -> list[str]:
        """What was changed on it, by name of the call."""
        return [name for name, _ in self.calls if name not in ("repo_exists", "repo_info")]

    def committed(self) -> tuple[list[str], list[str]]:
        """Names of the files that the one commit adds, and that it deletes."""
        [operations] = [
            given["operations"] for name, given in self.calls if name == "create_commit"
        ]
        kinds: tuple[list[str], list[str]] = ([], [])
        for each in operations:
            kinds[isinstance(each, CommitOperationDelete)].append(each.path_in_repo)
        return kinds
