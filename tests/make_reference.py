"""Writes what the reference pages and the page of the command line say from the code.

A page marks such a part with a comment, and the part ends with another one:

    <!-- reference: lookup rows.apply_gradients -->    a table of these names, then an entry for each
    <!-- help: train -->                      what `transformer-embed train --help` prints
    <!-- end -->

Usage: python tests/make_reference.py. tests/test_docs.py checks that the pages are up to date.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import transformer_embed as te
from transformer_embed.cli import main as command_line

FOLDER = Path(__file__).parents[1] / "notebooks"
PART = re.compile(r"(<!-- (reference|help): (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
SECTION = re.compile(r"^(Args|Returns|Raises|Example|Edge cases|Source):\n", re.MULTILINE)
# Methods of public classes that only other parts of the package call.
INTERNAL = {
    "AttentionMask": "sides lengths reach",
    "EmbedderConfig": "row_order factor stddevs",
    "OutputLayer": "size",
    "PositionalEncoding": "encoding",
    "RowGradient": "arrays trusted_values check spec is_split",
}
ITEM = re.compile(r"^((?:\\\*)*\w+(?:, \w+)*): ")
WIDTH = 100


def pages() -> dict[Path, str]:
    """Each page with such a part, and what it should say."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.rglob("*.md"))}
    homes = {name: path for path, text in texts.items() for name in names_on(text)}
    return {path: _page(path, text, homes) for path, text in texts.items() if PART.search(text)}


def names_on(text: str) -> list[str]:
    """The public names that a page has entries for."""
    return [
        name
        for _, kind, names, _ in PART.findall(text)
        if kind == "reference"
        for name in names.split()
    ]


def _page(path: Path, text: str, homes: dict[str, Path]) -> str:
    def written(part: re.Match) -> str:
        start, kind, names, end = part.groups()
        body = (
            _help(names) if kind == "help" else _linked(entries(names.split(), level), path, homes)
        )
        return f"{start}\n{body}\n\n{end}"

    has_sections = re.search(r"^## ", PART.sub("", text), re.MULTILINE)
    level = "###" if has_sections else "##"
    return PART.sub(written, text)


def _help(command: str) -> str:
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
        mock.patch.dict(os.environ, COLUMNS="88"),
    ):
        command_line.main([*command.split(), "--help"])
    return f"```text\n{printed.getvalue().strip()}\n```"


def entries(names: list[str], level: str) -> str:
    rows = ["| | |", "|---|---|"]
    rows += [f"| `te.{name}` | {_summary(_value(name))} |" for name in names]
    return "\n\n".join(["\n".join(rows), *(_entry(name, level) for name in names)])


def _value(name: str) -> object:
    return functools.reduce(getattr, name.split("."), te)


def _summary(value: object) -> str:
    return _escaped(" ".join((inspect.getdoc(value) or "").split("\n\n", 1)[0].split()))


def _entry(name: str, level: str) -> str:
    value = _value(name)
    signature = None if inspect.ismodule(value) else _signature(f"te.{name}", value)
    parts = [f"{level} te.{name}", signature, _prose(value)]
    if inspect.isclass(value):
        for method, function in _methods(value):
            heading = method.replace("__", r"\_\_")  # else `__call__` is a bold "call"
            parts += [f"{level}# {heading}", _signature(method, function), _prose(function)]
    return "\n\n".join(filter(None, parts))


def _methods(kind: type) -> Iterator[tuple[str, object]]:
    """What a class of ours shows beside its arguments, in the order of its source.

    What it only implements of a class above it, other parts of the package call.
    """
    above = {name for base in kind.__mro__[1:] for name in vars(base)}
    above |= {*INTERNAL.get(kind.__name__, "").split()}
    for name in ["__call__", *(name for name in vars(kind) if not name.startswith("_"))]:
        value = vars(kind).get(name)
        is_method = isinstance(value, classmethod | staticmethod | property)
        is_shown = name not in above and (is_method or inspect.isfunction(value))
        if is_shown and inspect.getdoc(value):
            yield name, getattr(value, "__func__", value)


def _signature(name: str, value: object) -> str:
    """How to call it, one argument a line if there are many."""
    signature = inspect.signature(getattr(value, "fget", value))
    arguments = _arguments(signature.parameters.values())
    shows_result = not inspect.isclass(value) and signature.return_annotation is not signature.empty
    returns = f" -> {_annotation(signature.return_annotation)}" if shows_result else ""
    if isinstance(value, property):
        return f"```python\n{name}{returns}\n```"
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returns}"
    return f"```python\n{line}\n```"


