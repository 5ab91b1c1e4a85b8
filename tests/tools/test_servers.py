"""The reader of servers' sources, on a server of our own that is like them."""

from __future__ import annotations

import pytest
from torch import nn

from tools.servers.adapters import on_vllm
from tools.servers.facts import outcome, unknown_names
from tools.servers.layers import layer_hooks
from tools.servers.loading import Recorder, load
from tools.servers.statements import reader_of
from tools.servers.values import Raised, Unread

SERVER = """
import torch.nn as nn
from .layers import Mapper, linear_of

class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.qkv = QKVParallelLinear(config["width"], bias=config["biased"])
        self.out = linear_of(config)
        self.norm = RMSNorm(config["width"])
        if index in config["gated"]:
            self.gate = nn.Parameter(torch.ones(1))
        if run_time():
            self.never = nn.Linear(1, 1)

class Base(nn.Module):
    mapper = Mapper({"model.": "decoder."})

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = VocabParallelEmbedding(8, config["width"])
        self.layers = nn.ModuleList([Block(config, i) for i in range(config["depth"])])

class Model(Base):
    mapper = Base.mapper | Mapper({"decoder.": ""})

    def __init__(self, config):
        super().__init__(config)
        self.head = ParallelLMHead(8, config["width"])
        if config["tied"]:
            self.head = self.head.tie_weights(self.embed)

    def load_weights(self, weights):
        stacked = [("qkv", f"{one}_proj", one) for one in "qkv"]
        parameters = dict(self.named_parameters())
        for name, weight in self.mapper.apply(weights):
            if name.startswith("mtp."):
                continue
            for target, source, shard in stacked:
                if source not in name:
                    continue
                parameter = parameters[name.replace(source, target)]
                parameter.weight_loader(parameter, weight, shard)
                break
            else:
                if self.config["tied"] and name == "head.weight":
                    continue
                default_weight_loader(parameters[name], weight)
"""
LAYERS = """
from dataclasses import dataclass, field

@dataclass
class Mapper:
    starts: dict = field(default_factory=dict)

    def __or__(self, other):
        return Mapper({**self.starts, **other.starts})

    def apply(self, weights):
        for name, weight in weights:
            for start, new in self.starts.items():
                if name.startswith(start):
                    name = name.replace(start, new, 1)
            yield name, weight

def linear_of(config):
    kind = RowParallelLinear if config["width"] > 1 else None
    return kind(config["width"], bias=False)
"""
CONFIG = {"width": 4, "depth": 2, "gated": (1,), "biased": True, "tied": False}


class Toy:
    """The server of `SERVER`."""

    def __init__(self, root, source=SERVER):
        (root / "toy").mkdir(exist_ok=True)
        (root / "toy/model.py").write_text(source)
        (root / "toy/layers.py").write_text(LAYERS)
        self.recorder = Recorder()
        hooks = layer_hooks() | self.recorder.hooks()
        self.reader = reader_of(root, "toy", hooks, ("toy",))

    def build(self, config):
        return self.reader.imported("toy.model", "Model")(config)


def names(config=CONFIG):
    found = {"model.embed.weight": (8, 4), "head.weight": (8, 4), "mtp.weight": (1,)}
    for i in range(config["depth"]):
        start = f"model.layers.{i}"
        ends = ("weight", "bias") if config["biased"] else ("weight",)
        found |= {f"{start}.{one}_proj.{end}": (4,) for one in "qkv" for end in ends}
        found |= {f"{start}.out.weight": (4, 4), f"{start}.norm.weight": (4,)}
        if i in config["gated"]:
            found[f"{start}.gate"] = (1,)
    return found


def test_every_name_ends_in_one_parameter(tmp_path):
    toy = Toy(tmp_path)
    loaded = load(toy, CONFIG, names())
    assert loaded.refused == {} and loaded.unfed == ()
    assert loaded.ends["model.layers.1.k_proj.bias"] == ("layers.1.qkv.bias",)
    assert loaded.ends["model.layers.1.gate"] == ("layers.1.gate",)
    assert [name for name, to in loaded.ends.items() if not to] == ["mtp.weight"]
    assert list(toy.reader.undecided) == ["model: run_time()"], "a condition that is not known"
    facts = outcome(loaded)
    assert facts["skipped"] == ["mtp.weight"] and "refused" not in facts
    assert facts["ends"]["model.layers.#.q_proj.weight"] == "layers.#.qkv.weight"


def test_a_name_that_is_changed_is_refused_and_its_parameter_is_not_fed(tmp_path):
    given = names()
    given["model.layers.0.normal.weight"] = given.pop("model.layers.0.norm.weight")
    loaded = load(Toy(tmp_path), CONFIG, given)
    assert list(loaded.refused) == ["model.layers.0.normal.weight"]
    assert "KeyError" in loaded.refused["model.layers.0.normal.weight"]
    assert loaded.unfed == ("layers.0.norm.weight",)
    known = outcome(load(Toy(tmp_path), CONFIG, names()))
    assert unknown_names(given, known) == ["model.layers.#.normal.weight"]
    assert unknown_names(names(), known) == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_fed_by_what_it_is_tied_to(tied, tmp_path):
    config = {**CONFIG, "tied": tied}
    given = names()
    del given["head.weight"]
    assert load(Toy(tmp_path), config, given).unfed == (() if tied else ("head.weight",))


