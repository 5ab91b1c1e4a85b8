"""What is said of servers before an export is written."""

from __future__ import annotations

import pytest

from vlmpack.capabilities.servers import SERVERS
from vlmpack.errors import CapabilityError


def test_a_model_that_a_server_has_no_class_for_is_refused():
    with pytest.raises(
        CapabilityError, match=r"SGLang 0\.5\.23 does not load .*internvl: it has no"
    ):
        SERVERS["sglang"].check("internvl", None)
    SERVERS["vllm"].check("internvl", None)


def test_adapters_off_the_language_model_are_refused():
    SERVERS["vllm"].check("qwen3_vl", ["language"])
    with pytest.raises(
        CapabilityError, match=r"language layers alone, .* projector and vision; add"
    ):
        SERVERS["vllm"].check("qwen3_vl", ["vision", "language", "projector"])


@pytest.mark.parametrize(
    ("server", "key", "why"),
    [
        ("vllm", "dora", "magnitudes"),
        ("vllm", "modules_to_save", "in full beside"),
        ("sglang", "dora", "magnitudes"),
        ("sglang", "rslora", "alpha / rank"),
        ("sglang", "alpha_pattern", "alpha / rank"),
    ],
)
def test_adapters_that_a_server_would_compute_otherwise_are_refused(server, key, why):
    with pytest.raises(CapabilityError, match=rf"with trainable\.lora\.{key}: .*{why}.*; add --me"):
        SERVERS[server].check("qwen3", ["language"], ["rank", key])
    SERVERS[server].check("qwen3", None, [key])
    SERVERS["vllm"].check("qwen3", ["language"], ["rank", "rslora", "rank_pattern"])


@pytest.mark.parametrize("start", ["", "model."])
def test_a_tower_gets_the_name_of_published_files_once(start):
    server = SERVERS["vllm"]
    published = f"{start}vision_tower.vision_model.post_layernorm.weight"
    assert server.name("gemma3", f"{start}vision_tower.post_layernorm.weight") == published
    assert server.name("gemma3", published) == published
    other = "multi_modal_projector.vision_tower.weight"
    assert server.name("gemma3", other) == other
    plain = "model.visual.vision_tower.weight"
    assert server.name("qwen3_vl", plain) == plain
