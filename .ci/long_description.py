"""Writes README.md into the metadata of a built package, far from the files that it links to."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?<!\w)(!?)\[([^]]*)\]\((?!https?:)([^)]*)\)")


class LongDescription(MetadataHookInterface):
    """Its relative links and pictures lead to the repository, `Source` in `project.urls`."""

    def update(self, metadata: dict) -> None:
        """Sets the long description."""
        readme = pathlib.Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        text = without_links(readme) if source is None else linked(readme, source)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def linked(text: str, source: str) -> str:
    """Relative links and pictures as absolute ones."""

    def absolute(link: re.Match) -> str:
        picture, words, path = link.groups()
        return f"{picture}[{words}]({source}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(absolute, text)


def without_links(text: str) -> str:
    """Relative links as their words, and no paragraph of pictures."""
    paragraphs = [part for part in text.split("\n\n") if "![" not in part]
    return LINK.sub(r"\2", "\n\n".join(paragraphs))
