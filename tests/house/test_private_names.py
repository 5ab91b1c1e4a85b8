"""Private names of other packages are neither read nor replaced, but for a list with reasons.

A release may change them without a word. A private name has a leading underscore, and nothing in
vlmpack defines it. It is an attribute, something imported, or what getattr, setattr or hasattr get.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.shards import ROOT

PACKAGE = ROOT / "vlmpack"

TRANSFORMERS = {
    "_apply_gate": "what a class of experts does between its two products",
    "_attn_implementation": "no public name says which attention a model has; the public setter "
    "asks the hub about names with 'flash' in them",
    "_deepstack_process": "Qwen3-VL's decoder takes features of every slot in no other way",
    "_from_config": "builds a part of a model as the whole model builds it",
    "_is_expert_parallel": "marks modules of experts, which have no class in common",
    "_keep_in_fp32_modules_strict": "which weights are saved in float32 whatever the dtype",
    "_merge_kwargs": "a processor's settings, for a class that no family of ours serves",
    "_model_mapping": "the class that an Auto class picks, before any weight is read",
    "_process_images": "what such a processor writes for an image, without a conversation",
    "_set_gradient_checkpointing": "the public call takes no function of ours",
    "_supports_sdpa": "Mamba-2 has no attention, and no public name says so",
}
OTHERS = {
    "_exit": "os: documented",
    "_current_frames": "sys: documented",
    "_replace": "named tuples: documented",
    "_fields": "named tuples: documented",
    "_C": "torch: what its own Python files call",
    "_foreach_copy_": "torch: one kernel for many tensors, as its optimizers do",
    "_foreach_mul_": "torch: as above",
    "_foreach_norm": "torch: as above",
    "_disabled_torch_function_impl": "torch: tensors of a class of our own",
    "_make_wrapper_subclass": "torch: as above",
    "_to_copy": "torch: an operator's name",
    "_unsafe_view": "torch: an operator's name",
    "_is_view": "torch: whether a tensor is one of another",
    "_dynamo": "torch: the settings of its compiler, its backends and errors",
    "_unsafe_preserve_version_counter": "torch: a sum of products, kept as each of them",
    "_pytree": "torch: what operators are given",
    "_python_dispatch": "torch: what operators are called",
    "_utils": "torch: the slices of a sharded tensor",
    "_distributed_c10d": "torch: stores and works that have no other home",
    "_get_default_store": "torch: the store of a launch",
    "_set_pg_timeout": "torch before 2.14: the time limit of a group",
    "_current_graph_task_id": "torch: the number of a backward pass",
    "_schema": "torch: which arguments an operator writes to",
    "_version": "torch: whether a tensor was changed in place",
    "_parameters": "torch: a module's own parameters",
    "_forward_pre_hooks": "torch: a module's hooks, which no public name lists",
    "_forward_hooks": "torch: as above",
    "_backward_pre_hooks": "torch: as above",
    "_backward_hooks": "torch: as above",
    "_world": "torch: all groups of a process",
    "_workers": "torch: processes of a DataLoader, which are watched",
    "_shutdown_workers": "torch: as above",
    "_worker_result_queue": "torch: as above",
    "_rcvd_idx": "torch: as above",
    "_task_info": "torch: as above",
    "_forward_attention": "Megatron: the part of a layer that a graph replays",
    "_get_model_param_range_map": "Megatron: which rank holds what of a parameter",
    "_flash_attention_forward": "flash attention with log sum exp, which the public call drops",
    "_flash_attention_backward": "as above",
    "_flash_attn_varlen_forward": "as above",
    "_flash_attn_varlen_backward": "as above",
}
KEYWORDS = {
    "backends/mcore/versions.py": "Megatron hands layer specs as partials",
}
"""Where a `partial` is read back."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if getattr(node.value, "id", "") == "self" else []


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and private name that a module reads or replaces."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not f"{node.module}".startswith("vlmpack"):
            names = [*f"{node.module}".split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            given = [a.value for a in node.args if isinstance(a, ast.Constant)]
            names = [f"{each}" for each in given if asks]
        yield from ((node.lineno, name) for name in names if is_private(name))


def foreign(sources: dict[str, str]) -> dict[str, set[str]]:
    """Private name of another package -> where it is used."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    own = {name for tree in trees.values() for name in defined(tree)}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for line, name in used(tree):
            if name not in own:
                found.setdefault(name, set()).add(f"{path}:{line}")
    return found


def package() -> dict[str, str]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {f"{path.relative_to(PACKAGE)}": path.read_text("utf-8") for path in files}


def test_private_names_of_others_are_those_of_the_list() -> None:
    found = foreign(package())
    listed = TRANSFORMERS.keys() | OTHERS.keys()
    assert {name: at for name, at in found.items() if name not in listed} == {}
    hidden = {"_C", "_schema", "_version", "_parameters", "_world"}  # names that we have too
    assert listed - found.keys() - hidden == set(), "a name that nobody reads any more"


def test_a_new_private_name_is_found() -> None:
    """Control: read, replaced, imported, and asked for by its name."""
    control = {
        "a.py": "from transformers.utils import chat_template_utils\n"
        "chat_template_utils._compile_jinja_template = print\n"
        "model._tied_weights_keys\n"
        "getattr(model, '_no_split_modules', None)\n"
        "from transformers.utils._lazy import _deep\n",
        "b.py": "def _own(): ...\nmodule._own\n",
    }
    assert foreign(control).keys() == {
        *("_compile_jinja_template", "_tied_weights_keys", "_no_split_modules", "_lazy", "_deep")
    }


def read_back(sources: dict[str, str]) -> set[str]:
    """Where a partial's keywords are read, or an object is copied through `__reduce__`."""
    return {
        path
        for path, text in sources.items()
        if "keywords" in text or "__reduce__" in text
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and node.attr == "keywords")
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "__reduce__"
        )
    }


def test_no_closure_is_read_back() -> None:
    assert read_back(package()) == KEYWORDS.keys()
    control = {
        "a.py": "step.keywords['sums']",
        "b.py": "make, folder = encoder.__reduce__()",
        "c.py": "def __reduce__(self): ...",
    }
    assert read_back(control) == {"a.py", "b.py"}


def test_the_package_is_where_it_is_looked_for() -> None:
    assert len(package()) > 350 and Path(PACKAGE, "encode/encoder.py").is_file()
