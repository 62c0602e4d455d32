"""A profile as a table for a terminal: groups of equal layers in a row, with times, bytes and what they add up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.ir.profile import LayerCost, Profile, ProfileSource

WHERE = {
    ProfileSource.MEASURED: "times measured on",
    ProfileSource.ESTIMATED: "times estimated for",
    ProfileSource.PUBLISHED: "published times of",
}
HEAD = ("layers", "", "forward", "input half", "weight half", "output", "saved", "fixed", "transient", "parameters")


def profile_table(profile: Profile) -> str:
    """Returns the table. Times are those of the largest number of rows, bytes those of one row."""
    rows: list[tuple[str, ...]] = [HEAD]
    for count, layer in _equal(profile.layers):
        times = [f"{1e3 * t[-1]:.4g} ms" for t in (layer.forward_s, layer.input_s, layer.weight_s)]
        sizes = (layer.output_bytes, layer.saved_bytes, layer.fixed_bytes, layer.transient_bytes, layer.parameter_bytes)
        rows.append((layer.name, f"x {count}" if count > 1 else "", *times, *map(_size, sizes)))
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    lines = [" ".join(_cell(text, at, widths[at]) for at, text in enumerate(row)).rstrip() for row in rows]
    return "\n".join((*lines, *_summary(profile)))


def _cell(text: str, at: int, width: int) -> str:
    return text.ljust(width) if at < 2 else text.rjust(width + 1)


def _summary(profile: Profile) -> Iterator[str]:
    layers, rows = profile.layers, profile.rows
    count = f"{rows[-1]} row{'s' if rows[-1] > 1 else ''}" if rows else "a microbatch"
    forward, backward = (sum(getattr(layer, name)[-1] for layer in layers) for name in ("forward_s", "backward_s"))
    tied = any(layer.ties for layer in layers)
    parameters = sum(layer.parameter_bytes for layer in layers)
    yield (
        f"{WHERE[profile.source]} {profile.device or 'an unknown device'} in {profile.precision}, error {profile.error:.0%}; "
        f"bytes of one row, times of {count}"
    )
    yield (
        f"{len(layers)} layers: forward {1e3 * forward:.4g} ms, backward {1e3 * backward:.4g} ms, "
        f"{_size(parameters)} of parameters{' (tied ones in each layer that uses them)' if tied else ''}, "
        f"{profile.optimizer_bytes_per_parameter:g} bytes of optimizer state per parameter"
    )


def _equal(layers: Sequence[LayerCost]) -> Iterator[tuple[int, LayerCost]]:
    """Yields each cost once, in the order of its first layer, with the number of layers that have it."""
    found: dict[LayerCost, list[LayerCost]] = {}
    for layer in layers:
        found.setdefault(replace(layer, name=""), []).append(layer)
    for same in found.values():
        yield len(same), same[0]


def _size(number: float) -> str:
    """Formats 1234567 as 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
