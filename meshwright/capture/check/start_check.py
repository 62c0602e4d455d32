"""Compares a model with its captured layers at several sizes, in training and in evaluation.

    verdict = compare(model, layers, starts, flat, example)
    verdict.training                       what differs in training; None if nothing does
    verdict.evaluation                     the same for evaluation

The model runs first. A size at which the model itself fails does not count as a difference. The model is not changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.capture.check import likely_reasons as reasons
from meshwright.capture.check.check_result import Difference, Verdict
from meshwright.capture.check.example_sizes import Example, Wanted, small_examples
from meshwright.capture.check.fingerprints import TOLERANCE
from meshwright.capture.check.first_difference import first_difference
from meshwright.capture.check.likely_reasons import Reason
from meshwright.capture.check.paired_runs import Distance, Run, Seen, furthest, layers_run, model_run, see
from meshwright.capture.check.perturbed_values import stirred
from meshwright.capture.check.random_streams import Counted, Draws, python_states, seed_all
from meshwright.capture.check.restore_model import plain_attributes, put_back, untouched
from meshwright.capture.trace.batch_columns import Columns, columns_of
from meshwright.capture.trace.graph import Flat

LOUDER = 4096.0
"""The factor that the loss is multiplied by to test whether gradients scale with it. A power of two causes no rounding."""

BUDGET_S = 60.0
"""Sizes that would start after this many seconds are skipped, with a note."""


@dataclass
class Check:
    """A model and its captured layers, ready for the comparison."""

    model: nn.Module
    layers: Sequence[nn.Module]
    starts: Sequence[int]
    flat: Flat
    columns: Columns
    tolerance: float
    dtype: torch.dtype | None = None
    """The dtype that layers compute in under autocast."""
    budget_s: float = BUDGET_S
    modes: tuple[bool, ...] = (True, False)
    """Compare in training, in evaluation, or in both."""
    verdict: Verdict = field(default_factory=Verdict)

    def __post_init__(self) -> None:
        self.written: set[str] = set()
        self.own: Run = model_run(self.model, self.columns, self.flat.outputs, self.written)
        self.captured: Run = layers_run(self.layers, self.starts, self.flat.outputs)
        self.first: Example | None = None
        self.whole = Example({})
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.buffers = dict(self.model.named_buffers())

    def run(self, given: dict[str, Tensor]) -> Verdict:
        """Compare at all sizes. Each mode stops at its first difference."""
        begun, found, self.whole = time.perf_counter(), self.verdict, Example(given)
        with untouched(self.model, self.layers), stirred(self.model):
            held = dict.fromkeys(b for part in (self.model, *self.layers) for b in part.buffers())
            self.kept = [(b, b.detach().clone()) for b in held if not b.is_meta]
            for wanted in small_examples(given, self.flat):
                if time.perf_counter() - begun > self.budget_s:
                    found.notes.append(f"skipped: {wanted.examples[0]} (the check has taken {self.budget_s:g} s)")
                    continue
                for training in self.modes:
                    if found.refused is None and (found.training if training else found.evaluation) is None:
                        self._at(wanted, training=training)
        if self.written:
            found.notes.append(f"in evaluation the model writes into its own parameters, for example {min(self.written)}")
        found.seconds = time.perf_counter() - begun
        return found

    def _at(self, wanted: Wanted, *, training: bool) -> None:
        """Compare at one size in one mode."""
        backward = training and self.first is None
        chosen = self._runnable(wanted, training=training, backward=backward)
        if chosen is None:
            return
        example, own = chosen
        self.first = self.first or example
        if backward:
            self._ask_again(example, own)
            self._ask_louder(example, own)
            if self.verdict.refused is not None:
                return
            self._ask_without_options(example, own)
        distance, keyed = self._distance(example, own, training=training, backward=backward)
        self.verdict.largest = max(self.verdict.largest, distance.error)
        mode = "training" if training else "evaluation"
        self.verdict.runs.append(f"{mode} at {example}: {distance.error:.0e}{' (a seed for each draw)' if keyed else ''}")
        if not distance.error <= self.tolerance:
            found = self._explained(distance, example, training=training)
            if training:
                self.verdict.training = found
            else:
                self.verdict.evaluation = found
        elif backward and self.dtype is not None:
            self._under_autocast(example)

    def _runnable(self, wanted: Wanted, *, training: bool, backward: bool) -> tuple[Example, Seen] | None:
        """Return the first example of this size for which the model itself gives a finite loss, else the last that it runs."""
        last: tuple[Example, Seen] | None = None
        for example in wanted.examples:
            try:
                seen = self._see(self.own, example, training=training, backward=backward)
            except Exception as error:  # an error of the model itself is not a difference
                text = str(error).strip().splitlines()
                mode = "training" if training else "evaluation"
                why = f"{type(error).__name__}: {text[0] if text else ''}"
                self.verdict.notes.append(f"the model itself fails in {mode} at {example}: {why}")
                continue
            last = example, seen
            if seen.finite:
                break
        return last

    def _see(
        self, run: Run, example: Example, *, training: bool, backward: bool = False, seed: int = 0, keyed: bool = False
    ) -> Seen:
        self._begin(training=training, seed=seed)
        return see(run, example.columns, self.model, backward=backward, grad=training, under=Draws() if keyed else None)

    def _begin(self, *, training: bool, seed: int = 0) -> None:
        """Prepare a run, always in the same way: modes, buffers and random states."""
        self.model.train(training)
        for layer in self.layers:
            layer.train(training)
        put_back(self.kept)
        seed_all(seed)

    def _ask_again(self, example: Example, own: Seen) -> None:
        """Run the forward again: detect changed Python state, draws outside of torch, and different outputs."""
        self._begin(training=True)
        attributes, states = plain_attributes(self.model), python_states()
        again = see(self.own, example.columns, self.model, backward=False)
        after = plain_attributes(self.model)
        changed = [name for name, value in after.items() if name in attributes and _changed(attributes[name], value)]
        drawn = [name for name, state in python_states().items() if state != states[name]]
        replaced = [name for name, b in self.model.named_buffers() if b is not self.buffers.get(name)]
        self.verdict.refused = reasons.of_buffers(replaced) or reasons.of_state(changed, drawn, self.model)
        distance = furthest(Seen(own.outputs), Seen(again.outputs), self.tolerance)
        if self.verdict.refused is None and not distance.error <= self.tolerance:
            self.verdict.refused = reasons.of_itself(distance.error)

    def _ask_louder(self, example: Example, own: Seen) -> None:
        """Test that gradients scale with the loss. A backward that adds to gradients or clips them by value does not."""
        if self.verdict.refused is None:
            self._begin(training=True)
            louder = see(self.own, example.columns, self.model, backward=True, scale=LOUDER)
            distance = furthest(Seen({}, own.gradients), Seen({}, louder.gradients), self.tolerance)
            if not distance.error <= self.tolerance:
                self.verdict.refused = reasons.of_scale(distance.what, distance.error, LOUDER)

    def _ask_without_options(self, example: Example, own: Seen) -> None:
        """Warn if the model returns something else with its own defaults. Caches are off, as in the Trainer of Hugging Face."""
        if not self.columns.options:
            return
        plain = model_run(self.model, replace(self.columns, options=()), self.flat.outputs)
        try:
            seen = self._see(plain, example, training=True)
        except Exception:  # a model that needs these options always gets them
            return
        distance = furthest(Seen(own.outputs), Seen(seen.outputs), self.tolerance)
        if not distance.error <= self.tolerance:
            options = ", ".join(f"{name}={value}" for name, value in self.columns.options)
            self.verdict.warnings.append(
                f"the model is trained with {options}, and its output differs by {distance.error:.1e} from that without: "
                "transformers detects packed sequences only without a cache (config.use_cache = False)"
            )

    def _distance(self, example: Example, own: Seen, *, training: bool, backward: bool) -> tuple[Distance, bool]:
        """Return how far captured layers are from the model, and whether one seed per draw was needed to compare them."""
        how: dict[str, Any] = {"training": training, "backward": backward}
        try:
            captured = self._see(self.captured, example, **how)
        except Exception as error:  # any error of the layers alone is a difference
            text = str(error).strip().splitlines()
            return Distance(f"the captured layers raise {type(error).__name__}: {text[0] if text else ''}", inf), False
        distance = furthest(own, captured, self.tolerance)
        if not self.flat.random:
            return distance, False
        if not training and example is self.first:
            other = self._see(self.own, example, training=False, seed=1)
            if furthest(Seen(own.outputs), Seen(other.outputs), self.tolerance).error > self.tolerance:
                self.verdict.draws_in_evaluation = True
                self.verdict.notes.append("the model draws random numbers in evaluation")
        if not training and example is self.first and (more := self._drawn(self.captured) - self._drawn(self.own)) > 0:
            return Distance("the number of draws", float(more)), False
        if distance.error <= self.tolerance or (not training and not self.verdict.draws_in_evaluation):
            return distance, False
        keyed = furthest(
            self._see(self.own, example, keyed=True, **how), self._see(self.captured, example, keyed=True, **how), self.tolerance
        )
        return (keyed, True) if keyed.error <= self.tolerance else (distance, False)

    def _drawn(self, run: Run) -> int:
        """Count the draws in evaluation. A training graph may draw where the model does not, and outputs rarely show it."""
        assert self.first is not None
        self._begin(training=False)
        with Counted() as counted:
            see(run, self.first.columns, self.model, backward=False, grad=False)
        return counted.draws

    def _under_autocast(self, example: Example) -> None:
        """Run the first size again under autocast, with the tolerance of that dtype."""
        assert self.dtype is not None
        device, tolerance = next(iter(example.columns.values())).device.type, TOLERANCE[self.dtype]
        seen = []
        for run in (self.own, self.captured):
            self._begin(training=True)
            try:
                under = torch.autocast(device, dtype=self.dtype)
                seen.append(see(run, example.columns, self.model, backward=False, under=under))
            except Exception as error:  # as above: an error of the layers alone is a difference
                if not seen:
                    self.verdict.notes.append(f"the model itself fails under autocast: {type(error).__name__}: {error}")
                    return
                seen.append(Seen())
        distance = furthest(seen[0], seen[1], tolerance)
        name = str(self.dtype).removeprefix("torch.")
        self.verdict.runs.append(f"training under {name} at {example}: {distance.error:.0e}")
        if not distance.error <= tolerance:
            reason = Reason(f"only under autocast to {name}: forward reads dtypes, which a trace fixes", "use fp32")
            self.verdict.training = Difference(distance, str(example), True, "", reason)

    def _explained(self, distance: Distance, example: Example, *, training: bool) -> Difference:
        """Return a difference with its first layer and its likely reason."""
        reason = reasons.unknown()
        if not training and self.verdict.training is None:
            reason = reasons.of_mode(self.model)
        elif distance.what.startswith("the gradient"):
            reason = reasons.of_gradient()
        elif example.shapes != self.whole.shapes and self._agrees(self.whole, training=training):
            reason = reasons.of_size(str(self.whole))
        with torch.enable_grad():
            layer = first_difference(
                self.model,
                self.own,
                self.layers,
                example.columns,
                begin=lambda: self._begin(training=training),
                tolerance=self.tolerance,
                outputs=not distance.what.startswith("the gradient"),
            )
        return Difference(distance, str(example), training, layer, reason)

    def _agrees(self, example: Example, *, training: bool) -> bool:
        """True if captured layers agree with the model at another size."""
        try:
            own = self._see(self.own, example, training=training)
            return self._distance(example, own, training=training, backward=False)[0].error <= self.tolerance
        except Exception:  # an error of the model itself proves nothing
            return False


def compare(
    model: nn.Module,
    layers: Sequence[nn.Module],
    starts: Sequence[int],
    flat: Flat,
    example_batch: Any,
    *,
    own_loss: bool = False,
    dtype: torch.dtype | None = None,
    budget_s: float = BUDGET_S,
    modes: tuple[bool, ...] = (True, False),
) -> Verdict:
    """Compare a model with layers captured from it. Both must have their weights. `dtype` is the dtype of autocast."""
    columns = columns_of(model, example_batch, own_loss=own_loss)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    tolerance = max(TOLERANCE.get(kind, TOLERANCE[torch.float32]) for kind in dtypes)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    given = {name: t.to(device) for name, t in columns.given(example_batch).items()}
    return Check(model, layers, starts, flat, columns, tolerance, dtype, budget_s, modes).run(given)


def _changed(before: Any, after: Any) -> bool:
    try:
        return bool(before is not after and before != after)
    except Exception:  # values that cannot be compared are not counters
        return False
