"""What a built package says of itself: no link of README leads nowhere."""

import email
import re
import shutil

import pytest

pytest.importorskip("hatchling")

from hatchling.build import prepare_metadata_for_build_wheel
from pages import README, ROOT, blocks_of

SOURCE = "https://example.org/transformer-embed"
SETTING = re.compile(r"^(?:# )?Source = .*$", re.MULTILINE)
READ = (
    "pyproject.toml",
    ".ci/long_description.py",
    "README.md",
    "LICENSE",
    "transformer_embed/__init__.py",
)


def long_description(folder, monkeypatch, source):
    """Of a package whose pyproject.toml has this address of the repository, or none."""
    for name in READ:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    settings, places = SETTING.subn(
        f'Source = "{source}"' if source else "", (folder / "pyproject.toml").read_text("utf-8")
    )
    assert places == 1
    (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
    monkeypatch.chdir(folder)
    built = folder / prepare_metadata_for_build_wheel(str(folder)) / "METADATA"
    metadata = email.message_from_string(built.read_text(encoding="utf-8"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    return metadata.get_payload()


def relative_links(text):
    return re.findall(r"\]\((?!https?:)[^)]*\)", text)


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def test_a_built_package_has_no_relative_link(tmp_path, monkeypatch):
    """Nor a picture, unless it knows the address of its repository."""
    text = long_description(tmp_path, monkeypatch, None)
    assert relative_links(without_code(README.read_text(encoding="utf-8")))
    assert relative_links(without_code(text)) == []
    assert "![" not in text
    assert all(block in text for block in blocks_of(README))


def test_a_built_package_links_to_files_of_the_repository(tmp_path, monkeypatch):
    text = long_description(tmp_path, monkeypatch, SOURCE)
    links = re.findall(rf"(!?)\[[^]]*\]\({SOURCE}/(blob|raw)/main/([^)#]*)\)", text)
    assert len(links) > 10
    assert relative_links(without_code(text)) == []
    assert {(picture, kind) for picture, kind, _ in links} == {("!", "raw"), ("", "blob")}
    assert [path for *_, path in links if not (ROOT / path).exists()] == []
