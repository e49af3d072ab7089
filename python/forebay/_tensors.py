"""Tensors become numbers here: addresses, lengths and types for the extension module.

The extension trusts these numbers, so everything that it relies on is checked here: memory is dense, on the stated
device, and held by the caller until the extension returns.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay._core import Looked
from forebay._device import CPU, is_supported, supported
from forebay.errors import OptionError

if TYPE_CHECKING:
    from forebay._core import HostView

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types that the kernels support, with their numbers."""

_DTYPE = operator.attrgetter("dtype")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# In torch 2.10 and later.
_TABLE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

PIECE_ELEMENTS = 4 << 20
"""Elements handled at a time, so that no second copy of a whole tensor is needed."""


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; costs nothing for ordinary tensors, and does not import torch.distributed."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the bytes: a DTensor's local tensor, a collective's result, or the tensor itself.

    Reads the attribute instead of calling ``to_local``, which is differentiable and 25 times slower.
    """
    if type(tensor) in _PLAIN:
        return tensor
    inner: Any = getattr(tensor, "_local_tensor", None)
    inner = tensor if inner is None else inner
    if type(inner) in _PLAIN:
        return inner  # type: ignore[no-any-return]
    # This is the first use of a functional collective's result, which waits for the collective.
    wait = getattr(inner, "trigger_wait", None)
    found: torch.Tensor = inner if wait is None else wait()
    return found


def is_placed_like(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a gradient is sharded as its parameter is."""
    if not is_dtensor(gradient):
        return True
    ours, theirs = getattr(parameter, "_spec", None), gradient._spec  # type: ignore[attr-defined]
    # FSDP2 gives both the same one.
    return ours is theirs or (ours is not None and ours.mesh == theirs.mesh and ours.placements == theirs.placements)


def placed_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that is sharded as its parameter is.

    With sequence parallelism, gradients of replicated weights are partial sums that are not reduced yet.
    """
    if is_placed_like(parameter, gradient):
        return gradient if is_dtensor(gradient) else local(gradient)
    ours, theirs = getattr(parameter, "_spec", None), gradient._spec  # type: ignore[attr-defined]
    if ours is None or ours.mesh != theirs.mesh:
        kind = "a plain tensor" if ours is None else f"a DTensor over {ours.mesh}"
        raise OptionError(
            f"a parameter of shape {tuple(parameter.shape)} is {kind}, its gradient a DTensor over {theirs.mesh}; give "
            "it a gradient of the same kind"
        )
    placed: torch.Tensor = gradient.redistribute(placements=ours.placements)  # type: ignore[attr-defined]
    return placed


def locals_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``local`` of each; the list itself if it has no DTensor."""
    if set(map(type, tensors)) <= set(_PLAIN):
        return tensors
    return [local(tensor) for tensor in tensors]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps, in any order."""
    return tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) == 0


def address(tensor: torch.Tensor) -> int:
    """Return the address of the first element; 1 for an empty tensor, because 0 means no tensor."""
    return tensor.data_ptr() or 1


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's first byte; 0 for an empty storage."""
    return storage.data_ptr()


def look(tensors: list[torch.Tensor]) -> Looked:
    """Read addresses, types, devices and lengths; raises a KeyError for a type that the kernels do not support.

    If torch has DLPack's table of C functions, each tensor costs one call in Rust instead of five from here, and no
    number becomes a Python object.
    """
    found = _core.look(tensors, _TABLE, _PLAIN) if _TABLE is not None else None
    if found is not None:
        return found
    return Looked(
        addresses(tensors),
        dtype_numbers(tensors),
        list(map(torch.Tensor.get_device, tensors)),
        list(map(torch.Tensor.numel, tensors)),
        all(map(torch.Tensor.is_contiguous, tensors)),
    )


def look_with_gradients(
    parameters: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[int] | None, Looked, Looked] | None:
    """Return the gradients, the places of the parameters that have one, and ``look`` of parameters and gradients.

    The places are None if all parameters have a gradient. Returns None if the tensors must be read one by one.
    """
    return _core.look_with_gradients(parameters, _TABLE, _PLAIN) if _TABLE is not None else None


def addresses(tensors: list[torch.Tensor]) -> list[int]:
    """Return ``address`` of each; raise if a tensor's storage was emptied."""
    found = list(map(torch.Tensor.data_ptr, tensors))
    if all(found):
        return found
    for tensor in tensors:
        check_memory(tensor, "a parameter or gradient")
    return [pointer or 1 for pointer in found]


