"""LoRA on a frozen model: only the adapters are trained, and only they are saved.

Needs transformers and peft. The model has random weights, so that nothing is downloaded; put a ``from_pretrained`` in
its place.
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import forebay
from forebay import checkpoint

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
if on_gpu:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 16, "num_attention_heads": 32}
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
length = 2048 if on_gpu else 32


def build():
    """Make the base model, the same at each call, with fresh adapters."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=length, **sizes))
    base.to(device, torch.bfloat16 if on_gpu else torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    return model, forebay.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def train(model, optimizer, steps):
    """Take steps, and return the loss of the last one."""
    batch = torch.randint(0, 512, (2, length), generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(steps):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


model, optimizer = build()
# The adapters need little state. What fills the GPU are activations: offload them.
handle = forebay.offload_activations(model, fraction=1.0)
print(f"loss {train(model, optimizer, 5):.4f}")
with tempfile.TemporaryDirectory() as folder:
    checkpoint.save(folder, model, optimizer, trained_only=True)
    found = checkpoint.inspect(folder)
    whole = sum(p.nbytes for p in model.parameters())
    print(f"saved {found['tensor_bytes'] / 1e6:.2f} MB; the model has {whole / 1e6:.2f} MB")
    handle.remove()
    expected = train(model, optimizer, 5)

    model, optimizer = build()
    checkpoint.load(folder, model, optimizer)  # leaves the frozen parameters as they are
    assert train(model, optimizer, 5) == expected, "a resumed run has the same bits"
    print(f"resumed, loss {expected:.4f}")
