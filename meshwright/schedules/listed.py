"""SPP's execution order (Luo et al., INFOCOM'22): one order for stages and for the channels between them, from S and M only.

Stage, channel, stage, ... are K = 2S-1 resources in a row. In cycle t, block j of a microbatch's path serves microbatch
t - j: forward m of resource k runs in cycle k + m, its backward in cycle 2K-2-k + m, and backwards come first within a cycle.
The makespan is at most (M + 4S - 4) C + max A, where C is the work of the busiest resource per microbatch and A are the syncs.

    strict=true   uses these lists unchanged, for stages and channels; stage n starts 4(S - n) forwards ahead
    strict=false  work-conserving: runs the first ready element of the list, decided from costs
    memory        from costs, with at most this many activations alive: the best of several orders, both above included

From costs, each direction of a link is a channel of its own if the cluster says that links work both ways at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import MeshwrightError
from meshwright.ir.action import Action, Op
from meshwright.ir.cluster import Cluster, Duplex
from meshwright.ir.placement import Placement
from meshwright.ir.schedule import ChannelOrder, Schedule
from meshwright.ir.stage_cost import StageCost, rows_for
from meshwright.schedules._orders.order_search import search
from meshwright.schedules._orders.order_strings import Chain, Words, actions_of, caps, in_time, word

COMPARED: tuple[dict[str, object], ...] = ({}, {"strict": False})


def build(
    *,
    workers: int,
    microbatches: int,
    costs: Sequence[StageCost] | None = None,
    cluster: Cluster | None = None,
    strict: bool | None = None,
    memory: int | None = None,
) -> Schedule:
    """Stages and channels in SPP's order (strict by default), or an order derived from it for given costs and a cap."""
    if memory is not None and strict:
        raise MeshwrightError(
            f"listed: strict=true does not change its lists, so it takes no memory={memory}", fix=f"memory={memory} alone"
        )
    if memory is not None and memory < 1:
        raise MeshwrightError(f"listed needs memory for at least one activation, got memory={memory}", fix=f"memory={workers}")
    if memory is None and strict is not False:
        words = [word(2 * (2 * workers - 2 - k), microbatches) for k in range(2 * workers - 1)]
        return _schedule(workers, microbatches, words)
    chain = _chain(rows_for(costs, workers), microbatches, cluster or Cluster())
    wide = len(chain.forward)
    ahead = [max(1, 2 * (wide - 1 - k)) for k in range(wide)]
    limits = caps(memory, chain)
    conserving = in_time(limits, [0.0] * wide, chain, warm=ahead)
    assert conserving is not None
    if memory is None:
        return _schedule(workers, microbatches, conserving, both_ways=bool(chain.there))
    capped = [word(min(a, k), microbatches) for a, k in zip(ahead, limits, strict=True)]
    return _schedule(workers, microbatches, search(chain, limits, [capped, conserving]), both_ways=bool(chain.there))


def _chain(costs: Sequence[StageCost], microbatches: int, cluster: Cluster) -> Chain:
    """Returns the stages and the channels between them: resources of their own if both directions of a link share it."""
    links = [cluster.between(s, s + 1) for s in range(len(costs) - 1)]
    there = tuple(link.busy_s(cost.output_bytes) for link, cost in zip(links, costs, strict=False))
    returns = [cluster.between(s + 1, s) for s in range(len(costs) - 1)]
    back = tuple(link.busy_s(cost.gradient_bytes) for link, cost in zip(returns, costs, strict=False))
    plain = Chain.of(costs, microbatches, max((link.latency_s for link in links), default=0.0))
    if not any(there) and not any(back):
        return plain
    if cluster.duplex is Duplex.FULL:
        return plain._replace(there=there, back=back)
    between = (0.0,) * len(there)
    return Chain(_mixed(plain.forward, there), _mixed(plain.backward, back), 0.0, _mixed(plain.after, between), microbatches)


def _mixed(stages: Sequence[float], channels: Sequence[float]) -> tuple[float, ...]:
    """Returns stage, channel, stage, ..."""
    return tuple(stages[k // 2] if k % 2 == 0 else channels[k // 2] for k in range(2 * len(stages) - 1))


def _schedule(workers: int, microbatches: int, words: Words, *, both_ways: bool = False) -> Schedule:
    """Builds lists for the stages and, if the words contain them, for the channels. `both_ways`: one for each direction."""
    stages = words[::2] if len(words) > workers else words
    lists: tuple[tuple[Action, ...], ...] = actions_of(stages)
    rows = actions_of(words[1::2]) if len(words) > workers else lists[:-1] if both_ways else ()
    channels: list[ChannelOrder] = []
    for k, row in enumerate(rows):
        producers = tuple(a if a.op is Op.F else a._replace(stage=a.stage + 1) for a in row)
        split = [tuple(a for a in producers if a.op is op) for op in (Op.F, Op.B)] if both_ways else [producers]
        channels += [ChannelOrder((k, k + 1), each) for each in split]
    return Schedule("listed", Placement.line(workers), microbatches, lists, channels=tuple(channels))
