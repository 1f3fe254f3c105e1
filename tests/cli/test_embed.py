import dataclasses
import os
import sys
from unittest import mock

import numpy as np
import pytest
from compare import equal, near
from drawn import drawn

import transformer_embed as te
from transformer_embed.cli import embed, language_model
from transformer_embed.cli.embed import PAD_ID
from transformer_embed.cli.main import main

# float32 values below 64, which batches of other shapes round otherwise in a few operations.
ROUNDINGS = 4 * 2.0**-19


def saved(path, config):
    te.pretrained.save_embedder(path, config, drawn(te.Embedder(config).init))
    return path


@pytest.fixture
def embedded(prints, tmp_path):
    """The arrays that a file gives, and what is printed."""

    def run(source, model, *flags):
        out = tmp_path / "x.npz"
        printed = prints("embed", source, "--from", model, "--out", out, "--quiet", *flags)
        with np.load(out) as arrays:
            return dict(arrays), printed

    return run


@pytest.mark.slow
@pytest.mark.parametrize("tokens_a_batch", [1, 40, 16_384])
def test_lines_of_bytes_are_embedded_and_padded(
    monkeypatch, embedded, model_file, tmp_path, tokens_a_batch
):
    monkeypatch.setattr(embed, "TOKENS_PER_BATCH", tokens_a_batch)
    lines = ["short", "", "a longer line", "ünï"]
    source = tmp_path / "lines.txt"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    got, printed = embedded(source, model_file)
    assert printed.out == f"{tmp_path / 'x.npz'}: 4 lines of up to 13 tokens, 128 wide\n"
    ids = np.full((4, 13), PAD_ID, np.int32)
    for row, line in zip(ids, lines, strict=True):
        row[: len(line.encode())] = list(line.encode())
    mask, found = ids != PAD_ID, te.pretrained.load_embedder(model_file)
    apply = te.Embedder(dataclasses.replace(found.config, pad_id=PAD_ID)).apply
    expected = {
        "ids": ids,
        "mask": mask,
        "positions": np.where(mask, np.arange(13, dtype=np.int32), 0),
        "embeddings": np.asarray(apply(found.params, None, ids, is_training=False)),
    }
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        near(got[name], array, atol=ROUNDINGS)


@pytest.mark.slow
def test_all_batches_have_one_shape(monkeypatch, embedded, model_file, text_file):
    shapes, real = [], te.Embedder.apply

    def observed(self, params, rng, ids, **options):
        shapes.append(ids.shape)
        return real(self, params, rng, ids, **options)

    monkeypatch.setattr(te.Embedder, "apply", observed)
    monkeypatch.setattr(embed, "TOKENS_PER_BATCH", 1_000)
    embedded(text_file, model_file)
    assert len(shapes) > len(set(shapes)) == 1
    assert len(shapes) * shapes[0][0] % 100 != 0


@pytest.mark.slow
def test_bars_are_on_a_terminal_until_quiet(monkeypatch, prints, model_file, text_file, tmp_path):
    command = ["embed", text_file, "--from", model_file, "--out", tmp_path / "x.npz"]
    assert prints(*command).err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = prints(*command).err
    assert "embedding: 100%" in shown
    assert max(len(line.strip()) for line in shown.split("\r")) == 79
    assert prints(*command, "--quiet").err == ""


