"""torch's CSV: what it can say reads back, what it cannot is refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import Action, MeshwrightError, Op, Recompute, check, from_csv, lower, schedules, to_csv
from tests.support.cases import Case, cases, tiny
from tests.support.file_forms import FUZZ, csv_reads, expressible, plain, refused_or_read, without_ends


@pytest.mark.parametrize("name", schedules.names())
def test_csv_reads_back_or_is_refused_with_a_reason(name: str) -> None:
    for case in cases(names=[name], every_option=False):
        for schedule in (case.build(), lower(case.build())):
            if not expressible(schedule):
                with pytest.raises(MeshwrightError, match=rf"cannot express .*{name}") as caught:
                    to_csv(schedule)
                assert caught.value.fix
                continue
            text = to_csv(schedule)
            again = from_csv(text, name)
            assert to_csv(again) == text
            assert without_ends(again) == without_ends(schedule), case
            assert (again.placement, again.microbatches) == (schedule.placement, schedule.microbatches)
            assert again.lowered == schedule.lowered or schedule.workers == 1
            assert check(again).ok, case
            if not schedule.lowered:
                assert again == replace(schedule, options=(), channels=(), recompute=None)


def test_csv_has_the_words_that_torch_has() -> None:
    assert to_csv(plain()) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    text = to_csv(lower(plain(microbatches=1)))
    assert text == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    cells = to_csv(plain("dualpipev", 2, 4))
    assert all(word in cells for word in (")OVERLAP_F_B", "I", "W", ";"))


def test_csv_leaves_the_order_of_channels_to_torch() -> None:
    """What a schedule says of its channels is not in the compute form; in the lowered form it is in the order of messages."""
    listed = plain("listed", 3, 4)
    assert listed.channels and not from_csv(to_csv(listed)).channels
    again = from_csv(to_csv(lower(listed)), "listed")
    assert without_ends(again) == without_ends(lower(listed)) != without_ends(lower(replace(listed, channels=())))


def test_csv_may_have_idle_cells_and_blank_lines() -> None:
    text = " 0F0 ,0F1,,,0B0,,0B1\n\n,1F0,1B0,1F1,1B1,,\n"
    assert from_csv(text) == replace(plain(), name="csv")


def test_csv_passes_over_what_torch_says_of_sharded_parameters() -> None:
    assert from_csv("0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD\n") == from_csv("0F0,0B0\n")


@pytest.mark.parametrize("case", tiny(), ids=str)
def test_torch_reads_every_cell(case: Case) -> None:
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    for schedule in (case.build(), lower(case.build())):
        if expressible(schedule):
            cells = [cell for line in to_csv(schedule).splitlines() for cell in line.split(",") if cell]
            assert [str(module._Action.from_str(cell)) for cell in cells] == cells


TWO = plain(workers=2, microbatches=2)
FORWARD, BACKWARD = Action(Op.F, 0, 1), Action(Op.B, 0, 0)
INEXPRESSIBLE = {
    "replicas": plain("gems"),
    "teams": plain("cyclic"),
    "half microbatches": replace(TWO, parts=2),
    "flush": plain("pipedream"),
    "steps": TWO.repeated(2),
    "recompute": replace(TWO, recompute=(Recompute(), Recompute())),
    "ties": replace(TWO, ties=((0, 1),)),
    "ties in a ring": lower(replace(plain(workers=3), ties=((0, 2),)), sync="ring"),
    "turns": replace(TWO, turns=((FORWARD, BACKWARD),)),
}


@pytest.mark.parametrize("what", INEXPRESSIBLE)
def test_csv_refuses_what_it_cannot_say(what: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        to_csv(INEXPRESSIBLE[what])
    assert what.split()[0].rstrip("s") in str(caught.value)
    assert INEXPRESSIBLE[what].name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no action"),
        ("\n\n", "no action"),
        (",,,", "no action"),
        ("0F0,zz", "zz"),
        ("0F0,0X1", "0X1"),
        ("0F0;0B0", "0F0;0B0"),
        ("0F", "0F"),
        ("F0", "F0"),
        ("0F-1", "0F-1"),
        ("0F0,0B0\n0F1,0B1", "stage 0"),
        ("0F0,0B0\n2F0,2B0", "[0, 2]"),
        ("1F0,1B0", "[1]"),
        ("0SEND_F0\n0RECV_F0", "no action"),
        ("0F0,0SEND_F0,0B0", "boundary"),
        ("0F0,0RECV_F0,0B0", "boundary"),
        ("(0F1;0F2)OVERLAP_F_B", "OVERLAP"),
        ("(0F1;0B0)", "(0F1;0B0)"),
        ("0UNSHARD", "no action"),
        ("0F0,0SHARD", "0SHARD"),
        ("0F" + "9" * 5000, "9999"),
        ("9" * 5000 + "F0", "9999"),
        ("0F0,0SEND_F" + "9" * 5000, "9999"),
    ],
)
def test_a_bad_csv_is_refused_with_the_cell(text: str, said: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        from_csv(text)
    assert said in str(caught.value)


@FUZZ
@given(
    st.lists(
        st.lists(
            st.one_of(
                st.builds("{}{}{}".format, st.integers(0, 2), st.sampled_from("FBIW"), st.integers(0, 2)),
                st.builds(
                    "{}{}_{}{}".format,
                    st.integers(0, 2),
                    st.sampled_from(["SEND", "RECV"]),
                    st.sampled_from("FB"),
                    st.integers(0, 2),
                ),
                st.builds(
                    "({}F{};{}B{})OVERLAP_F_B".format, st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)
                ),
                st.sampled_from(["", "0F0 ", "x"]),
            ),
            max_size=6,
        ).map(",".join),
        max_size=3,
    ).map("\n".join)
)
def test_any_cells_of_csv_are_refused_or_read(text: str) -> None:
    refused_or_read(csv_reads, text)