def _arguments(parameters: Iterable[inspect.Parameter]) -> list[str]:
    texts, stars = [], {"": True}
    for each in parameters:
        if each.name in ("self", "cls"):
            continue
        if each.kind == each.KEYWORD_ONLY and stars.pop("", False):
            texts.append("*")
        if each.kind == each.VAR_POSITIONAL:
            stars.clear()
        default = each.default
        if dataclasses.is_dataclass(default):
            default = _Text(f"{type(default).__name__}()")
        if type(default) is str:
            # The dots of a string are not those of a module.
            declared = _shortened(str(each.replace(default=each.empty)))
            equals = " = " if ":" in declared else "="
            texts.append(f'{declared}{equals}"{default}"')
        else:
            texts.append(_shortened(str(each.replace(default=default))))
    return texts


class _Text(str):
    """Shown without quotes."""

    __repr__ = str.__str__


def _annotation(kind: object) -> str:
    return _shortened(inspect.formatannotation(kind))


def _shortened(text: str) -> str:
    """Without the modules of classes, and with double quotes."""
    text = re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", text.replace('"', "'"))
    text = re.sub(r"\b(?!jnp\b)(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text).replace("'", '"')
    # A forward reference.
    return re.sub(r'"([A-Z][^"]*)"', r"\1", text)


def _prose(value: object) -> str:
    """A docstring as Markdown."""
    text = inspect.getdoc(value) or ""
    first, *rest = SECTION.split(text)
    parts = [_blocks(first.strip())]
    for title, indented in zip(rest[::2], rest[1::2], strict=True):
        body = textwrap.dedent(indented).strip()
        if title in ("Args", "Raises"):
            parts.append(f"**{title.replace('Args', 'Arguments')}**\n\n{_items(body)}")
        elif title == "Example":
            parts.append(_examples(body))
        elif title == "Edge cases":
            cases = (" ".join(case.split()) for case in re.split(r"\n(?=- )", body))
            parts.append(f"**{title}**\n\n" + "\n".join(map(_escaped, cases)))
        else:
            parts.append(f"**{title}:** {_blocks(body)}")
    return "\n\n".join(filter(None, parts))


def _examples(body: str) -> str:
    """Examples as code, and the sentences between them as text."""
    sessions = re.split(r"^((?!>>>|\.\.\. )\S.*:)\n\n", body, flags=re.MULTILINE)
    parts = [f"```pycon\n{sessions[0].strip()}\n```"]
    for sentence, session in zip(sessions[1::2], sessions[2::2], strict=True):
        parts += [_escaped(sentence), f"```pycon\n{session.strip()}\n```"]
    return "\n\n".join(parts)


def _items(body: str) -> str:
    """`name: text` with deeper lines below it, as a list. A list inside the text stays a list."""
    lines = []
    for item in re.split(r"\n(?=\S)", body):
        first, *others = re.split(r"\n\s*\n|\n(?=\s+- )", item)
        text = _escaped(" ".join(first.split()))
        lines.append(f"- {re.sub(ITEM, _quoted, text)}")
        for other in others:
            part = _escaped(" ".join(other.split()))
            # A paragraph after the points needs an empty line before it.
            lines.append(f"  {part}" if part.startswith("- ") else f"\n  {part}")
    return "\n".join(lines)


def _quoted(name: re.Match) -> str:
    names = name[1].replace(chr(92), "").split(", ")
    return ", ".join(f"`{each}`" for each in names) + ": "


def _blocks(text: str) -> str:
    """Paragraphs in one line each; an indented paragraph is code or a formula."""
    parts = []
    for part in text.split("\n\n"):
        if part.startswith("    "):
            parts.append(f"```text\n{textwrap.dedent(part)}\n```")
        else:
            is_list = re.search(r"\n *(- |\d\. |`\")", part)
            parts.append(_escaped(part if is_list else " ".join(part.split())))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    """Asterisks outside of code as they are: `2**24` is not bold."""
    return "".join(
        part if part.startswith("`") else part.replace("*", r"\*")
        for part in re.split(r"(`[^`]*`)", text)
    )


def _linked(text: str, path: Path, homes: dict[str, Path]) -> str:
    """Turns public names in backticks into links to their entries."""
    fences = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    return "".join(
        part
        if part.startswith("```")
        else re.sub(r"`(?:te\.)?([\w.]+)`", functools.partial(_link, path, homes), part)
        for part in fences
    )


def _link(path: Path, homes: dict[str, Path], name: re.Match) -> str:
    home = homes.get(name[1])
    if home is None:
        return name[0]
    target = "" if home == path else os.path.relpath(home, path.parent)
    return f"[{name[0]}]({target}#{anchor(name[1])})"


def anchor(name: str) -> str:
    """The anchor of a name's heading, as web pages of repositories and Sphinx write it."""
    return f"te.{name}".lower().replace(".", "")


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
