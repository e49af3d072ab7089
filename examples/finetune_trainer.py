"""Fine-tune a model of transformers with its Trainer: state on the host, saves beside training.

Needs transformers and accelerate. The model has random weights, so that nothing is downloaded; put a
``from_pretrained`` in its place.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from forebay.integrations.transformers import attach

folder = sys.argv[1] if len(sys.argv) > 1 else "out/finetune_trainer"
on_gpu = torch.cuda.is_available()
if on_gpu:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16}
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
length = 1024 if on_gpu else 32
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=length, **sizes))
if on_gpu:
    model.to(torch.bfloat16)  # the f32 masters are on the host

tokens = torch.randint(0, 512, (64, length))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    folder,
    max_steps=8,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    logging_steps=4,
    save_steps=4,
    save_total_limit=2,
    report_to="none",
    use_cpu=not on_gpu,
)
trainer = Trainer(model, arguments, train_dataset=data)
callback = attach(trainer, placement="stream", saves=True)
trainer.train()

stats = trainer.optimizer.optimizer.stats()  # accelerate's wrapper has the optimizer inside
print(f"{stats['pinned_bytes'] / 1e6:.1f} MB of state on the host")
print("a killed run goes on with: callback.resume(trainer)")
