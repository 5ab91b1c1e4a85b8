"""What a folder is said to hold where it is no whole model."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpack.capabilities.folder import read_config
from vlmpack.errors import ModelError


def test_a_folder_of_adapters_is_told_from_one_without_a_model(tmp_path: Path) -> None:
    """peft writes no config.json beside them."""
    with pytest.raises(ModelError, match=r"has no config.json; it is no transformers model"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelError, match=r"holds adapters .* merge them first \(vlmpack merge\)"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ModelError, match=r"holds adapters .* nor can these be merged: .* 'IA3'"):
        read_config(tmp_path)
