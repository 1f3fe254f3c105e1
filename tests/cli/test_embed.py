import dataclasses
import math
import os
import sys
import types

import numpy as np
import pytest
from command_line import TABLE
from safetensors import safe_open

import transformer_embed as te
from transformer_embed.cli import embed, language_model
from transformer_embed.cli.embed import PAD_ID
from transformer_embed.cli.main import main

# float32 values below 8 are rounded by at most 2**-22: the factor, the product, the encoding and
# the sum are.
BY_HAND = 4 * 2.0**-22
# Batches of other shapes are other programs: XLA may fuse the product and the sum, which is one
# rounding less.
FUSED_SUM = 2 * 2.0**-22


def by_hand(params, ids):
    """The embeddings from the paper's formula: row times sqrt(d_model), plus the sinusoids; rows of
    padding are zeros."""
    table = np.asarray(params, np.float64)
    rows = np.where((ids >= 0)[..., None], table[np.maximum(ids, 0)], 0) * math.sqrt(table.shape[1])
    positions = te.TokenPositions.from_ids(ids, pad_id=PAD_ID).positions
    angles = np.float64(positions)[..., None] * 10_000.0 ** (
        -2 * np.arange(table.shape[1] // 2) / table.shape[1]
    )
    return rows + np.stack([np.sin(angles), np.cos(angles)], -1).reshape(rows.shape)


def test_bars_are_on_a_terminal_until_quiet(monkeypatch, capsys, model_file, text_file, tmp_path):
    command = [
        "embed",
        str(text_file),
        "--from",
        str(model_file),
        "--out",
        str(tmp_path / "x.npz"),
    ]
    assert main(command) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(command) == 0
    assert "embedding: 100%" in capsys.readouterr().err
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("tokens_a_batch", [1, 40, 16_384])
def test_embed_is_the_embedder_on_padded_lines(
    monkeypatch, capsys, model_file, tmp_path, tokens_a_batch
):
    monkeypatch.setattr(embed, "TOKENS_PER_BATCH", tokens_a_batch)
    lines = ["short", "", "a longer line", "ünï"]
    source, out = tmp_path / "lines.txt", tmp_path / "x.npz"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert (
        main(["embed", str(source), "--from", str(model_file), "--out", str(out), "--quiet"]) == 0
    )
    assert capsys.readouterr().out == f"{out}: 4 lines of up to 13 tokens, 128 wide\n"
    with np.load(out) as arrays:
        got = dict(arrays)
    ids = np.full((4, 13), PAD_ID, np.int32)
    for row, line in zip(ids, lines, strict=True):
        row[: len(line.encode())] = list(line.encode())
    np.testing.assert_array_equal(got["ids"], ids)
    np.testing.assert_array_equal(got["mask"], ids != PAD_ID)
    counted = te.TokenPositions.from_ids(ids, pad_id=PAD_ID).positions
    np.testing.assert_array_equal(got["positions"], counted)
    assert {name: array.dtype for name, array in got.items()} == {
        "ids": "i4",
        "mask": "?",
        "positions": "i4",
        "embeddings": "f4",
    }
    with safe_open(model_file, framework="numpy") as file:
        table = file.get_tensor(TABLE)
    np.testing.assert_allclose(got["embeddings"], by_hand(table, ids), rtol=0, atol=BY_HAND)
    module, name = TABLE.rsplit("/", 1)
    config = te.pretrained.load_embedder(model_file).config
    apply = te.Embedder(dataclasses.replace(config, pad_id=PAD_ID)).apply
    np.testing.assert_allclose(
        got["embeddings"],
        apply({module: {name: table}}, None, ids, is_training=False),
        rtol=0,
        atol=FUSED_SUM,
    )


def test_all_batches_have_one_shape(monkeypatch, model_file, text_file, tmp_path):
    shapes = []

    def observed(config):
        embedder = real(config)

        def apply(params, rng, ids, **options):
            shapes.append(ids.shape)
            return embedder.apply(params, rng, ids, **options)

        return types.SimpleNamespace(apply=apply)

    real = te.Embedder
    monkeypatch.setattr(te, "Embedder", observed)
    monkeypatch.setattr(embed, "TOKENS_PER_BATCH", 1_000)
    assert (
        main(
            [
                "embed",
                str(text_file),
                "--from",
                str(model_file),
                "--out",
                str(tmp_path / "x.npz"),
                "--quiet",
            ]
        )
        == 0
    )
    assert len(shapes) > 1
    assert len(set(shapes)) == 1
    assert len(shapes) * shapes[0][0] % 100 != 0


def test_ids_and_bytes_are_the_same_tokens(model_file, tmp_path):
    (tmp_path / "text").write_bytes(b"ab\r\n\xff\n")
    (tmp_path / "ids").write_bytes(b"97  98\n\t255 \n")
    for name, flags in (("text", []), ("ids", ["--ids"])):
        out = str(tmp_path / f"{name}.npz")
        assert (
            main(
                [
                    "embed",
                    str(tmp_path / name),
                    "--from",
                    str(model_file),
                    "--out",
                    out,
                    "--quiet",
                    *flags,
                ]
            )
            == 0
        )
    with np.load(tmp_path / "text.npz") as text, np.load(tmp_path / "ids.npz") as ids:
        assert text["ids"].tolist() == [[97, 98], [255, PAD_ID]]
        for name in text.files:
            np.testing.assert_array_equal(text[name], ids[name])


@pytest.mark.parametrize("wrong", ["256", "-1", "x", "1.0", "1_0", "+5", "٣", "9" * 5000])
def test_a_wrong_id_is_named(fails, model_file, tmp_path, wrong):
    source, out = tmp_path / "ids", tmp_path / "x.npz"
    source.write_text(f"1 2 3\n4 {wrong} 5\n", encoding="utf-8")
    line = fails("embed", source, "--ids", "--from", model_file, "--out", out)
    assert (
        f"{source}, line 2: wanted integers from 0 to 255, the vocabulary of the parameters, got {wrong[:20]!r}"
        in line
    )
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("vocab_size", [7, 257])
def test_the_tokens_of_another_vocabulary_are_not_bytes(
    save_embedder, fails, tmp_path, text_file, vocab_size
):
    params = save_embedder(tmp_path / "p", te.EmbedderConfig(vocab_size, 6))
    line = fails("embed", text_file, "--from", params, "--out", tmp_path / "x.npz")
    assert (
        f"the tokens of {params} are not bytes; give a FILE of ids, as its tokenizer makes them, and --ids"
        in line
    )


@pytest.mark.parametrize("pad_id", [0, 3])
@pytest.mark.parametrize("scheme", [None, te.Sinusoidal(), te.Sinusoidal(at_padding=0, pad_id=3)])
def test_padding_inside_a_line_is_padding_to_the_model(save_embedder, tmp_path, pad_id, scheme):
    config = te.EmbedderConfig(7, 6, pad_id=pad_id, scheme=scheme)
    params, source = save_embedder(tmp_path / "p", config), tmp_path / "ids"
    source.write_text(f"1 {pad_id} 2\n4\n")
    assert (
        main(
            [
                "embed",
                str(source),
                "--ids",
                "--from",
                str(params),
                "--out",
                str(tmp_path / "x.npz"),
                "--quiet",
            ]
        )
        == 0
    )
    ids = np.array([[1, pad_id, 2], [4, pad_id, pad_id]])
    loaded = te.pretrained.load_embedder(params)
    expected = te.Embedder(config).apply(loaded.params, None, ids, is_training=False)
    with np.load(tmp_path / "x.npz") as got:
        np.testing.assert_array_equal(got["ids"], ids)
        np.testing.assert_array_equal(got["mask"], ids != pad_id)
        np.testing.assert_allclose(got["embeddings"], expected, rtol=0, atol=FUSED_SUM)


def test_a_line_past_max_len_is_refused(save_embedder, fails, tmp_path):
    source, out = tmp_path / "ids", tmp_path / "x.npz"
    params = save_embedder(tmp_path / "p", te.EmbedderConfig(7, 6, scheme=te.Learned(3)))
    source.write_text("1 2 3 4")
    line = fails("embed", source, "--ids", "--from", params, "--out", out)
    assert (
        "a line has 4 tokens (ids: wanted a length of at most 3, where Learned ends, got length 4); split such lines"
        in line
    )
    source.write_text("1 2 3")
    assert (
        main(["embed", str(source), "--ids", "--from", str(params), "--out", str(out), "--quiet"])
        == 0
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrays": {"a": np.zeros(3)}}, f"wanted a tensor {TABLE}, got 1 tensors: a"),
        (
            {"arrays": {TABLE: np.zeros((7, 5), np.float32)}},
            "wanted shape [7, 6], as the configuration says, ",
        ),
        (
            {"arrays": {TABLE: np.zeros((7, 6), np.float64)}},
            "of F32 or BF16 or F16, got F64[7, 6]",
        ),
        (
            {"text": "{}"},
            "wanted shape [None, None], as the configuration says, of ",
        ),
        ({"text": "[1]"}, "transformer_embed.config: wanted a JSON object, got list"),
        (
            {"text": '{"vocab_size": 0, "d_model": 6, "scheme": null}'},
            "wanted shape [0, 6], as the configuration says",
        ),
        (
            {"text": '{"vocab_size": 7, "d_model": 6, "scheme": {"kind": "rotary"}}'},
            "'LongRopeScaling', got 'rotary'",
        ),
    ],
)
def test_parameters_of_another_kind(save_embedder, fails, tmp_path, text_file, change, message):
    params = save_embedder(tmp_path / "p", te.EmbedderConfig(7, 6), **change)
    assert message in fails("embed", text_file, "--from", params, "--out", tmp_path / "x.npz")
    assert list(tmp_path.iterdir()) == [params]


