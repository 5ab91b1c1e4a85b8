"""An exported folder to a repository of the Hugging Face Hub, in one commit."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from vlmpack.backends import adapter_folder
from vlmpack.capabilities import adapter_config
from vlmpack.encode.settings import NOTES
from vlmpack.errors import VlmpackError
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.model_folder.weights import INDEX, SINGLE
from vlmpack.recipe.yaml_nodes import parse_yaml
from vlmpack.run.card import CARD, RUN_KEY, is_hub_name
from vlmpack.whole_file import regular_text

_MAKES_NO_MODEL = {".gitattributes", CARD, "LICENSE"}
"""Files of a repository that was made on the hub's own pages."""

_OF_ADAPTERS = {adapter_config.NAME, adapter_folder.WEIGHTS}
_OF_A_MODEL = {
    *("config.json", "generation_config.json", SINGLE, INDEX, *PROCESSOR_FILES),
    *(note.file for note in NOTES),
}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""What `vlmpack export` writes of either kind: known before anything is written."""


def check_target(
    name: str,
    *,
    run: str,
    adapter: bool,
    public: bool = False,
    replace: bool = False,
    api: Any = None,
) -> None:
    """See that there are a name and a login, and what a push would refuse, before anything is
    written.

    Args:
        name: OWNER/NAME.
        run: whose model is pushed, by its `RunDir.run_id`.
        public: whether the repository may be one that everybody can read.
        replace: whether another model may be there.
        api: of huggingface_hub; None for its own.

    Raises:
        VlmpackError: no name or login, or as `push_folder`.
    """
    if not is_hub_name(name):
        raise VlmpackError(f"--push {name}: expected OWNER/NAME of a model on the Hugging Face Hub")
    own = _api(api)
    try:
        own.whoami()
    except Exception as error:
        if not _is_answer(error):
            raise VlmpackError(
                f"--push {name}: {_outcome(error)}, so nobody knows whether the login is right. "
                "Look at the network and HF_ENDPOINT, or leave --push out. Nothing was written"
            ) from None
        raise VlmpackError(
            f"--push {name}: no login that the hub takes ({_said(error)}); `hf auth login`, or "
            "HF_TOKEN with the right to write"
        ) from None
    try:
        held = _held(own, name)
    except Exception as error:
        raise VlmpackError(f"--push {name}: {_outcome(error)}; nothing was written") from None
    _refuse_readers(name, held, public=public)
    if not replace:
        _refuse_other(name, held, run=run, adapter=adapter)


def push_folder(
    folder: Path, name: str, *, public: bool, replace: bool = False, api: Any = None
) -> str:
    """Upload a folder as a model: private unless it is to be public, all of it in one commit, so
    that a reader sees all or nothing of it.

    Args:
        name: OWNER/NAME; made where it is not there.
        public: whether a new repository can be read by everybody, and whether one that can be read
            so may be taken.
        replace: whether another model may be there, whose files go in the same commit.

    Returns:
        The address of the commit.

    Raises:
        VlmpackError: the repository is public, or holds another model, and was not meant to, or the
            hub refuses.
    """
    own = _api(api)
    try:
        held = _held(own, name)
        _refuse_readers(name, held, public=public)
        if not replace:
            adapter = (folder / adapter_config.NAME).is_file()
            _refuse_other(name, held, run=_run_of(folder), adapter=adapter)
        if held is None:
            own.create_repo(name, private=not public, repo_type="model")
        done = own.create_commit(
            name,
            _operations(folder, held),
            repo_type="model",
            commit_message=f"{folder.name}, by vlmpack export",
            parent_commit=None if held is None else held.commit,
        )
    except VlmpackError as error:  # what was there has changed since `check_target`
        raise VlmpackError(f"{error}. {_left(folder)}") from None
    except Exception as error:
        raise VlmpackError(f"--push {name}: {_outcome(error)}. {_left(folder)}") from None
    return str(getattr(done, "commit_url", f"https://huggingface.co/{name}"))


class _Held(NamedTuple):
    """What a repository on the hub holds.

    Args:
        run: which run its card names; "" where it names none.
        commit: the newest one; nothing that came after it is overwritten.
    """

    is_private: bool
    files: frozenset[str]
    run: str
    commit: str | None


def _held(own: Any, name: str) -> _Held | None:
    if not own.repo_exists(name, repo_type="model"):
        return None
    info = own.repo_info(name, repo_type="model")
    return _Held(
        is_private=bool(info.private),
        files=frozenset(each.rfilename for each in info.siblings or ()),
        run="" if info.card_data is None else str(info.card_data.get(RUN_KEY) or ""),
        commit=info.sha,
    )


def _operations(folder: Path, held: _Held | None) -> list[Any]:
    """Add the folder's files and remove all others, except those that the hub's pages made.

    `upload_folder` with hf_xet makes several commits of a large folder, so it is not used.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    ours = _files(folder)
    gone = [] if held is None else sorted(held.files - _MAKES_NO_MODEL - ours.keys())
    return [
        *(CommitOperationDelete(path_in_repo=path) for path in gone),
        *(CommitOperationAdd(path, path_or_fileobj=file) for path, file in ours.items()),
    ]