@pytest.mark.slow
def test_ids_and_bytes_are_the_same_tokens(embedded, model_file, tmp_path):
    (tmp_path / "text").write_bytes(b"ab\r\n\xff\n")
    (tmp_path / "ids").write_bytes(b"97  98\n\t255 \n")
    text, _ = embedded(tmp_path / "text", model_file)
    ids, _ = embedded(tmp_path / "ids", model_file, "--ids")
    assert text["ids"].tolist() == [[97, 98], [255, PAD_ID]]
    for name, array in text.items():
        equal(array, ids[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pad_id", "scheme"),
    [(3, te.Sinusoidal()), (0, te.Sinusoidal(at_padding=0, pad_id=3))],
)
def test_padding_inside_a_line_is_padding_to_the_model(embedded, tmp_path, pad_id, scheme):
    config = te.EmbedderConfig(7, 6, pad_id=pad_id, scheme=scheme)
    params, source = saved(tmp_path / "p", config), tmp_path / "ids"
    source.write_text(f"1 {pad_id} 2\n4\n")
    got, _ = embedded(source, params, "--ids")
    ids = np.array([[1, pad_id, 2], [4, pad_id, pad_id]])
    loaded = te.pretrained.load_embedder(params)
    expected = te.Embedder(config).apply(loaded.params, None, ids, is_training=False)
    equal(got["mask"], ids != pad_id)
    near(got["embeddings"], expected, atol=ROUNDINGS)


# --- Errors.


@pytest.mark.parametrize("wrong", ["256", "-1", "1_0", "٣", "9" * 5000])
def test_a_wrong_id_is_named(fails, model_file, tmp_path, wrong):
    source = tmp_path / "ids"
    source.write_text(f"1 2 3\n4 {wrong} 5\n", encoding="utf-8")
    line = fails("embed", source, "--ids", "--from", model_file, "--out", tmp_path / "x.npz")
    message = "line 2: wanted integers from 0 to 255, the vocabulary of the parameters, got "
    assert f"{source}, {message}{wrong[:20]!r}" in line
    assert list(tmp_path.iterdir()) == [source]


NOT_BYTES = "are not bytes; give a FILE of ids, as its tokenizer makes them, and --ids"


@pytest.mark.parametrize(
    ("config", "ids", "message"),
    [
        (te.EmbedderConfig(7, 6), None, NOT_BYTES),
        (te.EmbedderConfig(7, 6), " \n", "ids holds no tokens; give a file of ids"),
        (te.EmbedderConfig(256, 6), "\n", "holds no tokens; give a file of ids"),
        (te.EmbedderConfig(7, 6, scheme=te.Learned(3)), "1 2 3 4",
         "a line has 4 tokens (ids: wanted a length of at most 3, where Learned ends, got length 4); split such lines"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_the_file(fails, tmp_path, text_file, config, ids, message):
    params, source = saved(tmp_path / "p", config), tmp_path / "ids"
    source.write_text(ids or "")
    flags = [text_file] if ids is None else [source, "--ids"]
    assert message in fails("embed", *flags, "--from", params, "--out", tmp_path / "x.npz")
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize("keep", [None, 100])
def test_a_model_that_cannot_be_read(fails, model_file, tmp_path, text_file, keep):
    params = tmp_path / "p"
    message = f"cannot read {params}: No such file or directory"
    if keep is not None:
        params.write_bytes(model_file.read_bytes()[:keep])
        message = f"{params}: wanted a whole safetensors file"
    assert message in fails("embed", text_file, "--from", params, "--out", tmp_path / "x.npz")
    assert not (tmp_path / "x.npz").exists()


SUFFIXES = {"train": ".safetensors", "embed": ".npz"}
both_commands = pytest.mark.parametrize("command", SUFFIXES)


@both_commands
def test_a_file_that_cannot_be_read(fails, model_file, tmp_path, command):
    flags = ["--from", model_file, "--out", tmp_path / "x.npz"] if command == "embed" else []
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    line = fails(command, tmp_path / "empty", *flags)
    assert "is empty; name a file that holds something" in line
    for name in ("missing", "folder", "bad\0"):
        line = fails(command, tmp_path / name, *flags)
        assert "; name a file that exists and that you may read" in line
    assert not (tmp_path / "x.npz").exists()


@both_commands
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    fails, monkeypatch, model_file, text_file, tmp_path, command
):
    monkeypatch.setattr(language_model, "train", lambda *_, **__: pytest.fail("trained first"))
    suffix, flags = SUFFIXES[command], ["--from", model_file] if command == "embed" else []
    (tmp_path / "file").write_text("kept")
    (tmp_path / f"folder{suffix}").mkdir()
    for place in ("missing/x", "file/x", "folder", "x" * 300):
        out = tmp_path / f"{place}{suffix}"
        assert f"cannot write {out}: " in fails(command, text_file, "--out", out, *flags)
    loop = tmp_path / f"loop{suffix}"
    loop.symlink_to(loop)
    assert f"cannot write {loop}: it is not a reg" in fails(
        command, text_file, "--out", loop, *flags
    )
    loop.unlink()
    for name in ("x.txt", suffix[1:]):
        out = tmp_path / name
        wanted = f"--out: wanted a name that ends in {suffix}, got '{out}'"
        assert wanted in fails(command, text_file, "--out", out, *flags)
    link = tmp_path / f"link{suffix}"
    link.symlink_to(text_file)
    line = fails(command, text_file, "--out", link, *flags)
    assert "it is also read; name another file" in line
    assert {path.name for path in tmp_path.rglob("*")} == {"file", f"folder{suffix}", link.name}


def test_no_file_is_written_over_the_model(fails, model_file, text_file, tmp_path):
    params = tmp_path / "params.npz"
    params.write_bytes(model_file.read_bytes())
    line = fails("embed", text_file, "--from", params, "--out", params)
    assert "it is also read; name another file" in line
    assert params.read_bytes() == model_file.read_bytes()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "No space left on device; free some space, or name a file elsewhere"),
        (MemoryError(), "out of memory; give a smaller FILE, or split it and its longest lines"),
    ],
)  # fmt: skip
def test_what_fails_while_writing_leaves_the_old_file(
    monkeypatch, fails, model_file, text_file, tmp_path, error, message
):
    def half(file, **arrays):
        file.write(b"half")
        raise error

    monkeypatch.setattr(np, "savez", half)
    out = tmp_path / "x.npz"
    out.write_bytes(b"old")
    assert message in fails("embed", text_file, "--from", model_file, "--out", out, "--quiet")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_link_keeps_pointing_at_what_is_written(embedded, model_file, text_file, tmp_path):
    (tmp_path / "x.npz").symlink_to(tmp_path / "real")
    (tmp_path / "plain").touch()
    embedded(text_file, model_file)
    assert (tmp_path / "x.npz").is_symlink()
    assert (tmp_path / "real").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_errors_of_the_system_that_are_not_of_files_are_raised(monkeypatch, model_file):
    """A bug is not a mistake of the user."""
    error = OSError(5, "Input/output error", "/somewhere")
    monkeypatch.setattr("transformer_embed.cli.inspect.run", mock.Mock(side_effect=error))
    with pytest.raises(OSError, match="/somewhere"):
        main(["inspect", os.fspath(model_file)])