@pytest.mark.parametrize("keep", [1, 7, 100, -1])
def test_truncated_parameters(fails, model_file, tmp_path, text_file, keep):
    params = tmp_path / "p"
    params.write_bytes(model_file.read_bytes()[:keep])
    line = fails("embed", text_file, "--from", params, "--out", tmp_path / "x.npz")
    assert f"{params}: wanted a whole safetensors file" in line
    assert list(tmp_path.iterdir()) == [params]


@pytest.mark.parametrize("command", ["train", "embed"])
@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "null"])
def test_a_file_that_cannot_be_read(fails, model_file, tmp_path, command, kind):
    path = tmp_path / "bad"
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    name = "bad\0" if kind == "null" else path
    flags = ["--from", model_file, "--out", tmp_path / "x.npz"] if command == "embed" else []
    line = fails(command, name, *flags)
    assert (
        "is empty; name a file that holds something"
        if kind == "empty"
        else "; name a file that exists and that you may read"
    ) in line
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize("content", [b"\n\n\n", b" \n"])
def test_a_file_without_tokens(fails, model_file, tmp_path, content):
    source = tmp_path / "lines"
    source.write_bytes(content)
    line = fails("embed", source, "--ids", "--from", model_file, "--out", tmp_path / "x.npz")
    assert f"{source} holds no tokens; give a file of ids" in line


