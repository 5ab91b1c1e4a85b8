"""Whether a folder's weights fit its config.json, from the headers of the files: nothing is read.

transformers itself loads tensors without values (on the meta device), so names that are changed on
load, tied weights and experts that are fused are judged by what will really load them.
"""

from __future__ import annotations

from pathlib import Path

from vlmpack.backends.unread import Loaded, load_by_headers
from vlmpack.model_folder.weights import raise_misfits


def check_weights(folder: Path) -> Loaded:
    """Raise unless loading the folder will find every weight, in its shape, and no others but those
    that stay as they are.

    Raises:
        ModelError: no weights, a damaged or missing file, a weight that is missing, left over or
            of the wrong shape.
        CapabilityError: no family serves its model_type.
    """
    loaded = load_by_headers(folder)
    raise_misfits(folder, loaded.info)
    return loaded
