"""Tensor containers: safetensors and GGUF, checked on reading and written atomically.

    with open_tensors(path) as file:            # a file of either kind (by its content), or a Hugging Face folder
        file.metadata, file.entries["wte"]      # metadata, and dtype, shape, place of each tensor
        file.tensor("wte")                      # a view of the file, or fp32 unpacked from a quantised tensor
        file.read_into("wte", parameter.data)   # directly into memory, in any dtype
    write_safetensors(folder, tensors); write_gguf(path, metadata, tensors)

A header is checked completely before any tensor is returned: a contradiction in it, or with the size of the file,
raises RequestError. Nothing is unpickled: `pickled.py` reads tensors that torch saved and calls no function that they
name.
"""

from glassformer.conversion.storage.base import (
    ManyFiles,
    Packed,
    SingleFile,
    TensorEntry,
    TensorFile,
    TensorSource,
    nothing_collected,
)
from glassformer.conversion.storage.containers import is_gguf, means_weights, open_tensors
from glassformer.conversion.storage.cut import CutFile
from glassformer.conversion.storage.gguf import GGUFFile, write_gguf
from glassformer.conversion.storage.pickled import PickledFile
from glassformer.conversion.storage.quants import DTYPES
from glassformer.conversion.storage.safetensors import WEIGHT_FILES, SafetensorsFile, open_folder, write_safetensors

__all__ = [
    "CutFile", "DTYPES", "GGUFFile", "ManyFiles", "Packed", "PickledFile", "SafetensorsFile", "SingleFile",
    "TensorEntry", "TensorFile", "TensorSource", "WEIGHT_FILES", "is_gguf", "means_weights", "nothing_collected",
    "open_folder", "open_tensors", "write_gguf", "write_safetensors",
]  # fmt: skip
