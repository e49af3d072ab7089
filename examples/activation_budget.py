"""A budget for activations: each layer is kept, offloaded or recomputed, whichever is fastest within the budget."""

import torch

import forebay

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
width, layers, rows = (4096, 12, 16384) if on_gpu else (128, 6, 512)
torch.manual_seed(0)


class Block(torch.nn.Module):
    """A feed-forward layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, inputs):
        """Add the layer's result to its inputs."""
        return inputs + self.down(torch.nn.functional.gelu(self.up(self.norm(inputs))))


model = torch.nn.Sequential(*[Block() for _ in range(layers)]).to(device)
inputs = torch.randn(rows, width, device=device)


def gradients():
    """Run a pass, and return the gradient of the first weight."""
    model.zero_grad()
    model(inputs).square().mean().backward()
    return model[0].up.weight.grad.clone()


plain = gradients()
saved_bytes = layers * rows * width * 4 * 10  # what this model saves for the backward pass, about
# The layers of a ModuleList or of FSDP2 are found; those of a Sequential are given.
handle = forebay.offload_activations(model, layers=list(model), budget_bytes=saved_bytes // 2)
for _ in range(5):  # the first two passes measure
    assert torch.equal(gradients(), plain), "offload changes no bit"
print(handle.explain())
handle.remove()
