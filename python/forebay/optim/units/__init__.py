"""Optimizers without an update rule of forebay: their own ``step`` runs on a few parameters at a time.

A **unit** is a few whole parameters with all their state. The state of all units is in pinned host memory. A step goes
through the units in order: while the optimizer's own ``step`` updates one unit, the state of the next one is fetched,
and the state of the one before is stored.

========================== =============================================================================================
``convert.py``             the object changes its class, and changes back
``manager.py``             everything that belongs to one optimizer: units, memory, wire, trust
``options.py``             ``unit_bytes`` and the other options
``run.py``                 one step
``counters.py``            numbers in groups and on the object, which advance once in a step
``unit.py``, ``layout.py`` parameters with their state, and where each tensor is in the unit's memory
``trees.py``               nested state, and tensors that consist of others
``state.py``, ``load.py``  ``optimizer.state``; state dicts
``memory.py``, ``wire.py`` pinned memory and slots; streams and events
``plan.py``                which parameters make a unit
``parameters.py``          which parameters there are, and what they must be like
``check.py``               whether a step on some parameters is the step on all, tried out on small copies
``standins.py``            those copies
``trials.py``              the steps that they take
========================== =============================================================================================
"""

from forebay.optim.units.convert import InUnits, offload_in_units, restore_from_units
from forebay.optim.units.options import UnitKeywords

__all__ = ["InUnits", "UnitKeywords", "offload_in_units", "restore_from_units"]
