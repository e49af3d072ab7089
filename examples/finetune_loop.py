"""Fine-tune a model of transformers in a loop of your own, and export weights that ``from_pretrained`` loads.

Needs transformers. The model has random weights, so that nothing is downloaded; put a ``from_pretrained`` in its place.
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import forebay
from forebay import checkpoint

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
if on_gpu:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16}
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
length = 1024 if on_gpu else 32
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=length, **sizes))
model.to(device, torch.bfloat16 if on_gpu else torch.float32)

optimizer = forebay.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=20)
batch = torch.randint(0, 512, (4, length), device=device)

for step in range(10):
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}, norm {optimizer.grad_norm.item():.3f}")

with tempfile.TemporaryDirectory() as folder:
    run, out = Path(folder, "run"), Path(folder, "out")
    checkpoint.save(run, model, optimizer, extra={"schedule": schedule.state_dict()})
    model.config.save_pretrained(out)
    checkpoint.export_weights(run, out)
    again, report = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    print("unexpected keys:", len(report["unexpected_keys"]), "missing keys:", len(report["missing_keys"]))
