"""vLLM: how a registered class is built from a folder, and what it does with the folder's names."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tools.servers.adapters import Adapted, on_vllm
from tools.servers.interpreter import Interpreter
from tools.servers.layers import layer_hooks
from tools.servers.loading import NotRegistered, Recorder
from tools.servers.statements import reader_of
from tools.servers.values import Instance, Parameter, Settings, Unknown

MODELS = "vllm.model_executor.models"
FOLLOWED = (
    MODELS,
    "vllm.models",
    "vllm.lora",
    "vllm.model_executor.layers.mamba",
    "vllm.model_executor.layers.fused_moe.layer",
    "vllm.model_executor.layers.fused_moe.routed_experts",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner",
    "vllm.model_executor.layers.mla",
    "vllm.transformers_utils",
    "vllm.utils",
)


_CUDA = Settings(
    "current_platform",
    is_cuda=lambda: True,
    is_cuda_alike=lambda: True,
    is_device_capability=lambda *_: False,
    is_device_capability_family=lambda *_: False,
    **{f"is_{name}": lambda: False for name in ("rocm", "cpu", "xpu", "tpu", "out_of_tree")},
)


def registry(reader: Interpreter) -> dict[str, tuple[str, str]]:
    """The architectures that have a class: by name, its module and class."""
    module = reader.module(f"{MODELS}.registry")
    assert module is not None
    found: dict[str, tuple[str, str]] = {}
    for name in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"):
        found |= {
            arch: value
            for arch, value in reader.named(module, name).items()
            if isinstance(value, tuple)
        }
    return found


class Vllm:
    """A reader of vLLM, for one folder."""

    def __init__(self, root: Path) -> None:
        self.recorder = Recorder()
        group = Settings(
            "group",
            is_first_rank=True,
            is_last_rank=True,
            world_size=1,
            rank_in_group=0,
            size=lambda: 1,
            rank=lambda: 0,
        )
        hooks = (
            layer_hooks()
            | self.recorder.hooks()
            | {
                "get_pp_group": lambda: group,
                "get_ep_group": lambda: Settings("ep", device_group=group, **group.known),
                "get_tp_group": lambda: group,
                "get_tensor_model_parallel_world_size": lambda: 1,
                "get_tensor_model_parallel_rank": lambda: 0,
                "get_pp_indices": lambda count, rank, size: (0, count),
                "get_offloader": lambda: Settings(
                    "offloader", wrap_modules=list, supports_tower_offload=False
                ),
                "init_vllm_registered_model": self._within,
                "FusedMoEFactory": self._experts,
                "groupby": lambda x, key=None: [
                    (k, iter(list(g))) for k, g in itertools.groupby(x, key)
                ],
                "cast": lambda kind, value: value,
                "replace": lambda one, **fields: Instance(one.cls, **(one.attributes | fields)),
                "is_fusion_moe_shared_experts_enabled": lambda: False,
                "resolve_layer_fused_shared_expert": lambda *_, **__: False,
                "is_model_fused_shared_expert_compatible": lambda *_, **__: False,
                "build_initial_global_physical_to_logical_map": lambda n, more: list(range(n)),
                "recursive_replace_linear": lambda *_, **__: None,
                "get_quark_ocp_mx_group_size": lambda *_: None,
                "maybe_remap_kv_scale_name": lambda name, parameters: name,
                "current_platform": _CUDA,
                "current_workspace_manager": lambda: Unknown("workspace"),
                "set_weight_attrs": lambda *_, **__: None,
                "cdiv": lambda a, b: -(a // -b),
                "islice": lambda x, *ends: list(itertools.islice(x, *ends)),
            }
        )
        self.reader = reader_of(root, "vllm", hooks, FOLLOWED)

    def build(self, hf_config: Any) -> Instance:
        """The model of a configuration."""
        return self._registered(self._settings(hf_config))

    def adapted(
        self, model: Instance, shapes: Mapping[str, Any], config: Mapping[str, Any]
    ) -> Adapted:
        """What becomes of an adapter of those tensors, with that adapter_config.json."""
        return on_vllm(self.reader, model, shapes)

    def _settings(self, hf_config: Any) -> Settings:
        settings = Settings(
            "vllm_config",
            model_config=Settings(
                "model_config",
                hf_config=hf_config,
                hf_text_config=hf_config.get_text_config(),
                multimodal_config=Settings(
                    "multimodal_config",
                    mm_encoder_only=False,
                    is_multimodal_pruning_enabled=lambda: False,
                    get_limit_per_prompt=lambda _: 1,
                    mm_encoder_tp_mode="weights",
                    mm_encoder_attn_dtype=None,
                    mm_device_do_normalize=False,
                    get_multimodal_pruning_spec=lambda *_: None,
                ),
                is_multimodal_model=True,
                dtype="bfloat16",
                quantization=None,
                enforce_eager=True,
                runner_type="generate",
                use_mla=hasattr(hf_config.get_text_config(), "kv_lora_rank"),
            ),
            cache_config=Settings(
                "cache_config",
                **{f"{one}cache_dtype": "auto" for one in ("", "mamba_", "mamba_ssm_")},
            ),
            quant_config=None,
            lora_config=None,
            speculative_config=None,
            parallel_config=Settings(
                "parallel_config",
                enable_eplb=False,
                use_sequence_parallel_moe=False,
                enable_expert_parallel=False,
                eplb_config=Settings("eplb_config", num_redundant_experts=0),
                tensor_parallel_size=1,
            ),
        )
        settings.known["with_hf_config"] = lambda hf_config, architectures=None: self._with(
            settings, hf_config, architectures
        )
        return settings

    def _with(self, outer: Settings, hf_config: Any, architectures: list[str] | None) -> Settings:
        """Settings for a model within a model, as `VllmConfig.with_hf_config` makes them."""
        whole = outer.known["model_config"].known["hf_config"]
        hf_config = copy.deepcopy(hf_config or whole)
        if architectures is not None:
            hf_config.architectures = architectures
        elif hf_config.architectures is None:
            hf_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]]
        if hasattr(whole, "tie_word_embeddings"):
            hf_config.get_text_config().tie_word_embeddings = whole.tie_word_embeddings
        return self._settings(hf_config)

    def _within(
        self,
        vllm_config: Settings,
        *,
        prefix: str = "",
        hf_config: Any = None,
        architectures: list[str] | None = None,
    ) -> Instance:
        if hf_config is not None or architectures is not None:
            vllm_config = self._with(vllm_config, hf_config, architectures)
        return self._registered(vllm_config, prefix)

    def _registered(self, vllm_config: Settings, prefix: str = "") -> Instance:
        names = vllm_config.known["model_config"].known["hf_config"].architectures
        table = registry(self.reader)
        for name in names:
            if name in table:
                module, cls = table[name]
                full = module if module.startswith("vllm.") else f"{MODELS}.{module}"
                made: Instance = self.reader.imported(full, cls)(
                    vllm_config=vllm_config, prefix=prefix
                )
                return made
        raise NotRegistered(f"vLLM has no class for {', '.join(names)}")

    def _experts(self, num_experts: Any = None, *_: Any, **given: Any) -> Instance:
        """What vLLM's factory makes: a runner that holds the routed experts, without a kernel."""
        start = "vllm.model_executor.layers.fused_moe"
        routed = Instance(self.reader.imported(f"{start}.routed_experts", "RoutedExperts"))
        names = ["w13_weight", "w2_weight"]
        names += ["w13_bias", "w2_bias"] if given.get("has_bias") else []
        gate, down, up = given.get("ckpt_names", ("gate_proj", "down_proj", "up_proj"))
        routed.attributes |= {name: Parameter() for name in names}
        routed.attributes |= {
            "layer_name": f"{given.get('prefix', '')}.routed_experts",
            "ckpt_gate_proj_name": gate,
            "ckpt_down_proj_name": down,
            "ckpt_up_proj_name": up,
            "is_fused_checkpoint_transposed": given.get("is_fused_checkpoint_transposed", False),
            "lora_base_layer_prefix": "",
            "quant_config": None,
            "moe_config": Settings(
                "moe_config",
                num_experts=num_experts or given["num_experts"],
                num_logical_experts=num_experts or given["num_experts"],
                is_act_and_mul=not str(given.get("activation", "silu")).endswith("_no_mul"),
            ),
            "expert_map_manager": Settings("expert_map_manager", num_fused_shared_experts=0),
        }
        runner = Instance(self.reader.imported(f"{start}.runner.moe_runner", "MoERunner"))
        within = ("gate", "shared_expert_gate", "routed_input_transform", "routed_output_transform")
        runner.attributes |= {name: given.get(name) for name in within}
        runner.attributes |= {
            "_shared_experts": given.get("shared_experts"),
            "routed_experts": routed,
        }
        return runner
