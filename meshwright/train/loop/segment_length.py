"""How many steps a schedule without a flush trains at once: up to the next step at which the run logs, evaluates, saves or ends.

The results of a segment are known at its end only, so it must not pass such a step. How steps are cut into segments changes
no result, only time: a segment of T steps with N workers is 2 (N - 1) / (2 N T) longer than T steps in the middle of a run.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerState

from meshwright.train.setup.build_schedule import SEGMENT


def segment_length(args: Any, state: TrainerState, traced: int | None = None) -> int:
    """Returns the number of steps of the next segment. `traced` is the number of steps until tracing starts or ends."""
    done = state.global_step
    every = [
        (args.logging_strategy, state.logging_steps),
        (args.eval_strategy, state.eval_steps),
        (args.save_strategy, state.save_steps),
    ]
    ahead = [SEGMENT, state.max_steps - done]
    ahead += [int(steps) - done % int(steps) for strategy, steps in every if strategy == "steps" and steps]
    ahead += [1] if args.logging_first_step and not done else []
    ahead += [traced] if traced is not None else []
    return max(1, min(ahead))
