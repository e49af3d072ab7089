"""Activation offload: saved tensors are kept, offloaded or recomputed.

``handle`` is what users call. ``find`` finds a model's layers, ``call`` stands before their calls, ``saved`` moves what
they save, ``recompute`` runs layers again in the backward pass, and ``budget`` measures passes and follows plans.
"""

from forebay.activations.handle import ActivationOffload, offload_activations, save_on_host

__all__ = ["ActivationOffload", "offload_activations", "save_on_host"]