def test_a_pipe_in_place_of_a_model_is_refused(fails, text_file, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    line = fails("embed", text_file, "--from", tmp_path / "pipe", "--out", tmp_path / "x.npz")
    assert "path: wanted a regular file, got a folder, a pipe or a device" in line


def test_missing_parameters(fails, text_file, tmp_path):
    line = fails("embed", text_file, "--from", tmp_path / "none", "--out", tmp_path / "x.npz")
    assert f"cannot read {tmp_path / 'none'}: No such file or directory" in line


@pytest.mark.parametrize("command", ["train", "embed"])
@pytest.mark.parametrize("place", ["missing/x", "file/x", "folder", "x" * 300])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    fails, monkeypatch, model_file, text_file, tmp_path, command, place
):
    monkeypatch.setattr(
        language_model, "train", lambda *args, **options: pytest.fail("trained first")
    )
    (tmp_path / "file").write_text("kept")
    flags, suffix = (["--from", model_file], ".npz") if command == "embed" else ([], ".safetensors")
    (tmp_path / f"folder{suffix}").mkdir()
    out = tmp_path / f"{place}{suffix}"
    assert f"cannot write {out}: " in fails(command, text_file, "--out", out, *flags)
    assert {path.name for path in tmp_path.rglob("*")} == {"file", f"folder{suffix}"}


