"""Orders on a zigzag of stages, and how a V of workers unfolds into two pipelines in opposite directions.

`steady` alternates one forward and one backward on a wave of S = 2 W D stages. `letters` writes the phases of a V as text.
Removing whole microbatches keeps any order valid, so both plan a convenient number of microbatches and drop the surplus.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from meshwright.ir.action import Action, Cell, Op
from meshwright.ir.placement import Placement

Order = list[Action | Cell]


def steady(workers: int, microbatches: int, *, waves: int = 1, backward: Op = Op.B) -> list[list[Action]]:
    """S forwards, then one backward and one forward in turn, in groups of D microbatches.

    Forwards are sorted by the slots S group + stage + 2 index, backwards likewise from the last stage down. Worker w would idle
    D-1-w slots before its second chunk arrives; it runs that many first-chunk forwards of the second group there instead.
    One group more than needed is planned, so that the end is spaced like the middle.
    """
    stages = 2 * waves * workers
    placement = Placement.zigzag(workers, legs=2 * waves)
    start = [stages * group + 2 * index for group in range(-(-microbatches // workers) + 1) for index in range(workers)]
    lists = []
    for worker in range(workers):
        forward: list[tuple[int, Action]] = []
        back: list[tuple[int, Action]] = []
        for _, stage in placement.held[worker]:
            slots = [slot + stage for slot in start]
            if stage == worker:
                slots[workers : 2 * workers - 1 - worker] = [worker + 1 + 2 * i for i in range(workers - 1 - worker)]
                slots.sort()
            forward += [(slot, Action(Op.F, stage, mb)) for mb, slot in enumerate(slots)]
            back += [(slot + stages - 1 - stage, Action(backward, stage, mb)) for mb, slot in enumerate(start)]
        forwards, backs = ([action for _, action in sorted(pairs)] for pairs in (forward, back))
        turns = [action for pair in zip(backs, forwards[stages:], strict=False) for action in pair]
        order = forwards[:stages] + turns + backs[len(forwards) - stages :]
        lists.append([action for action in order if action.mb < microbatches])
    return lists


def letters(text: str, *, shallow: int, deep: int, microbatches: int) -> Order:
    """Parses the phases of one worker of a V: capital letters for its shallow stage, small letters for its deep one.

    "w" runs the oldest pending weight half, "[Fb]" is a cell; the microbatch is the number of earlier uses of the letter.
    """
    seen: Counter[str] = Counter()
    owed: deque[Action] = deque()
    order: Order = []
    cell: list[Action] | None = None
    for letter in text:
        if letter == "[":
            cell = []
        elif letter == "]":
            assert cell is not None
            order += [Cell(*cell)] if len(cell) == 2 else cell
            cell = None
        elif letter == "w":
            order += [a._replace(op=Op.W) for a in [owed.popleft()] if a.mb < microbatches]
        else:
            count = letter.translate(str.maketrans("Ii", "Bb"))
            action = Action(Op(letter.upper()), shallow if letter.isupper() else deep, seen[count])
            seen[count] += 1
            if action.op is Op.I:
                owed.append(action)
            if action.mb < microbatches:
                (order if cell is None else cell).append(action)
    return order


def unfold(lists: Sequence[Sequence[Action | Cell]], microbatches: int, *, unit: int) -> list[Order]:
    """Unfolds a V of h workers into two mirrored replicas on 2h workers: microbatch m of the V runs once in each direction.

    In every `unit` of microbatches (the last one may be shorter), the first half runs down, the second half up.
    """
    h = len(lists)

    def turned(action: Action, side: int) -> Action:
        replica = side if action.stage < h else 1 - side
        first = action.mb // (unit // 2) * unit
        half = min(unit, microbatches - first) // 2
        return action._replace(mb=first + replica * half + action.mb % (unit // 2), replica=replica)

    def row(order: Sequence[Action | Cell], side: int) -> Order:
        return [turned(e, side) if isinstance(e, Action) else Cell(turned(e.first, side), turned(e.second, side)) for e in order]

    return [row(order, 0) for order in lists] + [row(order, 1) for order in reversed(lists)]
