"""What an unknown key may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

ELSEWHERE: Mapping[str, str] = {
    "batch_size": "training.micro_batch_size",
    "bf16": "model.dtype",
    "clip_grad": "optim.max_grad_norm",
    "context_parallel_size": "parallelism.context",
    "cp": "parallelism.context",
    "cutoff_len": "training.seq_length",
    "dataset": "data.train",
    "epochs": "training.num_epochs",
    "expert_model_parallel_size": "parallelism.expert",
    "gradient_checkpointing": "model.activation_checkpointing",
    "gradient_clipping": "optim.max_grad_norm",
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "lr_warmup_iters": "optim.warmup_steps",
    "max_length": "training.seq_length",
    "max_seq_length": "training.seq_length",
    "model_name_or_path": "model.path",
    "num_train_epochs": "training.num_epochs",
    "num_warmup_steps": "optim.warmup_steps",
    "output_dir": "run_dir",
    "per_device_train_batch_size": "training.micro_batch_size",
    "pipeline_model_parallel_size": "parallelism.pipeline",
    "pp": "parallelism.pipeline",
    "precision": "model.dtype",
    "recompute_granularity": "model.activation_checkpointing",
    "report_to": "logging.trackers",
    "save_steps": "checkpoint.interval_steps",
    "save_total_limit": "checkpoint.keep",
    "sequence_parallel": "parallelism.sequence",
    "steps": "training.max_steps",
    "tensor_model_parallel_size": "parallelism.tensor",
    "tp": "parallelism.tensor",
    "train_iters": "training.max_steps",
    "use_distributed_optimizer": "parallelism.distributed_optimizer",
}
"""Keys of other frameworks, and ours."""

DERIVED: Mapping[str, str] = {
    "gradient_accumulation_steps": "global_batch_size / (micro_batch_size x data-parallel size)",
    "data_parallel": "world size / (tensor x pipeline x context)",
    "data_parallel_size": "world size / (tensor x pipeline x context)",
    "dp": "world size / (tensor x pipeline x context)",
    "pad_seq_to_mult": "2 x context for each sequence, and a row multiple from context and tensor",
    "world_size": "the number of processes that torchrun starts",
}
"""Keys of other frameworks that are computed here."""


def suggest_key(
    key: str, parent: str, here: Sequence[str], everywhere: Mapping[str, Sequence[str]]
) -> str:
    """The second half of an "unknown key" message.

    Args:
        key: the key that is not known.
        parent: the dotted name of the mapping that it stands in, "" for the root.
        here: the keys that this mapping does have.
        everywhere: every key of a recipe -> the dotted names that it occurs under.
    """
    if key in DERIVED:
        return f"it is not set but derived: {DERIVED[key]}"
    dotted = {name for names in everywhere.values() for name in names}
    if key in dotted:
        section, _, last = key.rpartition(".")
        return f"in a file, write '{last}' below '{section}:' (dots are for overrides)"
    if key in everywhere:
        owners = " or ".join(
            f"'{name.rpartition('.')[0] or 'the top'}'" for name in everywhere[key]
        )
        return f"'{key}' belongs to {owners}"
    if key in ELSEWHERE:
        return _did_you_mean(ELSEWHERE[key], parent)
    for candidates in (here, tuple(everywhere)):
        if match := difflib.get_close_matches(key, candidates, n=1):
            return _did_you_mean(match[0] if match[0] in here else everywhere[match[0]][0], parent)
    return f"known keys here: {', '.join(here)}"


def suggest_value(value: object, allowed: Sequence[str]) -> str:
    """`; did you mean 'in_batch'?`, or nothing if no allowed value is close."""
    match = difflib.get_close_matches(str(value).lower().replace("-", "_"), allowed, n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def _did_you_mean(name: str, parent: str) -> str:
    """The suggestion, by its last part where that is enough."""
    prefix = f"{parent}." if parent else ""
    return f"did you mean '{name.removeprefix(prefix)}'?"
