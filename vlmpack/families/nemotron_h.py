"""Nemotron-H, a language model: a layer is a Mamba-2, attention, an MLP, or a mixture of experts.

Mamba-2 has a short convolution and a scan whose state runs from token to token
(`vlmpack/recurrence`). Attention has no rotary positions: what order there is comes from the scans,
which are causal, so positions of a sample play no part.

A token's experts follow from its own hidden state and a bias that training leaves as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmpack.families import flops
from vlmpack.families.configs import whole_config
from vlmpack.families.flops import nemotron_h_decoder
from vlmpack.families.text_lm import TextLM
from vlmpack.packing import CostModel


class NemotronH(TextLM):
    """See `vlmpack.families.Family`."""

    def cost_model(self, config: Mapping[str, Any]) -> CostModel:
        """A decoder of four kinds of layers."""
        whole = whole_config(config)
        return flops.cost_model(whole, decoder=nemotron_h_decoder(whole))


FAMILY = NemotronH(name="nemotron_h", model_types=("nemotron_h",))
