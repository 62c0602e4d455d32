"""How much work a search does before it ends. The limits count plans and actions, not seconds: the same input, the same plan."""

from __future__ import annotations

ACTIONS = 400_000
"""The most actions that are simulated before a search ends."""
FIRST = 40
"""The most plans of one width that are simulated in a row and fit, best bound first."""
MOST = 320
"""The same with plans that do not fit, or on at most ten devices; and the most whose bounds are raised in a row."""
COMPARED = ACTIONS // 16
"""The most actions of a plan that is simulated only to compare its schedule."""
RAISED, ATTEMPTS = 12, 3
"""How many plans of a schedule get better bounds only to compare it, and how many of them are simulated."""
SMALL = 8192
"""The most actions of a plan that the engine simulates during a search, or that is kept while its bound rises."""
LOOKED = 30_000
"""The most actions of plans that the engine simulates during a search because an estimate does not tell whether they fit."""
WIDE = 1024
"""On more devices only plans of one width are tried."""
FEW = 10
"""On at most this number of devices all numbers of copies and all ways to cut a batch are tried, and more plans are improved."""
POLISHED, ORDERED = 200, 16
"""The most forwards of a plan whose order is searched, and the most devices: it takes longer than all else."""
TRIALS = 150
"""The most simulations of such improvements on more than ten devices; eight times as many on fewer."""
SHAPES = 6
"""How many plans of different shapes are mapped to other devices, with swaps."""
STARTED = 4 * SHAPES
"""How many of them are tried on regular orders of devices first, on at most ten devices."""
SWAPPED = 32
"""On more devices no two of them are swapped, and plans whose links make them slow are not simulated."""
RECUT, CUTS = 12, 40
"""How many plans of one width get other cuts, and how many of these are simulated for each."""
SQUEEZED = 200
"""How many plans that do not fit otherwise are simulated with cuts that need less memory."""
STAGES = 128
"""Cuts of plans with more stages are not moved."""
RUN = 4
"""How many ends of stages move together."""
LOOKS = 4000
"""The most plans that are bounded by each of the two."""
REFUSALS = 4
"""How many plans the engine may find too large, one by one."""
RETRIED = 8
"""After how many of them plans with stages of any width are improved again on few devices; later only if no plan is left."""
ROUNDS = 12
"""The most steps by which a plan with stages of any width is improved."""
