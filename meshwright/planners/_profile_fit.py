"""Whether a profile fits a request: its device and precision are those of the cluster, and it knows the rows that are asked for.

A profile without the name of a device (a published one) fits every cluster, and so do devices without speeds.
"""

from __future__ import annotations

from meshwright.costs.stages import known_speed
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster, Device
from meshwright.ir.links.machines import same_kind
from meshwright.ir.profile import Profile, ProfileSource
from meshwright.planners._limits import MOST_ROWS, Asked, SplitRows


def refuse_other_device(profile: Profile, cluster: Cluster, name: str = "CLUSTER") -> None:
    """Raises if times of the profile say nothing about the devices of a cluster. `name` is the file or preset of the cluster.

    Devices of several kinds are scaled by their speeds, if one of them is that of the profile.
    """
    kinds = {device.kind: device for device in cluster.devices if device.flops_per_s}
    if not kinds:
        return
    known = sorted({name for device in kinds.values() for name in device.flops_per_s})
    has = any(_has_precision(profile, device) for device in kinds.values())
    lacks = "" if has else f", for which the cluster has no speed in {profile.precision}, only in {', '.join(known)}"
    usable = profile.precision if has else "fp16" if "fp16" in known else "fp32"
    if profile.device and not any(same_kind(device.kind, profile.device) for device in cluster.devices):
        raise MeshwrightError(
            f"the profile has the times of {profile.device}, but the devices of the cluster are {', '.join(kinds)}{lacks}",
            fix=f"meshwright profile MODEL --precision {usable} --cluster {name} -o profile.json "
            f"(it measures on a machine with {' or '.join(kinds)}, and estimates on others)",
        )
    if not has:
        raise MeshwrightError(
            f"the profile is in {profile.precision}, but the devices of the cluster are {', '.join(kinds)}{lacks}",
            fix=f"meshwright profile MODEL --precision {usable} --cluster {name} -o profile.json, "
            f'or {profile.precision} = "100 TFLOPS" in the table of the device',
        )


def _has_precision(profile: Profile, device: Device) -> bool:
    """Whether a device has the precision of a profile. What was measured on a device of its kind can run on it."""
    is_measured = profile.source is ProfileSource.MEASURED and same_kind(device.kind, profile.device)
    return is_measured or not profile.device or known_speed(device, profile.precision) is not None


def profile_notes(asked: Asked) -> tuple[str, ...]:
    """Says what a plan needs and is not known: speeds of devices in the precision of the profile, and times for more rows."""
    profile, lacking = asked.profile, dict[str, None]()
    for device in asked.cluster.devices:
        if device.flops_per_s and not _has_precision(profile, device):
            lacking[device.kind] = None
    speeds = f"the cluster does not tell what {', '.join(lacking)} achieves in {profile.precision}: its best speed is assumed"
    return (*([speeds] if lacking else []), *_row_notes(asked))


def _row_notes(asked: Asked) -> tuple[str, ...]:
    """Says if a request would need times for more rows than the profile has."""
    known, rows, batch = asked.profile.rows, asked.limits.rows, asked.batch
    if not known:
        ignored = rows is not None and asked.limits.split_rows is SplitRows.IGNORE
        said = "the profile does not say how times depend on rows: --rows changes nothing without --split-rows even or uneven"
        return (said,) if ignored else ()
    has = f"the profile has times for {', '.join(map(str, known))} rows"
    if rows is not None and rows > known[-1]:
        return (f"{has}: times for up to {rows} rows are extrapolated and may be too short ({_again(known, rows)})",)
    share = min(MOST_ROWS, (batch or 0) // (asked.limits.dp or 1))
    if rows is None and share > known[-1]:
        return (f"{has}, so microbatches of more rows are not searched ({_again(known, share)})",)
    return ()


def _again(known: tuple[int, ...], most: int) -> str:
    """Returns the command that profiles more rows."""
    powers = (2**k for k in range(most.bit_length()))
    counts = sorted({*known, *(count for count in powers if count > known[-1]), most})
    return f"meshwright profile MODEL --rows {','.join(map(str, counts))} -o profile.json"
