"""The server that loader processes fork from, started before anything heavy is imported.

Its imports take as long as those of the training process, so they run at the same time on another
core. It shares no state with the training process, and imports no torch.
"""

from __future__ import annotations

from vlmpack.data.forkserver import start_server
from vlmpack.recipe import Recipe

WORKER_PRELOAD = (
    "torch",
    "vlmpack.data.loading.loader",
    "vlmpack.encode.encoder",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.image_processing_auto",
)
"""What loader workers find imported when they start; the encoder would import it on first use."""


def start_worker_server(recipe: Recipe) -> None:
    """Start the server if the recipe has loader processes; returns at once."""
    if recipe.data.num_workers:
        start_server(WORKER_PRELOAD)
