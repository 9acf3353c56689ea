from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from layertap import InvalidInputError
from layertap.corpus.names import RecordNames
from layertap.corpus.prompts import PromptLine, check_source, count_lines, lines_of, read_prompts


def written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_text_gives_a_prompt_for_each_line_that_is_not_blank(tmp_path: Path) -> None:
    path = written(tmp_path, "p.txt", "\ufeffone\r\n\n  two words \n{not json\n".encode())
    lines = list(read_prompts(path))
    assert [(line.index, line.where, line.prompt) for line in lines] == [
        (0, "p.txt:1", "one"),
        (1, "p.txt:3", "  two words "),
        (2, "p.txt:4", "{not json"),
    ]
    assert count_lines(path) == 3


def test_jsonl_takes_text_token_ids_messages_and_an_id(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "p.jsonl",
        b'{"prompt": "a", "id": 7, "source": "web"}\n'
        b'{"prompt_token_ids": [1, 2], "id": "x"}\n'
        b'{"messages": [{"role": "user", "content": "hi"}], "prompt": null}\n'
        b'"bare"\n[3, 4]\n',
    )
    lines = list(read_prompts(path))
    assert [line.prompt for line in lines] == [
        {"prompt": "a"},
        {"prompt_token_ids": [1, 2]},
        {"messages": [{"role": "user", "content": "hi"}]},
        "bare",
        [3, 4],
    ]
    assert [line.id for line in lines] == ["7", "x", None, None, None]


def test_a_bad_line_says_what_is_wrong_and_the_next_one_is_read(tmp_path: Path) -> None:
    nested = b"[" * 100_000
    path = written(
        tmp_path,
        "p.jsonl",
        b'{"prompt": \n\xff\n{"text": "a"}\n17\nnull\n' + nested + b'\n{"prompt": "ok"}\n',
    )
    *bad, good = read_prompts(path)
    assert [line.where for line in bad] == [f"p.jsonl:{n}" for n in range(1, 7)]
    for line, part in zip(bad, ("not JSON", "UTF-8", "text", "17", "null", "nested"), strict=True):
        assert line.problem is not None
        assert part in line.problem
    assert good.prompt == {"prompt": "ok"}


@pytest.mark.parametrize(("data", "prompt"), [(b'{"prompt": "a"}\n', {"prompt": "a"}), (b"a\n", "a")])
def test_standard_input_is_recognised_by_its_first_character(
    monkeypatch: pytest.MonkeyPatch, data: bytes, prompt: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert list(read_prompts("-")) == [PromptLine(0, "stdin:1", prompt)]
    assert count_lines("-") is None


def test_a_named_pipe_is_opened_once_and_recognised_by_its_first_character(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lines = '{"prompt": "a"}\n{"prompt": "b"}\n'
    writer = threading.Thread(target=pipe.write_text, args=(lines,), daemon=True)
    writer.start()
    check_source(pipe)
    assert [p.prompt for p in read_prompts(pipe)] == [{"prompt": "a"}, {"prompt": "b"}]
    writer.join(5)
    assert not writer.is_alive()


def test_the_format_can_be_given(tmp_path: Path) -> None:
    path = written(tmp_path, "p.txt", b'{"prompt": "a"}\n')
    assert next(read_prompts(path, "jsonl")).prompt == {"prompt": "a"}
    assert next(read_prompts(path, "text")).prompt == '{"prompt": "a"}'
    with pytest.raises(InvalidInputError, match="prompts_format"):
        read_prompts(path, "csv")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (b'{"prompt": "a"}\n', "prompt"),
        (b'\xef\xbb\xbf\n\n  {"id": 1, "prompt_token_ids": [1]}\r\n', "prompt_token_ids"),
        (b'{"messages": []}\n{"prompt": "a"}\n{"prompt": "b"}\nno JSON\n', "messages"),
    ],
)
@pytest.mark.parametrize("name", ["p.txt", "prompts"])
def test_jsonl_in_a_text_file_is_refused_before_it_is_run_as_text(
    tmp_path: Path, name: str, data: bytes, key: str
) -> None:
    path = written(tmp_path, name, data)
    for refuse in (check_source, read_prompts):
        with pytest.raises(InvalidInputError, match=rf"^prompts: got .*{name}.*'{key}'.* jsonl .* text "):
            refuse(path)
    assert next(read_prompts(path, "jsonl")).prompt is not None
    assert isinstance(next(read_prompts(path, "text")).prompt, str)
    named = written(tmp_path, "p.JSONL", data)
    assert isinstance(next(read_prompts(named)).prompt, dict)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"prompt": "an example of JSONL"}\nis what a line looks like\n',
        b'a text\n{"prompt": "a"}\n{"prompt": "b"}\n',
        b'{"prompt": "a"}\n{"prompt": "b"}\n{"text": "c"}\n',
        b'{"prompt": null}\n',
        b'{"text": "of another kind"}\n',
        b'["prompt"]\n',
        b'"prompt"\n',
        b'{"prompt": "\xff"}\n',
        b"[" * 100_000,
    ],
)
def test_text_about_json_is_text(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, "p.txt", data)
    check_source(path)
    assert len(list(read_prompts(path))) == count_lines(path)


def test_a_missing_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"prompts: .*No such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InvalidInputError, match=r"prompts: .*directory"):
        read_prompts(tmp_path)


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    with open(path, "w") as file:
        for i in range(200_000):
            file.write(f"prompt {i}\n")
    lines = read_prompts(path)
    assert next(lines).prompt == "prompt 0"
    assert next(lines).index == 1


def test_names_depend_on_index_prompt_and_run_and_nothing_else() -> None:
    line = PromptLine(3, "p:4", {"prompt": "a"})
    name = RecordNames({"layers": "1"})(line)
    assert name.startswith("00000003-")
    assert RecordNames({"layers": "1"})(PromptLine(3, "q:9", {"prompt": "a"})) == name
    others = {
        RecordNames({"layers": "2"})(line),
        RecordNames({"layers": "1"})(PromptLine(4, "p:5", {"prompt": "a"})),
        RecordNames({"layers": "1"})(PromptLine(3, "p:4", {"prompt": "b"})),
    }
    assert len({name, *others}) == 4


def test_an_id_names_the_record_if_it_is_safe_and_unique() -> None:
    names = RecordNames("run")
    ids = ["good-1", "good-1", "../etc/passwd", "", "a b", "00000000-0123456789abcdef", ".hidden", "x" * 300]
    given = [names(PromptLine(i, "p", f"{i}", own)) for i, own in enumerate(ids)]
    assert given[0] == "good-1"
    for i, name in enumerate(given[1:], 1):
        assert name.startswith(f"{i:08d}-")
    assert len(set(given)) == len(ids)


def test_prompts_of_a_program_may_bring_ids() -> None:
    lines = list(lines_of(["a", [1, 2], {"prompt": "b", "id": "z"}, 1.5]))
    assert [line.id for line in lines] == [None, None, "z", None]
    assert lines[3].problem is not None