def _files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _left(folder: Path) -> str:
    return (
        f"Nothing was committed, and {folder} is whole: delete it, or give -o another folder, for "
        "the next try"
    )


def _refuse_readers(name: str, held: _Held | None, *, public: bool) -> None:
    if held is not None and not held.is_private and not public:
        raise VlmpackError(
            f"--push {name}: that repository is public; --public pushes there all the same, or "
            "make it private on the hub, or choose another name"
        )


def _refuse_other(name: str, held: _Held | None, *, run: str, adapter: bool) -> None:
    """Refuse another run's model, and files that the pushed kind of folder does not have.

    Those may be whole weights where adapters come, or a user's own files. Earlier files of the same
    run are replaced. File names do not identify a run: each model has a config.json and a
    model.safetensors.
    """
    if held is None:
        return
    there = held.files - _MAKES_NO_MODEL
    if there and held.run != run:
        named = f"run {held.run}" if held.run else "no run of vlmpack"
        raise VlmpackError(
            f"--push {name}: the repository holds another model ({', '.join(sorted(there)[:3])}). "
            f"Its card names {named}, and this is run {run}. Push to another name, or --replace "
            "what is there"
        )
    if adapter:
        foreign, whose = there - _OF_ADAPTERS, "adapters"
    else:
        shards = {each for each in there if _SHARD.fullmatch(each)}
        foreign, whose = there - _OF_A_MODEL - shards, "a whole model"
    if foreign:
        listed = ", ".join(sorted(foreign)[:3])
        raise VlmpackError(
            f"--push {name}: the repository holds {listed}, which no folder of {whose} has; push "
            "to another name, or --replace what is there"
        )


def _run_of(folder: Path) -> str:
    text = regular_text(folder / CARD)
    front: Any = parse_yaml(text.partition("\n---\n")[0], CARD).root
    return str(front[RUN_KEY])


def _api(api: Any) -> Any:
    if api is not None:
        return api
    from huggingface_hub import HfApi

    return HfApi()


def _outcome(error: Exception) -> str:
    what = "the hub refused" if _is_answer(error) else "the hub cannot be reached"
    return f"{what} ({_said(error)})"


def _is_answer(error: Exception) -> bool:
    """Whether an error is the hub's answer about login or repository, not a network failure."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status < 500 and status not in (408, 429)
    rooms = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    of_network = isinstance(error, ConnectionError | TimeoutError) or bool(rooms & _CLIENTS)
    return not of_network


_CLIENTS = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "socket"}
"""Packages that huggingface_hub asks with, in one version or another."""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 160, placeholder=' ...')}"
