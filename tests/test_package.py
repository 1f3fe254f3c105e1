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


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("source", [None, SOURCE])
def test_a_built_package_has_no_relative_link(tmp_path, monkeypatch, source):
    """Nor a picture, unless pyproject.toml has the address of the repository: then it links there."""
    for name in READ:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    project, setting = tmp_path / "pyproject.toml", f'Source = "{source}"' if source else ""
    settings, places = SETTING.subn(setting, project.read_text("utf-8"))
    assert places == 1
    project.write_text(settings, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    built = tmp_path / prepare_metadata_for_build_wheel(str(tmp_path)) / "METADATA"
    metadata = email.message_from_string(built.read_text(encoding="utf-8"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert re.findall(r"\]\((?!https?:)[^)]*\)", without_code(text)) == []
    assert all(block in text for block in blocks_of(README))
    links = re.findall(rf"(!?)\[[^]]*\]\({SOURCE}/(blob|raw)/main/([^)#]*)\)", text)
    if source is None:
        assert "![" not in text
        assert links == []
    else:
        assert len(links) > 10
        assert {(picture, kind) for picture, kind, _ in links} == {("!", "raw"), ("", "blob")}
        assert [path for *_, path in links if not (ROOT / path).exists()] == []
