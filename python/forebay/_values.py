"""Values that are no tensors, as JSON and back: what a checkpoint keeps without pickle.

Numbers, texts, None, lists and dicts with texts for keys are themselves. Everything else is an object whose key ``$``
names its type.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import torch

from forebay.errors import CheckpointError

TAG = "$"


def encode(value: Any, name: str) -> Any:
    """Return a value as JSON can have it.

    Parameters
    ----------
    value
        The value.
    name
        Where it stands, for the error.
    """
    if value is None or isinstance(value, (bool, str)):
        # Subclasses of str (an enum's members, for example) would come back as something else.
        if type(value) in (type(None), bool, str):
            return value
    elif type(value) is int:
        # Beyond 64 bits a JSON reader may turn it into a float.
        return value if -(1 << 63) <= value < 1 << 63 else {TAG: "int", "value": str(value)}
    elif type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
    elif type(value) is list:
        return [encode(item, f"{name}.{i}") for i, item in enumerate(value)]
    elif type(value) in (tuple, torch.Size):
        kind = "tuple" if type(value) is tuple else "size"
        return {TAG: kind, "value": [encode(item, f"{name}.{i}") for i, item in enumerate(value)]}
    elif type(value) is dict:
        if all(type(key) is str and key != TAG for key in value):
            return {key: encode(item, f"{name}.{key}") for key, item in value.items()}
        pairs = [[encode(key, name), encode(item, f"{name}.{key}")] for key, item in value.items()]
        return {TAG: "dict", "value": pairs}
    elif type(value) is bytes:
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    elif isinstance(value, torch.dtype):
        return {TAG: "dtype", "value": str(value).removeprefix("torch.")}
    elif isinstance(value, torch.device):
        return {TAG: "device", "value": str(value)}
    elif isinstance(value, complex):
        return {TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    elif hasattr(value, "item") and getattr(value, "shape", None) == ():
        # A scalar of numpy's.
        return encode(value.item(), name)
    raise CheckpointError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot keep; make it of "
        "tensors, numbers, texts, bytes, lists, tuples and dicts"
    )


def decode(value: Any) -> Any:
    """Return the value that ``encode`` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    inner: Any = value.get("value")
    try:
        match kind:
            case "int":
                return int(inner)
            case "float":
                return float(inner)
            case "tuple":
                return tuple(decode(item) for item in inner)
            case "size":
                return torch.Size(decode(item) for item in inner)
            case "dict":
                return {decode(key): decode(item) for key, item in inner}
            case "bytes":
                return base64.b64decode(inner, validate=True)
            case "dtype":
                found = getattr(torch, inner, None)
                if isinstance(found, torch.dtype):
                    return found
            case "device":
                return torch.device(inner)
            case "complex":
                return complex(float(inner[0]), float(inner[1]))
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        raise CheckpointError(f"a value of type {kind!r} cannot be read: {error}") from error
    raise CheckpointError(f"a value of type {kind!r} cannot be read")
