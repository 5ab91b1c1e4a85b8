"""What an unknown key may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

ELSEWHERE: Mapping[str, str] = {
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "attn_implementation": "model.attention",
    "batch_size": "training.micro_batch_size",
    "bf16": "model.dtype",
    "async_save": "checkpoint.asynchronous",
    "attention_backend": "model.attention",
    "clip_grad": "optim.max_grad_norm",
    "comm_overlap": "parallelism.overlap",
    "context_parallel_size": "parallelism.context",
    "cp": "parallelism.context",
    "cutoff_len": "training.seq_length",
    "dataloader_num_workers": "data.num_workers",
    "dataset": "data.train",
    "ddp": "parallelism.overlap",
    "decoder_lr": "optim.language_lr",
    "dim": "trainable.lora.rank",
    "enable_in_batch_packing": "packing.mode",
    "enable_thinking": "data.chat_template_kwargs",
    "epochs": "training.num_epochs",
    "eval_dataset": "data.validation",
    "eval_interval": "evaluation.interval_steps",
    "eval_iters": "evaluation.max_samples",
    "eval_steps": "evaluation.interval_steps",
    "expert_model_parallel_size": "parallelism.expert",
    "freeze_language_model": "trainable.language",
    "freeze_multi_modal_projector": "trainable.projector",
    "freeze_vision_model": "trainable.vision",
    "freeze_vision_projection": "trainable.projector",
    "freeze_vision_tower": "trainable.vision",
    "freeze_vit": "trainable.vision",
    "fsdp": "parallelism.sharding",
    "gradient_checkpointing": "model.activation_checkpointing",
    "gradient_clipping": "optim.max_grad_norm",
    "learning_rate": "optim.lr",
    "load": "run_dir",
    "load_in_4bit": "trainable.lora.quantize",
    "log_interval": "logging.interval_steps",
    "logging_steps": "logging.interval_steps",
    "lora_alpha": "trainable.lora.alpha",
    "lora_dropout": "trainable.lora.dropout",
    "lora_r": "trainable.lora.rank",
    "lora_rank": "trainable.lora.rank",
    "lora_target": "trainable.lora.targets",
    "lora_target_modules": "trainable.lora.targets",
    "lr_decay_style": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "lr_warmup_iters": "optim.warmup_steps",
    "lr_warmup_steps": "optim.warmup_steps",
    "max_length": "training.seq_length",
    "max_seq_length": "training.seq_length",
    "max_lr": "optim.lr",
    "min_lr": "optim.min_lr_ratio",
    "mixed_precision": "model.dtype",
    "moe_aux_loss_coeff": "model.router_aux_loss_coef",
    "model_name_or_path": "model.path",
    "neat_packing": "packing.mode",
    "num_train_epochs": "training.num_epochs",
    "num_warmup_steps": "optim.warmup_steps",
    "output_dir": "run_dir",
    "overlap_grad_reduce": "parallelism.overlap",
    "overlap_param_gather": "parallelism.overlap",
    "pack_sequences_in_batch": "packing.mode",
    "packing.packing": "packing.mode",
    "peft": "trainable.lora",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "per_device_train_batch_size": "training.micro_batch_size",
    "pretrained_checkpoint": "model.path",
    "pipeline_model_parallel_size": "parallelism.pipeline",
    "pp": "parallelism.pipeline",
    "precision": "model.dtype",
    "r": "trainable.lora.rank",
    "reasoning_effort": "data.chat_template_kwargs",
    "recompute_granularity": "model.activation_checkpointing",
    "report_to": "logging.trackers",
    "resume_from_checkpoint": "checkpoint.resume",
    "sample_packing": "packing.mode",
    "save": "run_dir",
    "save_interval": "checkpoint.interval_steps",
    "save_steps": "checkpoint.interval_steps",
    "save_total_limit": "checkpoint.keep",
    "sequence_parallel": "parallelism.sequence",
    "steps": "training.max_steps",
    "target_modules": "trainable.lora.targets",
    "tensor_model_parallel_size": "parallelism.tensor",
    "tensorboard_dir": "logging.trackers",
    "torch_dtype": "model.dtype",
    "tp": "parallelism.tensor",
    "train_iters": "training.max_steps",
    "use_distributed_optimizer": "parallelism.distributed_optimizer",
    "use_dora": "trainable.lora.dora",
    "use_rslora": "trainable.lora.rslora",
    "vision_tower_lr": "optim.vision_lr",
    "vit_lr": "optim.vision_lr",
    "wandb_project": "logging.trackers",
    "warmup": "optim.warmup_steps",
    "warmup_iters": "optim.warmup_steps",
    "warmup_ratio": "optim.warmup_steps",
    "weight_decay_rate": "optim.weight_decay",
}
"""Keys of other frameworks, and ours. One with a dot is meant in that place alone, and goes before
every other advice there."""

MEANS: Mapping[str, str] = {
    "adam_beta1": "the pair [beta1, beta2]",
    "adam_beta2": "the pair [beta1, beta2]",
    "ddp": "true or false; parallelism.distributed_optimizer is beside it",
    "enable_in_batch_packing": "in_batch for true",
    "enable_thinking": "a mapping, {enable_thinking: false}",
    "eval_iters": "a number of samples",
    "freeze_language_model": "frozen, full or lora",
    "freeze_multi_modal_projector": "frozen, full or lora",
    "freeze_vision_model": "frozen, full or lora",
    "freeze_vision_projection": "frozen, full or lora",
    "freeze_vision_tower": "frozen, full or lora",
    "freeze_vit": "frozen, full or lora",
    "load": "the folder of the run that goes on; checkpoint.resume says whether",
    "load_in_4bit": "nf4 beside lora",
    "min_lr": "a share of the peak, min_lr / lr",
    "mixed_precision": "bfloat16 or float32",
    "neat_packing": "none, in_batch, online or offline",
    "pack_sequences_in_batch": "in_batch for true",
    "packing.packing": "none, in_batch, online or offline",
    "peft": "used where trainable.vision, projector or language is lora",
    "pretrained_checkpoint": "a folder in transformers format; nothing is converted",
    "reasoning_effort": "a mapping, {reasoning_effort: low}",
    "sample_packing": "none, in_batch, online or offline",
    "save": "the folder of the run, checkpoints included",
    "warmup_ratio": "optimizer steps: the ratio times the steps of the run",
}
"""What the value of ours is, where theirs is another thing."""

DERIVED: Mapping[str, str] = {
    "gradient_accumulation_steps": "global_batch_size / (micro_batch_size x data-parallel size)",
    "data_parallel": "world size / (tensor x pipeline x context)",
    "data_parallel_size": "world size / (tensor x pipeline x context)",
    "dp": "world size / (tensor x pipeline x context)",
    "pad_seq_to_mult": "2 x context for each sequence, and a row multiple from context and tensor",
    "world_size": "the number of processes that torchrun starts",
}
"""Keys of other frameworks that are computed here."""

_ONE_SPLIT = "every pipeline stage has as many layers"
_WHOLE_LOSS = "head and loss are one function over chunks of label tokens"

ABSENT: Mapping[str, str] = {
    "account_for_embedding_in_pipeline_split": _ONE_SPLIT,
    "account_for_loss_in_pipeline_split": _ONE_SPLIT,
    "average_in_collective": "always false, since label tokens are counted over all ranks",
    "calculate_per_token_loss": "always true",
    "check_for_nan_in_grad": "always: a step that is not finite is never taken",
    "cp_comm_type": "keys and values are gathered, or passed around by Transformer Engine with "
    "model.attention: transformer_engine",
    "cross_entropy_fusion_impl": _WHOLE_LOSS,
    "cross_entropy_loss_fusion": _WHOLE_LOSS,
    "exit_signal_handler": "always: SIGTERM saves and ends the run",
    "expert_tensor": "experts are whole; parallelism.expert shares them out",
    "fp8": "model.dtype is bfloat16 or float32",
    "grad_reduce_in_fp32": "always true",
    "moe_flex_dispatcher_backend": "experts get their tokens by alltoall",
    "moe_token_dispatcher_type": "experts get their tokens by alltoall",
    "num_layers_in_first_pipeline_stage": _ONE_SPLIT,
    "num_layers_in_last_pipeline_stage": _ONE_SPLIT,
    "pipeline_dtype": "stages send each other model.dtype",
    "pipeline_model_parallel_layout": _ONE_SPLIT,
    "tp_comm_overlap": "collectives of tensor parallelism run before and behind their matmuls; "
    "parallelism.overlap is gradients' and parameters'",
    "virtual_pipeline": "parallelism.pipeline has one stage a process",
}
"""Keys of other frameworks that nothing here is for: what is so instead. Longer ones that begin so
are meant, too (`expert_tensor_parallel_size`)."""

FOREIGN: Mapping[str, str] = {
    "checkpoint": "checkpoint",
    "comm_overlap": "parallelism",
    "dataset": "data",
    "ddp": "parallelism",
    "logger": "logging",
    "mixed_precision": "model",
    "optimizer": "optim",
    "peft": "trainable.lora",
    "rng": "training",
    "scheduler": "optim",
    "train": "training",
    "validation": "evaluation",
}
"""Sections of other frameworks' configuration, and the one of ours that most of their keys are in.
"""


def is_foreign(section: str, value: object) -> bool:
    """Whether the keys below an unknown one are worth a word each: it is another framework's
    section, and no source of ours in the wrong place."""
    return section in FOREIGN and isinstance(value, Mapping) and bool({*value} - {"path"})


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
    for name, why in ABSENT.items():
        if key == name or key.startswith(f"{name}_"):
            return f"it is not there: {why}"
    placed = f"{parent}.{key}" if parent else key
    if "." in placed and placed in ELSEWHERE:
        return _renamed(placed, parent)
    dotted = {name for names in everywhere.values() for name in names}
    if key in dotted and "." in key:
        section, _, last = key.rpartition(".")
        return f"in a file, write '{last}' below '{section}:' (dots are for overrides)"
    own = f"{FOREIGN.get(parent, parent)}.{key}"
    if own in everywhere.get(key, ()):
        return f"did you mean '{own}'?"
    if key in everywhere:
        owners = " or ".join(
            f"'{name.rpartition('.')[0] or 'the top'}'" for name in everywhere[key]
        )
        return f"'{key}' belongs to {owners}"
    if key in ELSEWHERE:
        return _renamed(key, parent)
    for candidates in (here, tuple(everywhere)):
        if match := difflib.get_close_matches(key, candidates, n=1):
            return _did_you_mean(match[0] if match[0] in here else everywhere[match[0]][0], parent)
    if not here:  # below a section of another framework
        return (
            f"no knob of that name; {FOREIGN.get(parent, parent)} has most of what is in {parent}"
        )
    return f"known keys here: {', '.join(here)}"


def suggest_value(value: object, allowed: Sequence[str]) -> str:
    """`; did you mean 'in_batch'?`, or nothing if no allowed value is close."""
    match = difflib.get_close_matches(str(value).lower().replace("-", "_"), allowed, n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def _renamed(key: str, parent: str) -> str:
    """Ours for a key of another framework."""
    means = f" It is {MEANS[key]}" if key in MEANS else ""
    return _did_you_mean(ELSEWHERE[key], parent) + means


def _did_you_mean(name: str, parent: str) -> str:
    """The suggestion, by its last part where that is enough."""
    prefix = f"{parent}." if parent else ""
    return f"did you mean '{name.removeprefix(prefix)}'?"
