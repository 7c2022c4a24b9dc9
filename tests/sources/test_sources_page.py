"""The Python of docs/sources.md runs; that of its section on streams is in tests/test_docs.py."""

from test_docs import run


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("docs/sources.md", until="\n## Streams\n")
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "(20, 8, 8, 3) int32",
        "<ArraySource: rows 100, image uint8[8, 8], label int64[], from digits.npz>",
        "9",
        "10",
        "['cat', 'dog'] {'file': b'a picture of a dog', 'label': 1}",
        "3 animals/cat/1.txt",
        "<Ragged: rows 120, tokens uint8[32], tokens_length int32[], pad_to 8, 16, 32>",
        "[(2, 8), (2, 16), (2, 32)]",
        "(8, 16)",
    ]
