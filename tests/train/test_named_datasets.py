"""`--dataset` takes a text file, JSONL, or a data set of Hugging Face; what cannot be read is said in one line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from meshwright import MeshwrightError
from meshwright.train.data.named_datasets import named
from tests.support.command import meshwright

TEXT = "".join(f"line {i} of a text\n" for i in range(40))


def lines(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_text_file_is_rows_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(TEXT)
    train, evaluation = (named(str(tmp_path / "notes.txt"), length=8, evaluation=which) for which in (False, True))
    assert bytes(train[0]["input_ids"].tolist()) == TEXT.encode()[:8] and len(train) == 9 * len(evaluation)
    assert bytes(evaluation[0]["labels"].tolist()) == TEXT.encode()[72:80]
    assert pickle.loads(pickle.dumps(train))[0]["input_ids"].tolist() == train[0]["input_ids"].tolist()


def test_lines_of_json_have_texts_or_tokens(tmp_path: Path) -> None:
    texts = named(lines(tmp_path / "texts.jsonl", [{"text": line} for line in TEXT.splitlines()]), length=8)
    assert bytes(texts[0]["input_ids"].tolist()) == TEXT.encode()[:8]
    assert pickle.loads(pickle.dumps(texts))[1]["input_ids"].tolist() == texts[1]["input_ids"].tolist()
    tokens = named(
        lines(tmp_path / "tokens.jsonl", [{"input_ids": [i, i + 1], "labels": [-100, i]} for i in range(20)]), length=8
    )
    assert len(tokens) == 18 and tokens[9]["input_ids"].tolist() == [10, 11] and tokens[9]["labels"].tolist() == [-100, 10]


def test_only_a_line_s_end_ends_a_line(tmp_path: Path) -> None:
    """JSON allows other separators of lines inside texts, and editors write marks of the byte order."""
    path, text = tmp_path / "texts.jsonl", "a\u2028b\x85c\x0cd" * 8
    path.write_text("\ufeff" + json.dumps({"text": text}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert bytes(named(str(path), length=4)[0]["input_ids"].tolist()) == text.encode()[:4]


def test_a_data_set_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder, which its loader takes as it takes a name."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "data"
    folder.mkdir()
    lines(folder / "train.jsonl", [{"text": line} for line in TEXT.splitlines()])
    assert bytes(named(str(folder), length=8)[0]["input_ids"].tolist()) == TEXT.encode()[:8]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("short.txt", "abc", "has 3 bytes, too few for ten rows of 8"),
        ("bad.jsonl", "{", "is not JSON"),
        ("bad.jsonl", '{"text": "a"}\n{', "line 2 of"),
        ("list.jsonl", "[1]", "is not an object"),
        ("odd.jsonl", '{"words": 1}', "has 'words'"),
        ("odd.jsonl", '{"input_ids": ["a"]}', "row 1 of"),
        ("large.jsonl", '{"input_ids": [1, %s]}' % ("9" * 25), "row 1 of"),
        ("empty.jsonl", "", "has no rows"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, content: str, what: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(MeshwrightError, match=what):
        named(str(tmp_path / name), length=8)
    with pytest.raises(MeshwrightError, match="there is no file"):
        named(str(tmp_path / "nowhere.txt"), length=8)


def test_train_takes_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(TEXT)
    flags = ("--max-steps", "1", "--save-strategy", "no", "--report-to", "none", "--length", "8")
    done = meshwright("train", "gpt-tiny", "--dataset", "notes.txt", *flags, cwd=tmp_path)
    assert done.returncode == 0 and "1 steps" in done.stdout, done.stderr


@pytest.mark.parametrize(("name", "meant"), [("stdlb", "stdlib"), ("Digit", "digits")])
def test_a_name_that_nearly_exists_is_guessed_without_the_network(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", asked)
    with pytest.raises(MeshwrightError, match=f"there is no data set '{name}' here; did you mean {meant}"):
        named(name, length=8)
