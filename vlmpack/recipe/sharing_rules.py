"""Rules about rows whose samples share what they begin with; `rules.py` says what a rule is."""

from __future__ import annotations

from vlmpack.capabilities.served import ServedModel
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import ModelSection, PackingSection

_KEY = ("packing", "share_prefix")


def shared_rows_have_a_mode(packing: PackingSection) -> list[Problem]:
    """A mode has rows of several samples."""
    if not packing.share_prefix or not packing.facts.pads:
        return []
    message = (
        f"true, but packing.mode '{packing.mode}' has a row for each sample, and nothing to share; "
        "use in_batch, online or offline, or leave it out"
    )
    return [Problem(_KEY, message)]


def shared_rows_have_any_shape(packing: PackingSection) -> list[Problem]:
    """What a row takes follows from what its samples share."""
    if not packing.share_prefix or not packing.pad_to_max_length:
        return []
    message = (
        "true, but rows of fixed shape (packing.pad_to_max_length) share no prefixes; leave one of "
        "them out"
    )
    return [Problem(_KEY, message)]


def shared_rows_have_an_engine(packing: PackingSection, model: ModelSection) -> list[Problem]:
    """The other engine's attention takes segments that are each by themselves."""
    if not packing.share_prefix or model.backend == "hf":
        return []
    message = (
        f"true, but model.backend '{model.backend}' shares no prefixes, nor does Transformer "
        "Engine or context parallelism; use model.backend: hf, or leave it out"
    )
    return [Problem(_KEY, message)]


def shared_rows_have_no_router_loss(packing: PackingSection, model: ModelSection) -> list[Problem]:
    """That loss counts the tokens of a row."""
    if not packing.share_prefix or not model.router_aux_loss_coef:
        return []
    message = (
        f"true, but the balancing loss of a router (model.router_aux_loss_coef "
        f"{model.router_aux_loss_coef}) counts every token of a row, a shared one once; leave one "
        "of them out"
    )
    return [Problem(_KEY, message)]


def families_share_prefixes(packing: PackingSection, served: ServedModel) -> list[Problem]:
    """A family's attention is the only thing that passes from token to token, and ours."""
    if not packing.share_prefix or served.unshared is None:
        return []
    message = f"true, but {served.title} cannot share prefixes: {served.unshared}; use false"
    return [Problem(_KEY, message)]
