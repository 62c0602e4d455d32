"""Links between devices, computed from their hosts without a loop over all pairs of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshwright.ir.links.link import Link
from meshwright.ir.links.machines import Host

Pair = tuple[int, int]
Ranks = Sequence[int]
FREE = Link()


def crossing(one: Host, other: Host, spine: Link | None) -> Link:
    """Returns the link between devices of two hosts. It is the slower card, or the link between racks if that is slower."""
    found = one.card.slower(other.card)
    return found if spine is None or one.rack == other.rack else found.slower(spine)


def distinct_links(hosts: Sequence[Host], spine: Link | None) -> set[Link]:
    """Returns every kind of link of these hosts: a host is given once for each of its devices that count."""
    together = Counter(hosts)
    found = {host.inside for host, devices in together.items() if host.devices > 1 and devices > 1}
    racks: dict[tuple[Link, int], int] = {}
    for host, devices in together.items():
        racks[host.card, host.rack] = racks.get((host.card, host.rack), 0) + -(-devices // host.devices)
    kinds = list(racks)
    for a, (card, rack) in enumerate(kinds):
        if racks[card, rack] > 1:
            found.add(card)
        for other, place in kinds[a + 1 :]:
            link = card.slower(other)
            found.add(link if spine is None or rack == place else link.slower(spine))
    return found


def slowest_link(hosts: Sequence[Host], spine: Link | None, host_of: Sequence[int], here: Ranks, there: Ranks | None) -> Link:
    """Returns the largest latency and the lowest bandwidth among devices, or between them and others."""
    first = Counter(map(host_of.__getitem__, here))
    second = first if there is None else Counter(map(host_of.__getitem__, there))
    either = first if there is None else Counter(map(host_of.__getitem__, {*here, *there}))
    found = FREE
    for host in first:
        if host in second and either[host] > 1:
            found = found.slower(hosts[host].inside)
    for side, opposite in ((first, second), (second, first)):
        for host in side:
            if len(opposite) > 1 or (opposite and host not in opposite):
                found = found.slower(hosts[host].card)
    racks, others = ({hosts[host].rack for host in side} for side in (first, second))
    if spine is not None and racks and others and (len(racks) > 1 or len(others) > 1 or racks != others):
        found = found.slower(spine)
    return found


def divided_cards(
    hosts: Sequence[Host], pairs: Iterable[Pair], place: Callable[[int], Pair], spine: Link | None, *, half: bool
) -> Mapping[Pair, Link]:
    """Returns the links of pairs that cross shared cards. `place` gives the host of a device, and its number in the host.

    A card's rate is divided by the pairs that leave through it, and by those that arrive; by both together if `half`.
    """
    crossings = []
    leaving: Counter[Pair] = Counter()
    arriving: Counter[Pair] = leaving if half else Counter()
    for source, target in dict.fromkeys(pairs):
        (a, one), (b, other) = place(source), place(target)
        if a == b:
            continue
        ends = (a, hosts[a].card_of(one)), (b, hosts[b].card_of(other))
        leaving[ends[0]] += 1
        arriving[ends[1]] += 1
        crossings.append(((source, target), ends))
    found: dict[Pair, Link] = {}
    for pair, (out, into) in crossings:
        sides = [(hosts[host], count[host, card]) for (host, card), count in ((out, leaving), (into, arriving))]
        if any(host.cards for host, _ in sides):
            link = crossing(hosts[out[0]], hosts[into[0]], spine)
            for host, flows in sides:
                if host.cards:
                    link = link.slower(host.card.divided(flows))
            found[pair] = link
    return found
