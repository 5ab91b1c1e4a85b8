"""Checkpoints that are whole or not there, the same for every engine and layout.

    checkpoints/step-00000200/
      model-00000-of-00002.safetensors      the boxes of parameters that this rank wrote, under
                                            transformers' names; `name@a:b,c:d` is a part
      optimizer-00000-of-00002.safetensors  exp_avg.<name> and exp_avg_sq.<name>, likewise
      index.json                            each tensor's shape, dtype and boxes
      random.safetensors                    generator states of rank 0
      state.json                            step, optimizer steps, data state, counters
      manifest.json                         size and SHA-256 of each file above
      COMPLETE                              the SHA-256 of manifest.json; written last

All ranks write into one folder with a `.tmp-` name. Each rank fsyncs every file that it wrote and
reads it back. When all are done, rank 0 writes the files that are no rank's own, renames the folder
and writes COMPLETE. Only then are older checkpoints removed. Nothing is pickled."""

from vlmpack.training.checkpoint.folders import (
    COMPLETE,
    STATE,
    data_state_of,
    find_damage,
    list_checkpoints,
    newest_checkpoint,
    read_verified,
    saved_data_state,
    step_folder,
)
from vlmpack.training.checkpoint.index import random_state, restore_random_state
from vlmpack.training.checkpoint.load import CheckpointReader, load_checkpoint
from vlmpack.training.checkpoint.save import CheckpointContent, Saver

__all__ = [
    "COMPLETE",
    "STATE",
    "CheckpointContent",
    "CheckpointReader",
    "Saver",
    "data_state_of",
    "find_damage",
    "list_checkpoints",
    "load_checkpoint",
    "newest_checkpoint",
    "random_state",
    "read_verified",
    "restore_random_state",
    "saved_data_state",
    "step_folder",
]