@pytest.mark.parametrize(
    ("command", "name", "wanted"),
    [
        (["train"], "p.npz", ".safetensors"),
        (["train"], "p", ".safetensors"),
        (["embed", "--from", "p"], "x.txt", ".npz"),
        (["embed", "--from", "p"], "npz", ".npz"),
    ],
)
def test_a_file_to_write_is_named_by_what_it_will_hold(
    fails, text_file, tmp_path, command, name, wanted
):
    line = fails(*command, text_file, "--out", tmp_path / name)
    assert f"--out: wanted a name that ends in {wanted}, got '{tmp_path / name}'" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            OSError(28, "No space left on device"),
            2,
            "No space left on device; free some space, or name a file elsewhere",
        ),
        (MemoryError(), 2, "out of memory; give a smaller FILE, or split it and its longest lines"),
    ],
)
def test_what_fails_while_writing_leaves_the_old_file(
    monkeypatch, capsys, model_file, text_file, tmp_path, error, status, message
):
    def half(file, **arrays):
        file.write(b"half")
        raise error

    monkeypatch.setattr(np, "savez", half)
    out = tmp_path / "x.npz"
    out.write_bytes(b"old")
    assert (
        main(["embed", str(text_file), "--from", str(model_file), "--out", str(out), "--quiet"])
        == status
    )
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert out.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_link_keeps_pointing_at_what_is_written(model_file, text_file, tmp_path):
    (tmp_path / "link.npz").symlink_to(tmp_path / "real")
    assert (
        main(
            [
                "embed",
                str(text_file),
                "--from",
                str(model_file),
                "--out",
                str(tmp_path / "link.npz"),
                "--quiet",
            ]
        )
        == 0
    )
    assert (tmp_path / "link.npz").is_symlink()
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_no_file_is_written_over_one_that_is_read(fails, model_file, text_file, tmp_path):
    text, params, link = tmp_path / "text.npz", tmp_path / "params.npz", tmp_path / "link.npz"
    text.write_bytes(text_file.read_bytes())
    params.write_bytes(model_file.read_bytes())
    link.symlink_to(text)
    for out in (text, params, link):
        assert "it is also read; name another file" in fails(
            "embed", text, "--from", params, "--out", out
        )
    link = tmp_path / "link.safetensors"
    link.symlink_to(text)
    assert "it is also read; name another file" in fails("train", text, "--out", link)
    assert text.read_bytes() == text_file.read_bytes()
    assert params.read_bytes() == model_file.read_bytes()


def test_a_line_past_the_grid_is_refused(save_embedder, fails, tmp_path, text_file):
    params = save_embedder(
        tmp_path / "p", te.EmbedderConfig(256, 8, scheme=te.SinusoidalGrid((2, 2)))
    )
    line = fails("embed", text_file, "--from", params, "--out", tmp_path / "x.npz")
    assert "wanted a length of at most 4, where SinusoidalGrid ends, got length" in line
