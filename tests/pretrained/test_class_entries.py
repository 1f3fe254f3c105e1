"""The list of entries that transformers' own configuration classes have, against transformers."""

import pytest


@pytest.mark.slow
def test_list_equals_the_output_of_the_script():
    transformers = pytest.importorskip("transformers")
    import make_class_entries  # noqa: PLC0415 (it needs transformers)

    written = make_class_entries.FILE.read_text()
    if f"transformers {transformers.__version__}." not in written:
        pytest.skip("the list is of another version")
    assert make_class_entries.made() == written
    assert make_class_entries.made_defaults() == make_class_entries.DEFAULTS_FILE.read_text()
