"""Models and samples for `vlmpack.judge`, with what a right collator of ms-swift's form makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from support.families import TEXT_FAMILIES, tiny_family_folder
from support.foreign import Feature, broken, features, load, packing
from torch import Tensor

from vlmpack.attention import choose_attention
from vlmpack.encode import Encoder
from vlmpack.packing import PackedSeqParams
from vlmpack.proof.judge import Judgement, judge
from vlmpack.proof.stock import token_losses

Collate = Callable[[Sequence[Feature]], Feature]


class Case:
    """A tiny model and samples of six lengths, with 0 to 3 images where it takes some."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = tiny_family_folder(name, folder)
        self.encoder = Encoder(self.folder)
        self.has_images = name not in TEXT_FAMILIES
        self.samples = features(self.encoder, images=self.has_images)[:6]

    def model(self, *, packed: bool = True) -> Any:
        """The stock model, with a stand-in for a varlen kernel where rows are packed."""
        return load(self.folder, self.encoder, packed=packed)

    def judge(
        self,
        fault: str = "",
        samples: Sequence[Feature] | None = None,
        collate: Collate | None = None,
        **options: Any,
    ) -> Judgement:
        """The packing collator, or another one, with one fault."""
        model = self.model()
        collate = collate or packing(model)
        given = self.samples if samples is None else samples
        return judge(model, broken(collate, fault) if fault else collate, given, **options)


def statuses(found: Judgement) -> dict[str, str]:
    """Check -> whether it passed, failed, or could not be seen."""
    return {one.check.name: one.check.status for one in found.findings}


def losses_of(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """A `losses=` of somebody's, which does what is done without one."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    return token_losses(model(**given, use_cache=False).logits, batch["labels"])


def on_kernel(case: Case, model: Any, name: str, device: torch.device) -> Any:
    """The model in bfloat16, its decoder on a kernel that takes nothing wider."""
    from transformers import AttentionInterface

    choice = choose_attention(name, device=device, dtype=torch.bfloat16)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        ends = options.get("cu_seq_lens_q")
        if ends is None:
            ends = torch.tensor([0, query.shape[2]], dtype=torch.int32, device=query.device)
        lengths = tuple(ends.diff().tolist())
        params = PackedSeqParams(
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            segment_lengths=lengths,
        )
        parts = (part[0].transpose(0, 1) for part in (query, key, value))
        return choice.function(*parts, params, scale=options["scaling"])[None], None

    AttentionInterface.register(f"of_{name}", attend)
    model = model.to(device, torch.bfloat16)
    language = case.encoder.family.modules.language
    model.get_submodule(language).set_attn_implementation(f"of_{name}")
    return model
