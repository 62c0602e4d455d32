"""`compare --profile`: stages of every schedule come from one profile, cut evenly by time, on the links of a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshwright import LayerCost, MeshwrightError, Profile, profile_to_json
from tests.support.command import app

LAYER = LayerCost("h.0", (1.0, 2.0), (1.0, 2.0), (1.0, 2.0), output_bytes=1e6, saved_bytes=1e9, parameter_bytes=1e9)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(profile_to_json(Profile((LAYER,) * 8, rows=(1, 2))))
    Path("other.json").write_text(profile_to_json(Profile((LAYER,) * 8, rows=(1, 2), device="GTX 1080")))
    Path("flat.json").write_text(json.dumps({"bytes_per_s": [[0 if a == b else 1e9 for b in range(4)] for a in range(4)]}))


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["compare", *words])


def rows(*words: str) -> dict[str, dict[str, float]]:
    found = run("--profile", "profile.json", *words, "--json")
    assert found.exit_code == 0, found.exception
    return {row["schedule"]: row for row in json.loads(found.stdout)["rows"]}


def test_steps_are_those_of_even_stages() -> None:
    """Two layers a stage: F 2, B 4 for one row, so GPipe and 1F1B need (N + D - 1)(F + B); a gigabyte is sent in a second."""
    free = rows("--rows", "1")
    for name in ("gpipe", "onef1b"):
        assert free[name]["step_s"] == pytest.approx((8 + 3) * 6.0)
    held = 8 * 2e9 + 4 * 2e9  # activations of all microbatches; parameters, gradients and two states of Adam
    assert free["gpipe"]["peak_bytes"] == pytest.approx(held, rel=1e-3)
    assert rows("--rows", "2")["onef1b"]["step_s"] == pytest.approx(2 * 66.0), "times of two rows are twice those of one"
    linked = rows("--rows", "1", "--cluster", "flat.json")
    assert linked["gpipe"]["step_s"] == pytest.approx(66.0 + 6 * 1e-3, rel=1e-4)


def test_schedules_with_several_holders_add_up_gradients() -> None:
    """Chimera has every stage on two workers: 2 x 1/2 x 2 GB over 1 GB/s."""
    free, linked = rows("--rows", "1"), rows("--rows", "1", "--cluster", "flat.json")
    assert linked["chimera"]["step_s"] > free["chimera"]["step_s"] + 1.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--profile", "profile.json"), "needs the rows of a microbatch"),
        (("--profile", "profile.json", "--rows", "0"), "needs the rows of a microbatch, got 0"),
        (("--rows", "2"), "--rows is the size of a microbatch of a profile"),
        (("--profile", "profile.json", "--rows", "1", "--costs", "x.json"), "both give costs"),
        (("--profile", "profile.json", "--rows", "1", "--forward", "2"), "replaces --forward"),
        (("--profile", "profile.json", "--rows", "1", "--cluster", "flat.json", "-w", "8"), "need 8 devices, the cluster has 4"),
        (("--profile", "other.json", "--rows", "1", "--cluster", "dgx-a100"), "the profile has the times of GTX 1080"),
        (("--profile", "missing.json", "--rows", "1"), "cannot read the profile"),
        (("--tensor", "--profile", "profile.json"), "--tensor compares tensor modes"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], said: str) -> None:
    found = run(*words)
    assert isinstance(found.exception, MeshwrightError) and said in str(found.exception)


def test_a_schedule_with_more_stages_than_layers_is_refused_alone() -> None:
    found = rows("--rows", "1", "-w", "8")
    assert found["onef1b"]["step_s"] == pytest.approx((8 + 7) * 3.0)
    assert "8 layers of the profile cannot be cut into 16 stages" in str(found["zbv"]["refused"])


def test_the_slowest_holder_of_a_stage_decides() -> None:
    """Device b is half as fast. Under Chimera each worker computes 8 x 4 layers of 3 s, so b needs 8 x 4 x 3 s x 2."""
    Path("unequal.toml").write_text(
        "schema = 1\n[device.a]\nfp32 = 2e12\n[device.b]\nfp32 = 1e12\n"
        + "".join(f'[[nodes]]\nper_node = 1\ndevice = "{kind}"\ncard = {{bytes_per_s = 1e15}}\n' for kind in "ab")
    )
    found = rows("--rows", "1", "-w", "2", "--cluster", "unequal.toml")
    assert found["chimera"]["step_s"] >= 8 * 4 * 3 * 2
    assert found["onef1b"]["step_s"] == pytest.approx((8 + 1) * 4 * 3 * 2 - 4 * 3, rel=1e-6), "the last stage is on b"


def test_tied_parameters_of_two_stages_are_added_up() -> None:
    ties = [LayerCost(f"h.{n}", (1.0,), (1.0,), (1.0,), output_bytes=0.0, parameter_bytes=1e9) for n in range(4)]
    plain = Profile(tuple(ties), rows=(1,))
    tied = Profile(tuple(replace(layer, ties=("table",) if n in (0, 3) else ()) for n, layer in enumerate(ties)), rows=(1,))
    for name, profile in (("plain", plain), ("tied", tied)):
        Path(f"{name}.json").write_text(profile_to_json(profile))
    steps = []
    for name in ("plain", "tied"):
        found = run("--profile", f"{name}.json", "--rows", "1", "-w", "2", "-n", "4", "--cluster", "flat.json", "--json")
        steps.append({row["schedule"]: row["step_s"] for row in json.loads(found.stdout)["rows"]}["gpipe"])
    assert steps[1] - steps[0] == pytest.approx(2 * 0.5 * 1.0), "two workers add up a gigabyte over 1 GB/s"


def test_messages_divide_a_network_card() -> None:
    """Two hosts of two devices: interleaved sends two boundaries through each card in each direction."""
    steps = []
    for shared in (False, True):
        card = "{bytes_per_s = 1e6, per_node = 1}" if shared else "{bytes_per_s = 1e6}"
        Path("cards.toml").write_text(
            "schema = 1\n[device.a]\nfp32 = 1e12\n[[nodes]]\ncount = 2\nper_node = 2\n"
            f'device = "a"\ninside = {{bytes_per_s = 1e12}}\ncard = {card}\n'
        )
        steps.append({name: row["step_s"] for name, row in rows("--rows", "1", "--cluster", "cards.toml").items()})
    alone, together = steps
    assert together["onef1b"] == alone["onef1b"], "one boundary between the hosts: the card is not shared"
    assert together["interleaved"] > alone["interleaved"] * 1.05


def test_a_narrow_terminal_leaves_out_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("--profile", "profile.json", "--rows", "1", "--cluster", "laptop").stdout.splitlines()
    assert lines[0].split() == ["schedule", "step", "s", "bubble", "parameters", "activations", "GB", "fits"]
    assert [line.split()[-1] for line in lines if line.startswith("onef1b")] == ["no"]


def test_the_memory_of_the_cluster_decides_what_fits() -> None:
    def asked(memory: float, *words: str) -> Result:
        rates = [[0 if a == b else 1e9 for b in range(4)] for a in range(4)]
        Path("small.json").write_text(json.dumps({"bytes_per_s": rates, "memory_bytes": [memory] * 4}))
        return run("--profile", "profile.json", "--rows", "1", "--cluster", "small.json", *words)

    gpipe = rows("--rows", "1", "--cluster", "flat.json")["gpipe"]["peak_bytes"]
    found = {row["schedule"]: row for row in json.loads(asked(0.99 * gpipe / 0.97, "--json").stdout)["rows"]}
    assert not found["gpipe"]["feasible"] and found["onef1b"]["feasible"]
    assert asked(1e6).exit_code == 3
    assert asked(1e6, "--memory", "1TB").exit_code == 0, "the flag replaces the memory of the cluster"
