"""The command line as users type it: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright import Cluster, Link, MeshwrightError, StageCost, Timeline, cluster_to_json, costs_to_json, schedules
from meshwright.cli._parts import outputs
from tests.support.command import app, meshwright


def simulated(*arguments: str) -> dict[str, object]:
    done = meshwright("simulate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_show_draws_the_grid_of_chimera() -> None:
    done = meshwright("show", "chimera", "--workers", "4", "--microbatches", "4")
    assert done.returncode == 0
    assert "F0d F1d .   F2u B2u =   F3u B3u =   .   B0d =   .   .   B1d =" in done.stdout
    assert "makespan 16   bubble 25.00%" in done.stdout


def test_show_writes_files_that_check_and_simulate_read(tmp_path: Path) -> None:
    for name in ("onef1b", "chimera", "cyclic", "pipedream", "shifted"):
        for flags in ((), ("--lowered",)):
            file = tmp_path / f"{name}{len(flags)}.json"
            assert meshwright("show", name, "--format", "json", "-o", str(file), *flags).returncode == 0
            assert meshwright("check", str(file)).returncode == 0
            assert simulated(str(file))["makespan_s"] == simulated(name)["makespan_s"]


def test_show_writes_torch_csv_and_perfetto(tmp_path: Path) -> None:
    done = meshwright("show", "onef1b", "--workers", "2", "--microbatches", "2", "--format", "csv")
    assert done.stdout == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    trace = tmp_path / "trace.json"
    assert meshwright("show", "chimera", "--format", "perfetto", "-o", str(trace)).returncode == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["ph"] for e in events} >= {"M", "X", "C", "s", "f"}
    refused = meshwright("show", "chimera", "--format", "csv")
    assert refused.returncode == 2 and "several replicas" in refused.stderr and "try:" in refused.stderr


def test_check_says_what_is_wrong_where_and_why(tmp_path: Path) -> None:
    data = json.loads(meshwright("show", "onef1b", "--format", "json").stdout)
    data["period"][2] = data["period"][2].replace("2F1 ", "", 1)
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(data))
    done = meshwright("check", str(file), "--json")
    assert done.returncode == 3
    verdict = json.loads(done.stdout)
    assert verdict["ok"] is False and verdict["worker"] == 2 and verdict["law"] and "1" in verdict["action"] and verdict["reason"]
    shown = meshwright("check", str(file))
    assert shown.returncode == 3 and "^" in shown.stdout


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "schedule"}', '{"schema": 99, "kind": "schedule"}', "\0\0"])
def test_unreadable_files_exit_with_two_and_no_traceback(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    done = meshwright("check", str(file))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_missing_file_unknown_name_and_bad_flags_exit_with_two() -> None:
    for arguments in (
        ("check", "nowhere.json"),
        ("simulate", "nothing"),
        ("simulate", "chimera", "--workers", "3"),
        ("simulate", "onef1b", "--option", "warmup"),
        ("simulate", "onef1b", "--option", "warmup=3"),
        ("simulate", "onef1b", "--option", "colour=red"),
        ("simulate", "onef1b", "--split", "x"),
        ("simulate", "onef1b", "--forward", "-1"),
        ("simulate", "onef1b", "--workers", "0"),
    ):
        done = meshwright(*arguments)
        assert done.returncode == 2 and "error" in done.stderr.lower() and "Traceback" not in done.stderr, arguments


def test_simulate_prints_the_promised_object() -> None:
    found = simulated(
        "onef1b", "--workers", "4", "--microbatches", "8", "--forward", "1", "--backward", "2", "--recompute-cost", "1"
    )
    assert found["schedule"] == "onef1b" and found["makespan_s"] == 44
    assert set(found) >= {"schedule", "makespan_s", "bubble_ratio", "span_bubble_ratio", "lower_bound_s", "workers"}
    assert set(found["workers"][0]) >= {"worker", "busy_s", "idle_s", "peak_activations", "parameter_copies"}
    assert [w["peak_activations"] for w in found["workers"]] == [4, 3, 2, 1]
    full = simulated("shifted", "--workers", "4", "--microbatches", "8", "--recompute-cost", "1", "--option", "level=full")
    assert full["makespan_s"] == 38


def test_simulate_with_sends_and_syncs() -> None:
    assert simulated("gpipe", "--send", "0.1")["makespan_s"] == pytest.approx(21 + 6 * 0.1)
    lazy, opt = (
        simulated("chimera", "--workers", "8", "--microbatches", "8", "--sync-cost", "3", "--sync", s)
        for s in ("lazy", "eager-opt")
    )
    assert opt["makespan_s"] < lazy["makespan_s"] == 42


def test_simulate_with_a_cost_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(
        costs_to_json([StageCost(1.0, 1.0, 1.0, activation_bytes=10.0), StageCost(2.0, 2.0, 2.0, activation_bytes=20.0)])
    )
    found = simulated("gpipe", "--workers", "2", "--microbatches", "3", "--costs", str(file))
    assert found["makespan_s"] == pytest.approx(1 + 3 * 6 + 2)
    assert [w["peak_bytes"] for w in found["workers"]] == [30, 60]
    wrong = meshwright("simulate", "gpipe", "--workers", "3", "--costs", str(file))
    assert wrong.returncode == 2 and "3 stages" in wrong.stderr


def test_steps_without_a_flush_default_to_four() -> None:
    assert simulated("pipedream_2bw", "--workers", "4", "--microbatches", "4")["steps"] == 4
    assert simulated("pipedream_2bw", "--workers", "4", "--microbatches", "4", "--steps", "7")["steps"] == 7
    assert simulated("onef1b", "--steps", "3")["makespan_s"] == 3 * simulated("onef1b")["makespan_s"]


def test_python_builds_one_step_unless_asked() -> None:
    for name in schedules.names():
        one = schedules.build(name, workers=4, microbatches=4)
        assert one == schedules.build(name, workers=4, microbatches=4, steps=1)
        assert one.steps * one.microbatches == 4, name


def test_a_sync_cost_is_refused_for_a_ring() -> None:
    for arguments in (("onef1b", "--sync", "ring"), ("cyclic",)):
        done = meshwright("simulate", *arguments, "--sync-cost", "2")
        assert done.returncode == 2 and "--sync-cost 2" in done.stderr and "ring" in done.stderr and "try:" in done.stderr
    rows = json.loads(meshwright("compare", "--microbatches", "4", "--sync-cost", "2", "--json").stdout)["rows"]
    assert [row["schedule"] for row in rows if row["refused"] and "--sync-cost" in row["refused"]] == ["cyclic"]


def test_compare_passes_the_cap_on_to_those_that_keep_to_one() -> None:
    def rows() -> dict[str, dict[str, object]]:
        done = meshwright("compare", "--microbatches", "8", "--memory", "2.5", "--json")
        return {row["schedule"]: row for row in json.loads(done.stdout)["rows"]}

    found = rows()
    for name in ("onef1b memory=2", "listed memory=2", "zero_bubble variant=auto memory=2"):
        assert found[name]["feasible"] and found[name]["peak_activations"] <= 2, name
    assert not found["onef1b"]["feasible"] and not found["zero_bubble variant=auto"]["feasible"]
    below = json.loads(meshwright("compare", "--memory", "0.5", "--json").stdout)["rows"]
    assert not any("memory" in row["schedule"] for row in below), "no schedule runs with less than one activation"


def compared(*arguments: str) -> dict[str, dict[str, object]]:
    done = meshwright("compare", *arguments, "--json")
    assert done.returncode in (0, 3), done.stderr
    return {row["schedule"]: row for row in json.loads(done.stdout)["rows"]}


def test_compare_never_takes_a_recompute_for_free(tmp_path: Path) -> None:
    assert compared()["shifted"]["step_s"] == compared("--recompute-cost", "1")["shifted"]["step_s"] == 38
    assert compared()["shifted"]["recompute_priced_as_forward"] and not compared()["onef1b"]["recompute_priced_as_forward"]
    assert not compared("--recompute-cost", "0.5")["shifted"]["recompute_priced_as_forward"]
    file = tmp_path / "costs.json"
    file.write_text(costs_to_json([StageCost(1.0, 1.0, 1.0, activation_bytes=10.0)] * 4))
    found = compared("--costs", str(file), "--memory", "20")
    assert found["shifted"]["step_s"] == 38 and found["onef1b"]["step_s"] == 33
    assert " r " in meshwright("compare").stdout and "no cost is given" in meshwright("compare").stdout


def test_compare_shows_bytes_units_stale_weights_and_what_they_mean(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    row = StageCost(1.0, 1.0, 1.0, activation_bytes=10e9, parameter_bytes=1e9)
    file.write_text(costs_to_json([row] * 4))
    done = meshwright("compare", "--costs", str(file), "--memory", "45GB")
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["schedule", "step", "s", "bubble", "parameters", "activations", "GB", "fits"]
    shown = {line.split()[0]: line.split() for line in lines if line}
    assert shown["onef1b"] == ["onef1b", "33", "27.27%", "1", "4", "42", "yes"]
    assert shown["gpipe"][-2:] == ["82", "no"] and shown["pipedream"][:2] == ["pipedream", "*"]
    assert "in seconds" in done.stdout and "1e9 bytes" in done.stdout and "stale weights" in done.stdout
    stale = {name.split()[0] for name, r in compared("-n", "4").items() if r["stale"]}
    assert stale == {"pipedream", "pipedream_2bw", "cyclic"}
    plain = meshwright("compare")
    assert "GB" not in plain.stdout.splitlines()[0] and "in the unit of --forward" in plain.stdout
    refused = meshwright("compare", "--memory", "80GB")
    assert refused.returncode == 2 and "--costs" in refused.stderr


def test_compare_takes_schedule_files(tmp_path: Path) -> None:
    names = ("onef1b", "pipedream", "pipedream_2bw")
    for name in names:
        assert meshwright("show", name, "-n", "8", "--format", "json", "-o", str(tmp_path / f"{name}.json")).returncode == 0
    found = compared(*(str(tmp_path / f"{name}.json") for name in names))
    for name in names:
        own, known = found[str(tmp_path / f"{name}.json")], found[name]
        assert {**own, "schedule": name} == known, name
    done = meshwright("compare", str(tmp_path / "onef1b.json"), "-w", "2")
    assert done.returncode == 2 and "try: -w 4 -n 8" in done.stderr
    assert meshwright("compare", "nowhere.json").returncode == 2


def test_show_simulate_and_compare_take_the_same_costs_clusters_and_forms(tmp_path: Path) -> None:
    costs, cluster = tmp_path / "costs.json", tmp_path / "cluster.json"
    costs.write_text(costs_to_json([StageCost(1.0, 1.0, 1.0, output_bytes=10.0)] * 4))
    cluster.write_text(cluster_to_json(Cluster(Link(0.25, 100.0))))
    for flags in (
        ("--forward", "2", "--backward", "3", "--split", "2:1", "--recompute-cost", "1", "--send", "0.5", "--sync-cost", "2"),
        ("--costs", str(costs), "--bandwidth", "100", "--duplex", "half"),
        ("--costs", str(costs), "--cluster", str(cluster), "--overlap", "0.5"),
    ):
        shown, predicted = (
            json.loads(meshwright(verb, "dualpipe", "-n", "8", *flags, "--json").stdout) for verb in ("show", "simulate")
        )
        assert shown == predicted
        assert compared("-n", "8", *flags)["dualpipe"]["step_s"] == predicted["makespan_s"]
    for form in ("text", "json", "csv", "perfetto"):
        for verb in ("show", "simulate", "compare"):
            file = tmp_path / f"{verb}.{form}"
            names = () if verb == "compare" else ("onef1b",)
            done = meshwright(verb, *names, "--format", form, "-o", str(file))
            assert done.stdout == "" and (done.returncode == 0 or (verb, form) == ("compare", "perfetto")), done.stderr
            if form in ("json", "perfetto") and done.returncode == 0:
                json.loads(file.read_text())
    assert Timeline.from_json((tmp_path / "simulate.json").read_text()).makespan_s == 21
    assert (tmp_path / "compare.csv").read_text().startswith("schedule,step_s,") and "fits" not in (
        tmp_path / "compare.text"
    ).read_text()


def test_compare_shows_every_schedule_sorted() -> None:
    done = meshwright("compare", "--workers", "4", "--microbatches", "4", "--memory", "4", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert {row["schedule"].split()[0] for row in rows} == set(schedules.names())
    feasible = [row["step_s"] for row in rows if row["feasible"]]
    assert feasible == sorted(feasible)
    assert all(row["peak_activations"] > 4 for row in rows if not row["feasible"] and not row["refused"])
    assert "chimera" in meshwright("compare").stdout


def test_help_names_every_verb_and_option() -> None:
    assert all(verb in meshwright("--help").stdout for verb in ("show", "check", "simulate", "compare"))
    assert "--option" in meshwright("simulate", "--help").stdout


def cpu_s(*arguments: str) -> float:
    """CPU time of one cold call, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = meshwright(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def asked() -> list[str]:
    """Every schedule with every set of options worth comparing, and the largest lists that users ask for."""
    compared = [
        " ".join([name, *(f"--option {key}={value}" for key, value in options.items())])
        for name in schedules.names()
        for options in schedules.compared(name)
    ]
    largest = [
        "hanayo --option waves=4",
        "interleaved --option chunks=4",
        "onef1b --steps 4",
        "onef1b --send 0.25 --recompute-cost 1",
    ]
    return compared + largest


@pytest.mark.bench
@pytest.mark.parametrize("words", asked())
@pytest.mark.parametrize("verb", ["show", "simulate"])
def test_an_answer_takes_under_four_tenths_of_a_second_of_cpu(verb: str, words: str) -> None:
    """The best of three calls: what else the machine does only adds. Cyclic runs one microbatch per worker."""
    size = ("--workers", "8", "--microbatches", "8" if words.startswith("cyclic") else "32")
    times: list[float] = []
    while len(times) < 3 and not (times and min(times) < 0.4):
        times.append(cpu_s(verb, *words.split(), *size))
    assert min(times) < 0.4, times


def test_colours_are_for_terminals_and_whoever_asks() -> None:
    command = [sys.executable, "-m", "meshwright.cli.main", "show", "chimera"]
    bare = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    plain, forced, never = (
        subprocess.run(command, capture_output=True, text=True, check=True, env={**bare, **more}).stdout
        for more in ({}, {"FORCE_COLOR": "1"}, {"FORCE_COLOR": "1", "NO_COLOR": "1"})
    )
    assert "\x1b" not in plain and plain == never
    assert "\x1b[1;34mF2u\x1b[0m \x1b[1;32mB2u =  \x1b[0m" in forced, "one code per action, bold in the other direction"
    bare_lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", forced).splitlines()]
    assert bare_lines == plain.splitlines()


def test_simulate_with_a_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(cluster_to_json(Cluster(Link(0.1), {(0, 1): Link(0.5)})))
    assert simulated("gpipe", "--workers", "3", "--cluster", str(file))["makespan_s"] == pytest.approx(18 + 2 * (0.5 + 0.1))
    file.write_text("{}")
    done = meshwright("simulate", "gpipe", "--cluster", str(file))
    assert done.returncode == 2 and "not a cluster file" in done.stderr


def test_compare_spreads_a_cost_file_over_finer_stages(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(costs_to_json([StageCost(1.0, 1.0, 1.0, activation_bytes=10.0)] * 4))
    done = meshwright("compare", "--costs", str(file), "--memory", "40", "--json")
    rows = {row["schedule"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["zbv"]["step_s"] == pytest.approx(25.5) and rows["onef1b"]["feasible"] and not rows["gpipe"]["feasible"]


def test_show_draws_into_a_file(tmp_path: Path) -> None:
    file = tmp_path / "grid.txt"
    assert meshwright("show", "onef1b", "-o", str(file)).returncode == 0
    assert "F0 F1 F2 F3" in file.read_text() and "makespan 21" in file.read_text()


def test_compare_exits_with_three_when_nothing_fits_and_two_on_bad_input(tmp_path: Path) -> None:
    assert meshwright("compare", "--memory", "0.5").returncode == 3
    file = tmp_path / "costs.json"
    file.write_text('[{"forward_s": "a"}]')
    for arguments in (
        ("--costs", str(file)),
        ("--costs", "nowhere"),
        ("--workers", "0"),
        ("--memory", "-1"),
        ("--memory", "nan"),
    ):
        assert meshwright("compare", *arguments).returncode == 2, arguments


def test_a_schedule_file_takes_no_options(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert meshwright("show", "onef1b", "--format", "json", "-o", str(file)).returncode == 0
    for arguments in (("--steps", "3"), ("--option", "warmup=2")):
        done = meshwright("simulate", str(file), *arguments)
        assert done.returncode == 2 and "schedule file" in done.stderr


def test_training_that_ends_in_no_number_says_so(tmp_path: Path) -> None:
    job = {"model": "tests.support.trainers:Plain", "dataset": "tests.support.trainers:no_numbers"}
    chosen = {"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "train_sampling_strategy": "sequential"}
    chosen |= {"report_to": "none", "output_dir": str(tmp_path)}
    head = ["schema = 1", *(f"{name} = {json.dumps(value)}" for name, value in job.items()), "[arguments]"]
    path = tmp_path / "job.toml"
    path.write_text("\n".join([*head, *(f"{name} = {json.dumps(value)}" for name, value in chosen.items())]))
    done = meshwright("train", str(path))
    assert done.returncode == 3, done.stderr
    assert re.search(r"loss \d\.\d+ -> nan", done.stdout)
    losses = [json.loads(line).get("loss") for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert losses[0] > 0 and losses[1:3] == ["nan", "nan"]


NOWHERE = "/nonexistent/x.json"


@pytest.mark.parametrize(
    ("words", "work"),
    [
        (["verify", "mlp", "-o", NOWHERE], "meshwright.train.verify.verify.verify"),
        (["inspect", "gpt-tiny", "-o", NOWHERE], "meshwright.cli.inspect._graph"),
        (["show", "onef1b", "-o", NOWHERE], "meshwright.cli._parts.inputs.load"),
        (["simulate", "onef1b", "--emulate", "wall", "--trace", NOWHERE], "meshwright.cli._parts.emulation.Emulation.run"),
    ],
    ids=lambda found: found[0] if isinstance(found, list) else "",
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    words: list[str], work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the work comes after")

    monkeypatch.setattr(work, never)
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, MeshwrightError) and f"cannot write {NOWHERE}" in str(found.exception)


def test_the_look_at_an_output_leaves_it_as_it_is(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("before")
    outputs.refuse_output(kept)
    outputs.refuse_output(new)
    assert kept.read_text() == "before" and not new.exists()
    with pytest.raises(MeshwrightError, match="cannot write"):
        outputs.refuse_output(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    outputs.refuse_output(tmp_path / "pipe")  # and does not wait for its reader
