"""Values that are no tensors, as JSON and back, without pickle.

Numbers, strings, None, lists, and dicts whose keys are sorted strings are stored as plain JSON. Everything else is an
object whose key ``$`` names its type. A tensor among the values is stored as a tensor of the checkpoint, and the value
has the tensor's name.
"""

from __future__ import annotations

import base64
import collections
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from forebay._device import CPU
from forebay.checkpoint.files import DTYPES
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

TAG = "$"

_DICTS: dict[type, str] = {dict: "dict", collections.OrderedDict: "ordered", collections.Counter: "counter"}
_KINDS = {kind: made for made, kind in _DICTS.items()}
_UPDATE = "update forebay, or load an earlier checkpoint"


class Encoded:
    """A value as JSON, or an error. The error is raised later, when ``dcp.save`` can send it to all ranks."""

    def __init__(self, value: Any, tensors: dict[str, torch.Tensor], name: str) -> None:
        self._json: Any = None
        self._error: CheckpointError | None = None
        try:
            self._json = encode(value, name, tensors)
        except CheckpointError as error:
            self._error = error

    def json(self) -> Any:
        """Return the JSON, or raise the error."""
        if self._error is not None:
            raise self._error
        return self._json


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return a value as JSON.

    Parameters
    ----------
    value
        The value.
    name
        Its name, for errors and for the names of tensors.
    tensors
        Tensors among the values are added here, by name. Without it, only 0-dim tensors are allowed.
    """
    if type(value) is Encoded:
        return value.json()
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        if tensors is not None:
            if value.layout != torch.strided or value.is_meta:
                what = "is on the device meta and has no data" if value.is_meta else f"has layout {value.layout}"
                raise CheckpointError(f"{name} {what}, which a checkpoint cannot store; make it dense before saving")
            # Two paths of keys may give the same string when they are joined.
            while name in tensors:
                name += "_"
            tensors[name] = value
            return {TAG: "tensor", "value": name}
        if value.dim() == 0:
            return {
                TAG: "scalar",
                "value": encode(value.item(), name),
                "dtype": str(value.dtype).removeprefix("torch."),
            }
    elif numpy is not None and type(value) is numpy.ndarray:
        if not value.dtype.hasobject and value.dtype.names is None:
            return _encode_array(value, name, tensors)
    elif value is None or isinstance(value, (bool, str)):
        # Subclasses of str (an enum's members, for example) would be loaded as plain strings.
        if type(value) in (type(None), bool, str):
            return value
        if numpy is not None and type(value) is numpy.str_:
            return str(value)
    elif type(value) is int:
        # A JSON reader may turn a number of more than 64 bits into a float.
        return value if -(1 << 63) <= value < 1 << 63 else {TAG: "int", "value": str(value)}
    elif type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
    elif type(value) is list:
        return [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    elif type(value) in (tuple, torch.Size):
        kind = "tuple" if type(value) is tuple else "size"
        return {TAG: kind, "value": [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    elif type(value) in _DICTS:
        keys = list(value)
        # The manifest's objects are sorted, and a dict has to be loaded in its own order.
        if type(value) is dict and all(type(key) is str and key != TAG for key in keys) and keys == sorted(keys):
            return {key: encode(item, f"{name}.{key}", tensors) for key, item in value.items()}
        pairs = [[encode(key, name), encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]
        return {TAG: _DICTS[type(value)], "value": pairs}
    elif type(value) is bytes:
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    elif isinstance(value, torch.dtype):
        return {TAG: "dtype", "value": str(value).removeprefix("torch.")}
    elif isinstance(value, torch.device):
        return {TAG: "device", "value": str(value)}
    elif isinstance(value, complex):
        return {TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    elif hasattr(value, "item") and getattr(value, "shape", None) == ():
        # A scalar of numpy becomes a number: it can be read without numpy.
        return encode(value.item(), name)
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot store; use "
        "tensors, arrays, numbers, strings, bytes, lists, tuples and dicts"
    )


def _encode_array(value: Any, name: str, tensors: dict[str, torch.Tensor] | None) -> Any:
    """Return an array of numpy as JSON. It is stored as a tensor if torch has its type."""
    if tensors is not None:
        try:
            tensor = torch.from_numpy(value.copy(order="C"))
        except (TypeError, ValueError):
            tensor = None
        if tensor is not None and tensor.dtype in DTYPES:
            return {TAG: "array", "value": encode(tensor, name, tensors)["value"]}
    data = base64.b64encode(value.tobytes()).decode()
    return {TAG: "raw_array", "value": data, "dtype": value.dtype.str, "shape": list(value.shape)}


def _decode_array(inner: str, described: dict[str, Any]) -> Any:
    """Return the array that ``_encode_array`` was given."""
    try:
        import numpy
    except ImportError as error:
        raise CheckpointError("a value is an array of numpy, which is not installed; install numpy") from error
    found = numpy.frombuffer(base64.b64decode(inner, validate=True), numpy.dtype(described["dtype"]))
    return found.reshape(described["shape"]).copy()


def decode(value: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Return the value that ``encode`` was given, with the tensors that ``tensor`` returns for their names."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: decode(item, tensor) for key, item in value.items()}
    inner: Any = value.get("value")
    if kind in ("tensor", "array") and tensor is not None and isinstance(inner, str):
        return tensor(inner) if kind == "tensor" else tensor(inner).numpy()
    try:
        match kind:
            case "int":
                return int(inner)
            case "float":
                return float(inner)
            case "tuple":
                return tuple(decode(item, tensor) for item in inner)
            case "size":
                return torch.Size(decode(item) for item in inner)
            case "dict" | "ordered" | "counter":
                return _KINDS[kind]({decode(key): decode(item, tensor) for key, item in inner})
            case "scalar":
                return torch.tensor(decode(inner), dtype=getattr(torch, value["dtype"]), device=CPU)
            case "bytes":
                return base64.b64decode(inner, validate=True)
            case "raw_array":
                return _decode_array(inner, value)
            case "dtype":
                found = getattr(torch, inner, None)
                if isinstance(found, torch.dtype):
                    return found
            case "device":
                return torch.device(inner)
            case "complex":
                return complex(float(inner[0]), float(inner[1]))
    except CheckpointError:
        raise
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"a value of type {kind!r} cannot be read: {error}; {_UPDATE}") from error
    raise CheckpointError(f"a value of type {kind!r} cannot be read; {_UPDATE}")
