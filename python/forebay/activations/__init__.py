"""Activation offload: saved tensors are kept, offloaded or recomputed.

Users call ``handle``. ``find`` finds a model's layers, ``call`` wraps their calls, ``saved`` moves their saved tensors,
``recompute`` runs layers again in the backward pass, and ``budget`` measures passes and follows plans.
"""

from forebay.activations.handle import ActivationOffload, offload_activations, save_on_host

__all__ = ["ActivationOffload", "offload_activations", "save_on_host"]