def test_parameters_follow_the_configuration(tmp_path):
    config = {**CONFIG, "biased": False, "gated": (), "depth": 3}
    loaded = load(Toy(tmp_path), config, names(config))
    assert loaded.unfed == () and loaded.refused == {}
    assert "layers.2.qkv.weight" in {to for ends in loaded.ends.values() for to in ends}
    with_bias = load(Toy(tmp_path), CONFIG | {"gated": ()}, names(config | {"depth": 2}))
    assert with_bias.unfed == ("layers.0.qkv.bias", "layers.1.qkv.bias")


def test_what_is_not_followed_is_said(tmp_path):
    with pytest.raises(Raised, match="ValueError: width"):
        load(
            Toy(tmp_path, "class Model:\n def __init__(self, c):\n  raise ValueError('width')"),
            {},
            {},
        )
    with pytest.raises(Unread, match="AsyncFor"):
        source = "class Model:\n def __init__(self, c):\n  async for i in c: pass"
        load(Toy(tmp_path, source), {}, {})
    source = SERVER.replace("RMSNorm(", "elsewhere.Normal(").replace(
        "import torch.nn as nn", "import torch.nn as nn\nimport elsewhere"
    )
    toy = Toy(tmp_path, source)
    assert "elsewhere.Normal" not in toy.reader.unread
    load(toy, CONFIG, {n: s for n, s in names().items() if ".norm." not in n})
    assert "elsewhere.Normal" in toy.reader.unread


def test_a_layer_has_the_parameters_of_torch():
    hooks = layer_hooks()
    for made, real in (
        (hooks["Linear"](2, 3), nn.Linear(2, 3)),
        (hooks["Linear"](2, 3, bias=False), nn.Linear(2, 3, bias=False)),
        (hooks["Linear"](2, 3, False), nn.Linear(2, 3, False)),
        (hooks["LayerNorm"](4), nn.LayerNorm(4)),
        (
            hooks["LayerNorm"](4, elementwise_affine=False),
            nn.LayerNorm(4, elementwise_affine=False),
        ),
        (hooks["Embedding"](2, 3), nn.Embedding(2, 3)),
        (hooks["Conv2d"](1, 2, 3, bias=False), nn.Conv2d(1, 2, 3, bias=False)),
        (hooks["GELU"](), nn.GELU()),
        (
            hooks["Sequential"](
                hooks["Linear"](1, 1), hooks["SiLU"](), hooks["Linear"](1, 1, False)
            ),
            nn.Sequential(nn.Linear(1, 1), nn.SiLU(), nn.Linear(1, 1, False)),
        ),
    ):
        named = [name for name, _ in hooks["Module.named_parameters"](made)]
        assert named == [name for name, _ in real.named_parameters()], real


ADAPTED = """
import torch.nn as nn

class Names:
    language_model = ["text."]

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.qkv = QKVParallelLinear(4, 4)
        self.gate_up = MergedColumnParallelLinear(4, output_sizes=[4, 4])
        self.down = RowParallelLinear(4, 4)
        self.kv_b_proj = ColumnParallelLinear(4, 4)
        self.attention = MLAAttention()
        self.experts = MoERunner(config)

class MoERunner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.count = config["experts"]

    def get_expert_mapping(self):
        return [("w", f"experts.{i}.{one}.", i, "w") for i in range(self.count) for one in "ab"]

class Model(nn.Module, SupportsLoRA):
    is_3d_moe_weight = False
    packed_modules_mapping = {"qkv": ["q", "k", "v"]}

    def __init__(self, config):
        super().__init__()
        self.is_3d_moe_weight = config["fused"]
        self.text = nn.ModuleList([Block(config)])
        self.tower = nn.ModuleList([Block(config)])

    def get_mm_mapping(self):
        return Names()
"""


@pytest.mark.parametrize("fused", [False, True])
def test_layers_of_an_adapter_end_in_the_modules_that_vllm_wraps(fused, tmp_path):
    (tmp_path / "vllm/lora").mkdir(parents=True)
    (tmp_path / "vllm/model.py").write_text(ADAPTED)
    (tmp_path / "vllm/lora/utils.py").write_text(
        "def parse_fine_tuned_lora_name(name, mapper):\n    return name[5:-14], True\n"
    )
    hooks = layer_hooks() | Recorder().hooks()
    reader = reader_of(tmp_path, "vllm", hooks, ("vllm",))
    model = reader.imported("vllm.model", "Model")({"experts": 2, "fused": fused})
    experts = ["experts", "experts.base_layer"], ["experts.0.a", "experts.1.b"]
    for place in ("text", "tower"):
        ends = ["q", "v", "down", "qkvs", "gate_up", "kv_b_proj", *experts[0], *experts[1]]
        names = {end: f"peft.{place}.0.{end}" for end in ends}
        found = on_vllm(reader, model, [f"{name}.lora_A.weight" for name in names.values()])
        fit = {end: found.ends[name] for end, name in names.items() if name in found.ends}
        if place == "tower":
            assert fit == {}, "it computes the language model's alone"
            continue
        with_experts = {end: ["text.0.experts"] for end in experts[not fused]}
        layers = {"q": "qkv", "v": "qkv", "down": "down"}
        assert fit == {end: [f"text.0.{to}"] for end, to in layers.items()} | with_experts
        why = {end: found.refused[name] for end, name in names.items() if end not in fit}
        assert why["qkvs"] == "qkvs is not among the layers that it expects", "a changed name"
        assert why["gate_up"] == "no module computes text.0.gate_up", "packed, and nothing says so"
        assert why["kv_b_proj"].startswith("attention reads its weight")
        assert len(why) == 5
