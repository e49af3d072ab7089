"""Names that a checkpoint's files share with the writer and the reader: paths, and the types of safetensors."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from forebay.errors import CheckpointError, OptionError

StrPath = str | os.PathLike[str]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Types as safetensors names them."""

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return the name of a tensor's type in a file."""
    if dtype not in DTYPES:
        raise CheckpointError(f"{tensor} is of type {dtype}, which safetensors does not have; cast it before saving")
    return DTYPES[dtype]


def dtype_of(name: str, tensor: str) -> torch.dtype:
    """Return the type of a tensor from its name in a file."""
    if name not in _TYPES:
        raise CheckpointError(
            f"tensor {tensor!r} is of type {name}, which torch {torch.__version__} does not have; update torch"
        )
    return _TYPES[name]


def absolute(path: StrPath) -> Path:
    """Return a path that does not depend on the current folder; ``~`` is the home folder, as in a shell."""
    text = os.fspath(path)
    if text == "":
        raise OptionError("invalid path: ''; name a folder")
    return (Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)).absolute()


def is_path(checkpoint_id: StrPath) -> bool:
    """Whether an id of DCP's is a path in a file system."""
    return "://" not in os.fspath(checkpoint_id)
