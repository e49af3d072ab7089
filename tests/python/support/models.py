"""Models and functions whose activations are offloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from support.offload import WIDTH

if TYPE_CHECKING:
    from collections.abc import Callable

FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "h h^T h": lambda x, w: (x @ w) @ (x @ w).T @ (x @ w),
    "one h, three times": lambda x, w: (lambda h: h @ h.T @ h)(x @ w),
    "a tensor and its transpose": lambda x, w: (lambda h: h * h.T.contiguous().T + (h.T @ h).sum())(x @ w),
    "slices": lambda x, w: (lambda h: torch.cat([h[:, :40].tanh() * h[:, 24:], h[:, :24]], dim=1))(x @ w),
    "small slices": lambda x, w: (lambda h: h + (h[:20] * h[70:90]).sum())(x @ w),
    "chunks": lambda x, w: (lambda a, b: torch.cat([a * b, b.exp()], dim=1))(*(x @ w).chunk(2, dim=1)),
    "rows apart": lambda x, w: (lambda h: h + (h[::2].exp() * h[1::2]).sum())(x @ w),
    "the same tensor twice": lambda x, w: (lambda h: h * h + h.sin() * h)(x @ w),
    "the parameter itself": lambda x, w: x @ w * w.sum() + (w * w).sum(),
    "views of the parameter": lambda x, w: (x @ w.t()) @ w + x @ w.view(-1).view(WIDTH, WIDTH).tanh(),
    "detached from the parameter": lambda x, w: (x * w.detach()[0]).exp() @ w,
    "data of the parameter": lambda x, w: (x @ w.data).sin() @ w,
    "expanded": lambda x, w: (x @ w) * (x @ w).mean(0, keepdim=True).expand(x.shape[0], -1).exp(),
    "permuted": lambda x, w: (x @ w).view(-1, 8, 8).permute(2, 0, 1).exp().permute(1, 2, 0).reshape(-1, WIDTH),
    "complex": lambda x, w: torch.fft.ifft(torch.fft.fft(x @ w) * torch.fft.fft(x)).real,
    "conjugated": lambda x, w: (lambda f: (f * f.conj() * f.conj()).real)(torch.fft.fft(x @ w)),
    "half precision": lambda x, w: ((x.bfloat16() @ w.bfloat16()).exp() * x.bfloat16()).float(),
    "double precision": lambda x, w: ((x.double() @ w.double()).exp()).float(),
    "indices": lambda x, w: (x @ w).gather(1, (x.argsort(1))).exp(),
    "masks": lambda x, w: torch.where(x > 0, (x @ w).exp(), (x @ w).sin()),
    "padded": lambda x, w: torch.nn.functional.pad((x @ w), (1, 1))[:, 1:-1].exp(),
    "as strided": lambda x, w: (lambda h: h.as_strided((40, 50), (2, 64), 3).exp().sum() + h)(x @ w),
}
"""Each makes a layer save something that a copy by address or by tensor would get wrong."""


def tiny(kind: str, device: torch.device) -> Any:
    """Return a small model of the library transformers, the same one each time."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config, model = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[kind]
    return model(config(**sizes, attn_implementation="sdpa")).to(device).train()


def hf_step(model: Any, device: torch.device, *, padded: bool = False) -> list[torch.Tensor]:
    """Return the gradients of one pass."""
    tokens = torch.randint(3, 97, (2, 96), generator=torch.Generator().manual_seed(5)).to(device)
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :30] = 0
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens, attention_mask=mask if padded else None, labels=tokens).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def forwards_of(model: Any) -> list[int]:
    """Have every layer count its forward passes."""
    calls: list[int] = []
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    return calls
