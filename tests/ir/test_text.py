"""Text is a view of data: every action, cell, value and transfer prints as a short word that parses back to itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import Action, Cell, MeshwrightError, Op, Transfer, Value
from meshwright.ir.action import BY_VERSION, COMPUTE, NONE, Kind, actions, parse, parse_value, walk

COUNTS = st.one_of(st.integers(0, 12), st.integers(0, 999_999))
MAYBE = st.one_of(st.just(NONE), COUNTS)
SHIFTS = st.integers(0, 1000)
LONG = "9" * 5000
"""More digits than Python turns into a number without being asked."""

compute = st.builds(Action, st.sampled_from(sorted(COMPUTE)), COUNTS, COUNTS, COUNTS, COUNTS, MAYBE)
of_a_round = st.builds(Action, st.sampled_from([Op.G, Op.S, Op.U]), COUNTS, st.just(NONE), COUNTS, COUNTS, MAYBE)
norms = st.builds(Action, st.just(Op.N), st.just(NONE), st.just(NONE), COUNTS, COUNTS, MAYBE)
any_action = st.one_of(compute, of_a_round, norms)
any_cell = st.builds(Cell, any_action, any_action)
any_value = st.builds(Value, st.sampled_from(Kind), COUNTS, MAYBE, COUNTS, COUNTS, MAYBE, MAYBE)
any_transfer = st.builds(Transfer, st.booleans(), any_value, COUNTS)
any_entry = st.one_of(any_action, any_cell, any_transfer)
numbered = any_value.filter(lambda value: value.kind in BY_VERSION or value.mb != NONE)
"""Values that have what a shift moves: a round, or a microbatch."""
moving = st.one_of(any_action, any_cell, numbered, st.builds(Transfer, st.booleans(), numbered, COUNTS))


@given(any_entry)
def test_an_entry_parses_back(entry: Action | Cell | Transfer) -> None:
    again = parse(str(entry))
    assert again == entry
    assert type(again) is type(entry)
    assert str(again) == str(entry)


@given(any_value)
def test_a_value_parses_back(value: Value) -> None:
    assert parse_value(str(value)) == value


@given(any_entry)
def test_a_text_is_one_word(entry: Action | Cell | Transfer) -> None:
    assert str(entry).split() == [str(entry)]
    assert str(entry).isascii()


@given(any_entry)
def test_the_parts_of_a_parsed_entry_have_their_types(entry: Action | Cell | Transfer) -> None:
    again = parse(str(entry))
    assert all(type(action.op) is Op for action in actions(again))
    if isinstance(again, Transfer):
        assert type(again.value.kind) is Kind


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("2F0", Action(Op.F, 2, 0)),
        ("2F0@1#3", Action(Op.F, 2, 0, 1, 3)),
        ("2B0.1", Action(Op.B, 2, 0, part=1)),
        ("2U#3", Action(Op.U, 2, version=3)),
        ("2U", Action(Op.U, 2)),
        ("N#3", Action(Op.N, NONE, version=3)),
        ("N", Action(Op.N, NONE)),
        ("[2F0|5B1]", Cell(Action(Op.F, 2, 0), Action(Op.B, 5, 1))),
        ("2act0>3", Transfer(True, Value(Kind.ACT, 2, 0), 3)),
        ("2act0<2", Transfer(False, Value(Kind.ACT, 2, 0), 2)),
        ("12grad34@5.1~6<78", Transfer(False, Value(Kind.GRAD, 12, 34, 5, part=1, piece=6), 78)),
        ("1sum#3>0", Transfer(True, Value(Kind.SUM, 1, version=3), 0)),
    ],
)
def test_the_words_of_the_design(text: str, entry: Action | Cell | Transfer) -> None:
    assert parse(text) == entry
    assert str(entry) == text


BAD = [
    *["", " ", "F", "F0", "2", "2F", "2X0", "2f0", "2F0 ", " 2F0", "2 F0", "2F-1", "-2F0", "2F0@", "2F0#", "2F0.", "2F0@-1"],
    *["2F0#1@1", "2F0.1#1", "2F0@1@1", "2F0#1#1", "2F1.5.5", "2F0x1", "2F0\n", "2F0\x00", "2²F0", "2F0,2F1", "2F0~1", "2FF0"],
    *["2U3", "2N", "N0", "0N", "U#1", "S"],
    *["[]", "[|]", "[2F0]", "[2F0|]", "[|2F0]", "[2F0|5B1", "2F0|5B1]", "[2F0|5B1|1F1]", "[[2F0|5B1]|1F0]", "[2F0;5B1]"],
    *["[2act0>1|2F0]", "[2F0|5B1]#1", "2F0|5B1"],
    *["2act0>", "2act0<", ">3", "2act0>x", "2act0>-1", "2act0>1>2", "2act0><2", "act0>1", "2foo0>1", "2F0>1", "2ACT0>1"],
    *["2act0", "2act0=1", "2act0~>1", "2act0 >1"],
]


@pytest.mark.parametrize("text", BAD)
def test_a_bad_entry_is_refused_with_a_fix(text: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        parse(text)
    assert caught.value.fix, "says what to write instead"
    assert "not a" in caught.value.what or "needs a microbatch" in caught.value.what or "no microbatch" in caught.value.what


@pytest.mark.parametrize("text", ["", "act0", "2F0", "2act0>1", "2act0~", "2act-1", "2 act0", "2actt0", "2act0~1~2"])
def test_a_bad_value_is_refused_with_a_fix(text: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        parse_value(text)
    assert caught.value.fix
    assert repr(text)[1:-1] in caught.value.what


@pytest.mark.parametrize("text", [f"0F{LONG}", f"{LONG}F0", f"0F0@{LONG}", f"0U#{LONG}", f"[0F0|0B{LONG}]", f"0act0>{LONG}"])
def test_a_number_that_is_too_long_is_refused_too(text: str) -> None:
    with pytest.raises(MeshwrightError):
        parse(text)


def test_a_value_with_a_number_that_is_too_long_is_refused_too() -> None:
    with pytest.raises(MeshwrightError):
        parse_value(f"0act{LONG}")


@given(st.text(alphabet="0123456789FBIWRGSNU@#.[]|<>~actgrdsumn -", max_size=14))
def test_any_text_parses_to_itself_or_is_refused(text: str) -> None:
    _parses_or_is_refused(text)


@given(st.text(max_size=30))
def test_any_unicode_text_parses_or_is_refused(text: str) -> None:
    _parses_or_is_refused(text)


@given(any_entry, st.data())
def test_a_damaged_text_parses_to_something_else_or_is_refused(entry: Action | Cell | Transfer, data: st.DataObject) -> None:
    text = str(entry)
    at = data.draw(st.integers(0, len(text)))
    middle = data.draw(st.sampled_from(["", *"09F@#.|[]<>~a N"]))
    damaged = text[:at] + middle + text[at + data.draw(st.integers(0, 2)) :]
    _parses_or_is_refused(damaged)


def _parses_or_is_refused(text: str) -> None:
    try:
        entry = parse(text)
    except MeshwrightError as error:
        assert error.fix
        return
    assert parse(str(entry)) == entry


@given(moving, SHIFTS, SHIFTS, SHIFTS, SHIFTS)
def test_shifts_add_up(thing: Action | Cell | Value | Transfer, mb: int, version: int, more: int, later: int) -> None:
    assert thing.shifted(0, 0) == thing
    assert thing.shifted(mb, version).shifted(more, later) == thing.shifted(mb + more, version + later)
    assert thing.shifted(mb, version).shifted(more, later) == thing.shifted(more, later).shifted(mb, version)


@given(moving, SHIFTS, SHIFTS)
def test_a_shifted_thing_is_of_its_kind_and_has_a_text(thing: Action | Cell | Value | Transfer, mb: int, version: int) -> None:
    later = thing.shifted(mb, version)
    assert type(later) is type(thing)
    assert (parse_value(str(later)) if isinstance(later, Value) else parse(str(later))) == later


@given(compute, of_a_round, SHIFTS, SHIFTS)
def test_a_shift_moves_microbatch_and_version_and_nothing_else(first: Action, second: Action, mb: int, version: int) -> None:
    assert first.shifted(mb, version) == first._replace(mb=first.mb + mb, version=first.version + version)
    assert second.shifted(mb, version) == second._replace(version=second.version + version)
    assert Cell(first, second).shifted(mb, version) == Cell(first.shifted(mb, version), second.shifted(mb, version))


@given(numbered, SHIFTS, SHIFTS, COUNTS, st.booleans())
def test_a_value_moves_by_its_round_or_by_its_microbatch(value: Value, mb: int, version: int, peer: int, sends: bool) -> None:
    later = value.shifted(mb, version)
    if value.kind in BY_VERSION:
        moved = value.mb if value.mb == NONE else value.mb + mb  # single sums and gathers are counted like microbatches
        assert later == value._replace(mb=moved, version=value.version + version)
    else:
        assert later == value._replace(mb=value.mb + mb)
    assert Transfer(sends, value, peer).shifted(mb, version) == Transfer(sends, later, peer)


@given(st.lists(any_entry, max_size=8))
def test_walking_a_list_opens_cells_and_passes_transfers_over(entries: list[Action | Cell | Transfer]) -> None:
    text = " ".join(str(entry) for entry in entries if not isinstance(entry, Transfer))
    words = text.replace("[", "").replace("]", "").replace("|", " ").split()
    assert [str(action) for action in walk(tuple(entries))] == words
