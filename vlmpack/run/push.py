"""An exported folder to a repository of the Hugging Face Hub, in one commit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vlmpack.errors import VlmpackError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def check_target(name: str, api: Any = None) -> None:
    """See that there is a name and a login, before anything is written.

    Args:
        name: OWNER/NAME.
        api: of huggingface_hub; None for its own.

    Raises:
        VlmpackError: there is none.
    """
    if not _NAME.fullmatch(name):
        raise VlmpackError(f"--push {name}: expected OWNER/NAME of a model on the Hugging Face Hub")
    try:
        _api(api).whoami()
    except Exception as error:
        raise VlmpackError(
            f"--push {name}: no login that the hub takes ({_said(error)}); `hf auth login`, or "
            "HF_TOKEN with the right to write"
        ) from None


def push_folder(folder: Path, name: str, *, public: bool, api: Any = None) -> str:
    """Upload a folder as a model: private unless it is to be public, all of it in one commit, so
    that a reader sees all or nothing of it.

    Args:
        folder: of an export or of adapters, with its card.
        name: OWNER/NAME; made where it is not there.
        public: whether a new repository can be read by everybody.
        api: of huggingface_hub; None for its own.

    Returns:
        The address of the commit.

    Raises:
        VlmpackError: the repository holds another model, or the hub refuses.
    """
    own = _api(api)
    try:
        own.create_repo(name, private=not public, repo_type="model", exist_ok=True)
        there = set(own.list_repo_files(name, repo_type="model")) - {".gitattributes", "README.md"}
        ours = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        if foreign := sorted(there - ours):
            raise VlmpackError(
                f"--push {name}: the repository holds {', '.join(foreign[:3])}, which this folder "
                "has not; push to another name, or delete these there"
            )
        done = own.upload_folder(
            repo_id=name,
            folder_path=str(folder),
            repo_type="model",
            commit_message=f"{folder.name}, by vlmpack export",
        )
    except VlmpackError:
        raise
    except Exception as error:
        raise VlmpackError(
            f"--push {name}: the hub refused ({_said(error)}); nothing was committed, and {folder} "
            "is whole: the same command pushes it again with -o another folder"
        ) from None
    return str(getattr(done, "commit_url", f"https://huggingface.co/{name}"))


def _api(api: Any) -> Any:
    if api is not None:
        return api
    from huggingface_hub import HfApi

    return HfApi()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
