"""`ModelType`: a row of the registry, which says everything that is true of one model type."""

import enum
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from transformer_embed._src.positions.schemes import Sinusoidal
from transformer_embed._src.pretrained.entries import (
    ALIASES,
    ENTRIES,
    ENTRY_DEFAULTS,
    ENTRY_OF_ALIAS,
)
from transformer_embed._src.pretrained.known_entries import (
    IN_ROTATIONS,
    changes_nothing,
    is_known,
    is_loud,
)
from transformer_embed._src.pretrained.layer_parts import (
    HEADS,
    OUTPUT_BIAS,
    OUTPUT_TABLE,
    READS,
    TENSORS,
)

# Kinds of layers, as config.json's `layer_types` names them.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED, LINEAR, CROSS = "indexed_attention", "linear_attention", "cross_attention"
# In DeepSeek V4, the layers of these two kinds see a window, and averages of the tokens before it.
COMPRESSED = "heavily_compressed_attention"
COMPRESSED_SPARSE = "compressed_sparse_attention"
# For `rotates`: only sliding layers rotate, but all layers do in a model without a window.
WINDOWLESS = "windowless"
# For `sections`: how pairs of channels are shared out to time, height and width.
CONSECUTIVE, IN_TURNS = "consecutive", "in turns"

# For `image_blocks`: the tokens of one image see each other at any distance, or inside a window.
ANYWHERE, IN_WINDOW = "anywhere", "in window"

# For `attention`: what divides or multiplies the logits.
HEAD_DIM, QUERY_SCALAR = "head_dim", "query_pre_attn_scalar"
MULTIPLIER, UNSCALED = "attention_multiplier", "unscaled"


class EntryStatus(enum.Enum):
    """What an entry of config.json is to a model type."""

    READ = "read"
    OF_NO_CONCERN = "known, and of no concern"
    REFUSED = "known, and refused"
    UNKNOWN = "unknown"


