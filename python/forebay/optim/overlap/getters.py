"""What can be asked of a tensor without reading its memory, as torch names it to ``__torch_function__``."""

from __future__ import annotations

from typing import Any

import torch

_NAMES = (
    "_backward_hooks", "_base", "_cdata", "_has_symbolic_sizes_strides", "_is_param", "_post_accumulate_grad_hooks",
    "_python_dispatch", "_version", "device", "dtype", "grad", "grad_dtype", "grad_fn", "is_cpu", "is_cuda", "is_ipu",
    "is_leaf", "is_maia", "is_meta", "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_ort", "is_quantized",
    "is_sparse", "is_sparse_csr", "is_vulkan", "is_xla", "is_xpu", "itemsize", "layout", "name", "names", "nbytes",
    "ndim", "output_nr", "requires_grad", "retains_grad", "shape", "volatile",
)  # fmt: skip

GETTERS: dict[str, Any] = {
    name: getattr(torch.Tensor, name).__get__
    for name in _NAMES
    if hasattr(getattr(torch.Tensor, name, None), "__get__")
}
"""The getters of attributes, by name."""

METADATA: set[Any] = {
    getattr(torch.Tensor, name)
    for name in (
        "__hash__", "__len__", "_is_view", "dim", "element_size", "get_device", "has_names", "is_contiguous",
        "is_floating_point", "is_inference", "is_same_size", "ndimension", "nelement", "numel", "size", "stride",
        "storage_offset", "sym_size",
    )
    if hasattr(torch.Tensor, name)
}  # fmt: skip
"""Methods that read shape, type and place only."""

_TENSOR: Any = torch.Tensor

GRADIENT: set[Any] = {
    _TENSOR.grad.__set__,
    _TENSOR.grad.__delete__,
    _TENSOR.requires_grad.__set__,
    _TENSOR.requires_grad_,
    _TENSOR.register_hook,
    _TENSOR.register_post_accumulate_grad_hook,
    _TENSOR.retain_grad,
    _TENSOR.backward,
}
"""What is done to the gradient of a parameter, or with it."""
