import dataclasses

import numpy as np
import pytest
from compare import equal, near
from drawn import drawn

import transformer_embed as te
from transformer_embed.cli import embed, language_model
from transformer_embed.cli.embed import PAD_ID

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
        printed = prints("embed", source, "--from", model, "--out", out, *flags)
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("256", "ids: wanted integers inside the vocabulary, 0..255, got 256 at index [1, 1]"),
        ("-2", "ids: wanted integers inside the vocabulary, 0..255, got -2 at index [1, 1]"),
        (
            "4294967297",
            "ids: wanted integers inside the vocabulary, 0..255, got 4294967297 at index [1, 1]",
        ),
        ("1.5", "invalid literal for int() with base 10: b'1.5'"),
    ],
)
def test_a_wrong_id_is_named(fails, model_file, tmp_path, wrong, message):
    source = tmp_path / "ids"
    source.write_text(f"1 2 3\n4 {wrong} 5\n")
    out = tmp_path / "x.npz"
    assert message in fails("embed", source, "--ids", "--from", model_file, "--out", out)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("command", "suffix"), [("train", ".safetensors"), ("embed --from m", ".npz")]
)
def test_files_that_cannot_be_read_or_written_are_named_before_the_work(
    fails, monkeypatch, text_file, tmp_path, command, suffix
):
    monkeypatch.setattr(language_model, "train", lambda *_, **__: pytest.fail("trained first"))
    monkeypatch.setattr(embed, "read_checkpoint", lambda *_: pytest.fail("loaded first"))
    command = command.split()
    missing = tmp_path / "missing"
    out = tmp_path / f"x{suffix}"
    assert f"No such file or directory: '{missing}'" in fails(*command, missing, "--out", out)
    (tmp_path / f"folder{suffix}").mkdir()
    loop = tmp_path / f"loop{suffix}"
    loop.symlink_to(loop)
    read = tmp_path / f"read{suffix}"
    read.write_bytes(text_file.read_bytes())
    for name, why in (
        ("missing/x", "No such file or directory; name a file in a folder that you may write to"),
        ("folder", "it is not a regular file"),
        ("loop", "it is not a regular file"),
        ("read", "it is also read; name another file"),
    ):
        out = tmp_path / f"{name}{suffix}"
        assert f"cannot write {out}: {why}" in fails(*command, read, "--out", out)
    for name in ("x.txt", suffix[1:]):
        wanted = f"--out: wanted a name that ends in {suffix}, got '{name}'"
        assert wanted in fails(*command, text_file, "--out", name)


NOT_BYTES = "are not bytes; give a FILE of ids, as its tokenizer makes them, and --ids"


@pytest.mark.parametrize(
    ("config", "ids", "message"),
    [
        (te.EmbedderConfig(7, 6), None, NOT_BYTES),
        (te.EmbedderConfig(7, 6), " \n", "ids holds no tokens"),
        (te.EmbedderConfig(256, 6), "\n", "holds no tokens"),
        (te.EmbedderConfig(7, 6, scheme=te.Learned(3)), "1 2 3 4",
         "length: wanted at most 3 ids, as Learned has positions (max_len), got 4"),
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
    message = f"No such file or directory (for a model's name, pass the folder that huggingface_hub.snapshot_download(name) returns): '{params}'"
    if keep is not None:
        params.write_bytes(model_file.read_bytes()[:keep])
        message = f"{params}: wanted a whole safetensors file"
    assert message in fails("embed", text_file, "--from", params, "--out", tmp_path / "x.npz")
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "error: MemoryError"),
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
    assert message in fails("embed", text_file, "--from", model_file, "--out", out)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_a_link_keeps_pointing_at_what_is_written(embedded, model_file, text_file, tmp_path):
    (tmp_path / "x.npz").symlink_to(tmp_path / "real")
    (tmp_path / "plain").touch()
    got, _ = embedded(text_file, model_file)
    # Where the model's own scheme puts padding.
    assert got["positions"][~got["mask"]].tolist() == [0] * np.sum(~got["mask"])
    assert (tmp_path / "x.npz").is_symlink()
    assert (tmp_path / "real").stat().st_mode == (tmp_path / "plain").stat().st_mode