class ModelType(NamedTuple):
    """The input layer, the output layer and the kinds of layers of one model type.

    Several names in one string are separated by spaces. Modules are names of the checkpoint's
    tensors without ".weight", below its prefix. "{stack}" stands for encoder or decoder.

    Args:
        name: The type, as config.json's `model_type` names it.
        tokens: The module of the token table; if there are several, the first that is in the file.
        positions: The module of learned positions, likewise. If empty, there are none.
        token_types: The module of token types, likewise.
        norm: The module of the layer norm, likewise.
        widen: The module of the linear layer after the table, likewise.
        bias: The module of the relative position bias, likewise.
        per_layer: What the names of the three modules of the inputs of layers share.
        may_lack: Parameters whose tensors may be missing, by the ends of their paths.
        start: The first position; or the entry that has the id of padding, from which positions
            start one higher. If that id is known, padding is at the position before the first;
            otherwise it is counted like tokens.
        sinusoids: The scheme without what `start` says. If None, positions are learned.
        scale: The scale of the tokens, as for `EmbedderConfig`, or the entry that has it.
        rotary: The layout, as for `apply_rotary`, or the entry that says whether it is interleaved.
            If empty, nothing is rotated.
        kinds: The two kinds of layers among which the entries choose if config.json has no list
            (see layer_kinds.py); or the kind of all layers. If empty, the kinds are not known.
        phase: The number of the first layer of the second kind, where every nth is of that kind. If
            below 0, it counts from the nth.
        rotates: Which layers rotate. SLIDING: the sliding ones; WINDOWLESS: these, or all layers of
            a model without a window; if empty, all.
        is_causal: Whether a token sees only the tokens before it.
        image_blocks: Where the tokens of one image see each other: pairs of a kind of layers, and
            ANYWHERE or IN_WINDOW, as in `Layer.image_blocks`.
        has_vision_switch: Whether they do so only if the entry use_bidirectional_attention is
            "vision".
        sections: How pairs of channels are shared out to time, height and width: CONSECUTIVE or
            IN_TURNS.
        attention: How attention scales its logits: HEAD_DIM, by the root of the head size;
            QUERY_SCALAR, by the root of the entry query_pre_attn_scalar; MULTIPLIER, by the entry
            attention_multiplier; or UNSCALED. If empty, nothing is said of the attention.
        has_sinks: Whether attention has a learned sink for each head.
        has_alpha: Whether the scaling "dynamic" may have the alpha of `NTKScaling`.
        has_alibi: Whether attention is biased by `alibi_bias`.
        entries: The entries that the type reads, with their defaults: those that its parts
            (`READS`) and the other fields do not name, and those whose default is not the usual
            one (`ENTRY_DEFAULTS`).
        unread: Entries of the parts that the type does not read; they have their defaults.
        no_effect: Entries that change nothing in this type, although they would in another.
        aliases: "entry: names" that only this type has, which take precedence.
        head: The modules that may be the output layer.
        has_conv1d: Whether the weights of linear layers lie [in, out], as in GPT-2.
        no_output: Why an `OutputConfig` cannot say the output layer. If empty, it can.

    Example:
        >>> import transformer_embed as te
        >>> te.pretrained.find_model_type("gemma2").kinds
        ('sliding_attention', 'full_attention')
    """

    name: str = ""
    tokens: str = ""
    positions: str = ""
    token_types: str = ""
    norm: str = ""
    widen: str = ""
    bias: str = ""
    per_layer: str = ""
    may_lack: str = ""
    start: int | str = 0
    sinusoids: Sinusoidal | None = None
    scale: Any = False
    rotary: str = ""
    kinds: tuple[str, ...] = (SLIDING, FULL)
    phase: int = -1
    rotates: str = ""
    is_causal: bool = True
    image_blocks: tuple[tuple[str, str], ...] = ()
    has_vision_switch: bool = False
    sections: str = ""
    attention: str = ""
    has_sinks: bool = False
    has_alpha: bool = False
    has_alibi: bool = False
    entries: Mapping[str, Any] = {}
    unread: str = ""
    no_effect: str = ""
    aliases: str = ""
    head: str = HEADS
    has_conv1d: bool = False
    no_output: str = ""

    def but(self, **changes: Any) -> "ModelType":
        """Returns this row with other fields, and other entries with their defaults."""
        fields = {name: changes.pop(name) for name in [*changes] if name in self._fields}
        return self._replace(**fields, entries={**self.entries, **changes})

    @property
    def has_stacks(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return "{stack}" in self.tokens

    def default(self, entry: str) -> Any:
        """Returns the value of an entry that config.json leaves out."""
        return self.entries.get(entry, ENTRY_DEFAULTS.get(entry))

    def table_modules(self, stack: str) -> list[str]:
        """Returns the modules that may be the token table of a stack."""
        return self.tokens.format(stack=stack).split()

    def names_of_entries(self) -> dict[str, tuple[str, ...]]:
        """Returns the entries that are read, each with its names; the first that is given counts.

        A name that only this type has goes before the entry's own, and other models' names after.
        """
        reads = {self.start, self.scale, self.rotary, *self.entries}
        for part, entries in READS.items():
            if part in self.entries or getattr(self, part, None):
                reads |= {*entries.split()}
        reads -= {*self.unread.split()}
        entry_with_names, _, own_names = self.aliases.partition(": ")
        names = {}
        for entry in ENTRIES:
            if entry in reads:
                first = own_names.split() if entry == entry_with_names else []
                names[entry] = (*first, entry, *ALIASES.get(entry, "").split())
        return names

    def has_no_effect(self, entry: str) -> bool:
        """Returns whether the row says that an entry changes nothing.

        An entry inside an object is named after it, such as "rope_scaling: interleaved".
        """
        return entry.rpartition(" ")[2] in self.no_effect.split()

    def status(self, entry: str, value: Any) -> EntryStatus:
        """Returns what an entry with this value is to the type."""
        if any(entry in names for names in self.names_of_entries().values()):
            return EntryStatus.READ
        if self.has_no_effect(entry) or changes_nothing(value) or self._is_elsewhere(entry, value):
            return EntryStatus.OF_NO_CONCERN
        if self._is_refused(entry):
            return EntryStatus.REFUSED
        return EntryStatus.OF_NO_CONCERN if is_known(entry) else EntryStatus.UNKNOWN

    def _is_elsewhere(self, entry: str, value: Any) -> bool:
        """Returns whether an entry that others refuse describes what this type does not have."""
        rotation, _, inside = entry.rpartition(": ")
        if rotation:
            return inside in IN_ROTATIONS
        name = ENTRY_OF_ALIAS.get(entry, entry)
        # A rotation of heads needs no other positions.
        if name == "position_embedding_type":
            return value == "rope" and self.rotary != ""
        within = ENTRIES[name].within if name in ENTRIES else ""
        return within != "" and within not in self.names_of_entries()

    def _is_refused(self, entry: str) -> bool:
        """Returns whether an entry that is not read may change the input or the output layer."""
        # All that is inside the object of a rotation concerns it.
        if ": " in entry:
            return True
        # The other layers have norms too, so an epsilon is this layer's only if it has a norm.
        if ENTRY_OF_ALIAS.get(entry) == "layer_norm_eps":
            return self.norm != ""
        return is_loud(entry)

    def tensors(self, files: Collection[str], stack: str, prefix: str) -> dict[str, str]:
        """Returns the tensor of each parameter below a prefix, or {} if a needed one is missing.

        The tensors of the output layer are below the prefix too, or further out: a model of images
        has its head in its text model or around it.
        """
        names = {}
        prefixes_of_head = outer_prefixes(prefix)
        may_lack = (*self.may_lack.split(), OUTPUT_TABLE, OUTPUT_BIAS)
        for parameter, (part, ends) in TENSORS.items():
            modules = getattr(self, part).format(stack=stack).split()
            known = [
                start + end.format(module)
                for start in (prefixes_of_head if part == "head" else [prefix])
                for module in modules
                for end in ends.split()
            ]
            tensor = next((name for name in known if name in files), None)
            if tensor is not None:
                names[parameter] = tensor
            elif modules and not parameter.endswith(may_lack):
                return {}
        return names


def outer_prefixes(prefix: str) -> list[str]:
    """Returns a prefix and the shorter ones around it, down to the empty one."""
    parts = prefix.split(".")
    return [".".join([*parts[:count], ""]) for count in reversed(range(len(parts)))]