def dtype_numbers(tensors: list[torch.Tensor]) -> list[int]:
    """Return the number of each tensor's type; raises a KeyError for a type that the kernels do not support."""
    dtypes = list(map(_DTYPE, tensors))
    found = set(dtypes)
    if len(found) == 1:
        return [DTYPES[found.pop()]] * len(dtypes)
    return [DTYPES[dtype] for dtype in dtypes]


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of state for a tensor: its own, or contiguous ones if it is not dense."""
    return tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


def in_order(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the same values and these strides; the tensor itself if it has them already."""
    if tensor.stride() == strides or tensor.numel() <= 1:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def host_tensor(view: HostView, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over pinned memory, with a storage of exactly its size, shaped and strided as ``like``.

    Parameters
    ----------
    view
        The memory. The tensor keeps it, and with it the slab, alive.
    like
        The (local) parameter whose shape and strides to use. If it is not dense, the tensor is contiguous.
    """
    if like.numel() == 0:
        return torch.empty_strided(like.shape, like.stride(), dtype=torch.float32, device=CPU)
    flat = torch.frombuffer(view, dtype=torch.float32)
    return torch.as_strided(flat, like.shape, dense_strides(like))


def state_like(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return ``data`` as state of a parameter: unchanged, or as a DTensor if the parameter is one.

    The DTensor is made with the constructor: ``from_local`` would move the data to the mesh's device. Attributes of the
    parameter that describe uneven shards to ``torch.distributed.checkpoint`` are copied.
    """
    if not is_dtensor(parameter):
        return data
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec: Any = parameter._spec  # type: ignore[attr-defined]
    meta = TensorMeta(parameter.shape, parameter.stride(), data.dtype)
    sharded = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    state: Any = DTensor(data, sharded, requires_grad=False)  # type: ignore[no-untyped-call]
    describe_like(parameter, state)
    result: torch.Tensor = state
    return result


def describe_like(described: torch.Tensor, other: Any) -> None:
    """Copy the attributes of a DTensor that describe uneven shards to ``torch.distributed.checkpoint``."""
    for name in ("__create_chunk_list__", "__create_write_items__"):
        if hasattr(local(described), name):
            setattr(local(other), name, getattr(local(described), name))
        if name in vars(described):
            setattr(other, name, vars(described)[name])


def follow_weight(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Set each element of a master to the weight's value if its rounding differs from the weight.

    Works in pieces of a few MiB, so that neither side holds a second copy.
    """
    weight = in_order(weight, master.stride())
    flat_master = torch.as_strided(master, (master.numel(),), (1,))
    flat_weight = torch.as_strided(weight, (weight.numel(),), (1,))
    for start in range(0, master.numel(), PIECE_ELEMENTS):
        piece, now = flat_master[start : start + PIECE_ELEMENTS], flat_weight[start : start + PIECE_ELEMENTS]
        here = piece.to(now.device)
        piece.copy_(torch.where(here.to(now.dtype) != now, now.float(), here))


def check_parameter(parameter: torch.Tensor, name: str, taker: str) -> None:
    """Raise if the kernels cannot update a parameter; ``taker`` is the optimizer's name."""
    inner = local(parameter)
    if inner.layout != torch.strided:
        raise OptionError(f"{name} has layout {inner.layout}; {taker} takes dense parameters only")
    if inner.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise OptionError(f"{name} has dtype {inner.dtype}; {taker} takes {known}")
    if not is_supported(inner.device):
        raise OptionError(f"{name} is on {inner.device}; {taker} takes parameters on {supported()}")
    check_overlap(inner, name)


def check_overlap(tensor: torch.Tensor, name: str) -> None:
    """Raise if a tensor cannot be written element by element."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise OptionError(f"{name} has elements that share memory, as expand makes them; make it contiguous")


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raise if a tensor's storage was emptied, or if it never had memory of its own."""
    if not tensor.numel():
        return
    try:
        found = tensor.data_ptr()
    except RuntimeError:
        found = 0
    if not found and type(tensor) not in _PLAIN:
        raise OptionError(
            f"{name} is a {type(tensor).__name__}; forebay's optimizers take plain tensors and DTensors of them"
        )
    if not found:
        raise OptionError(f"{name} has an empty storage; restore its memory before the step")


def check_gradient(parameter: torch.Tensor, gradient: torch.Tensor, name: str, taker: str) -> None:
    """Raise if the kernels cannot read a gradient; ``taker`` is the optimizer's name."""
    if gradient.layout != torch.strided:
        raise OptionError(
            f"{name} has a gradient of layout {gradient.layout}; {taker} takes dense gradients only, "
            "use sparse=False in the embedding or torch.optim.SparseAdam for that parameter"
        )
    if gradient.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise OptionError(f"{name} has a gradient of dtype {gradient.dtype}; {taker} takes {known}")
    if gradient.device != parameter.device:
        raise OptionError(f"{name} is on {parameter.device} and its gradient on {gradient.device}; move one of them")
    if gradient.shape != parameter.shape:
        raise OptionError(
            f"{name} has shape {tuple(parameter.shape)}, its gradient {tuple(gradient.shape)}; give a gradient of the "
            "parameter's shape"
        )
    check_memory(parameter, name)
    check_memory(gradient, f"the gradient of {name}")


def bump_versions(tensors: list[torch.Tensor]) -> None:
    """Tell autograd that tensors were changed in place."""
    torch.autograd.graph.increment_version(tensors)


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all tensors as one vector; DTensors count with all shards, on all ranks.

    torch takes the norm of plain tensors or of DTensors on one mesh; a model may have both, and several meshes. And
    torch rounds the norm of half-precision tensors to their type: the error is up to 0.4 % in bf16, and f16 overflows
    from 65520 on. Here the norm is f32.
    """
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if is_dtensor(tensor) else None  # type: ignore[attr-defined]
        half = None if tensor.dtype == torch.float32 else (tensor.dtype, tensor.device)
        kinds.setdefault((mesh, half), []).append(tensor)
    norms: list[torch.Tensor] = []
    for (_, half), group in kinds.items():
        norm: Any
        if half is None:
            norm = torch.nn.utils.get_total_norm(group)
        else:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(group, 2.0, dtype=torch.float32)))
        norms.append(norm.full_tensor() if is_dtensor(norm) else norm)
    if len(norms) == 1:
        return norms[0]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total
