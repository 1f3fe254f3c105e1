"""`ModelType`: all that is known of one type of published models, such as "llama"."""

import enum
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from transformer_embed._src.positions.schemes import Sinusoidal
from transformer_embed._src.pretrained.entries import (
    ALIASES,
    ENTRIES,
    ENTRY_DEFAULTS,
    ENTRY_OF_NAME,
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
# A value of `ModelType.rotates`: only sliding layers rotate, but all layers do in a model without a
# window.
WINDOWLESS = "windowless"
# Values of `ModelType.sections`: time, height and width have consecutive pairs of channels, or they
# take turns.
CONSECUTIVE, IN_TURNS = "consecutive", "in turns"

# Values of `ModelType.image_blocks`: the tokens of one image see each other at any distance, or
# inside a window.
ANYWHERE, IN_WINDOW = "anywhere", "in window"

# Values of `ModelType.attention`: what divides or multiplies the logits of attention.
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
        positions: The module of the table of learned positions, or several names of which the first
            that is in the file counts. If empty, there is no such table.
        token_types: The module of the table of token types, or several names as in `positions`.
        norm: The module of the layer norm, or several names.
        widen: The module of the linear layer after the table, or several names.
        bias: The module of the relative position bias, or several names.
        per_layer: What the names of the three modules of the inputs of layers share (Gemma 3n).
        may_lack: The ends of the paths of the parameters whose tensors may be missing.
        start: The first position. If this is the name of an entry, the entry has the id of padding,
            and the first position is this id + 1. Padding has the position before the first one. If
            the id of padding is not known, padding is counted like tokens.
        sinusoids: The scheme of sinusoidal positions, without the fields that `start` says. If
            None, positions are learned.
        scale: The scale of the tokens, as `EmbedderConfig` takes it, or the name of the entry that
            has the scale.
        rotary: The layout of rotary embeddings, as `apply_rotary` takes it, or the name of the
            entry that says whether pairs of channels are interleaved. If empty, no layer rotates.
        kinds: The two kinds of layers between which a rule in layer_kinds.py chooses if config.json
            has no list; or the kind of all layers. If empty, the kinds are not known.
        phase: The index of the first layer of the second kind, if every nth layer is of that kind.
            -1 is the nth layer.
        rotates: Which layers use rotary embeddings. If SLIDING, the sliding layers do. If
            WINDOWLESS, the sliding layers do, or all layers of a model without a window. If empty,
            all layers do.
        is_causal: Whether a token sees only the tokens before it.
        image_blocks: Where the tokens of one image see each other: pairs of a kind of layers, and
            ANYWHERE or IN_WINDOW, as in `Layer.image_blocks`.
        has_vision_switch: Whether `image_blocks` counts only if the entry
            use_bidirectional_attention is "vision".
        sections: How pairs of channels are shared out to time, height and width: CONSECUTIVE or
            IN_TURNS.
        attention: How attention scales its logits. HEAD_DIM: divided by the root of the head size.
            QUERY_SCALAR: divided by the root of the entry query_pre_attn_scalar. MULTIPLIER:
            multiplied by the entry attention_multiplier. UNSCALED: not at all. If empty, nothing is
            said of the attention.
        has_sinks: Whether attention has a learned sink for each head.
        has_alpha: Whether the scaling "dynamic" may have the alpha of `NTKScaling`.
        has_alibi: Whether attention is biased by `alibi_bias`.
        entries: Entries that the type reads, with their defaults. Two sorts are left out: the
            entries that all types with a part read (see `READS` in layer_parts.py), if they have
            the usual default, and the entries that other fields name.
        unread: Entries that types with these parts read, but this type does not. They have their
            defaults.
        no_effect: Entries that change nothing in this type, although they would in another type.
        aliases: The names that an entry has in this type alone, as "entry: names". They go before
            the entry's other names.
        head: The modules that may be the output layer. The first that is in the file counts.
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
        """Returns this type with changes: of fields, or else of entries with their defaults.

        `LLAMA.but(is_causal=False, rope_theta=5.0)` changes a field and the default of an entry.
        """
        fields = {}
        entries = dict(self.entries)
        for name, value in changes.items():
            changed = fields if name in self._fields else entries
            changed[name] = value
        return self._replace(**fields, entries=entries)

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
        """Returns the entries that this type reads, each with the names that it may have.

        If a file has several of the names, the first one counts. The order is: the names that only
        this type has, the entry's own name, and the names in other models.
        """
        # A field may have a number in place of a name. The numbers are dropped below, because only
        # names of `ENTRIES` are returned.
        entries_read = {self.start, self.scale, self.rotary, *self.entries}
        for part, entries_of_part in READS.items():
            has_part = part in self.entries or getattr(self, part, None)
            if has_part:
                entries_read |= {*entries_of_part.split()}
        entries_read -= {*self.unread.split()}
        entry_with_own_names, _, own_names = self.aliases.partition(": ")
        names = {}
        # The order is the one of `ENTRIES`, so that messages have a fixed order.
        for entry in ENTRIES:
            if entry in entries_read:
                first_names = own_names.split() if entry == entry_with_own_names else []
                names[entry] = (*first_names, entry, *ALIASES.get(entry, "").split())
        return names

    def has_no_effect(self, entry: str) -> bool:
        """Returns whether this type says, in `no_effect`, that an entry changes nothing.

        An entry inside an object is named after the object, such as "rope_scaling: interleaved".
        """
        _, _, name = entry.rpartition(" ")
        return name in self.no_effect.split()

    def status(self, entry: str, value: Any) -> EntryStatus:
        """Returns whether the type reads an entry. If not, returns what is known of the entry."""
        if any(entry in names for names in self.names_of_entries().values()):
            return EntryStatus.READ
        if self.has_no_effect(entry) or changes_nothing(value) or self._says_nothing(entry, value):
            return EntryStatus.OF_NO_CONCERN
        if self._is_refused(entry):
            return EntryStatus.REFUSED
        return EntryStatus.OF_NO_CONCERN if is_known(entry) else EntryStatus.UNKNOWN

    def _says_nothing(self, entry: str, value: Any) -> bool:
        """Returns whether an entry is about something that all models of this type do, or none."""
        object_name, _, name_inside = entry.rpartition(": ")
        if object_name:
            return name_inside in IN_ROTATIONS
        name = ENTRY_OF_NAME.get(entry, entry)
        # This type says already that heads rotate.
        if name == "position_embedding_type":
            return value == "rope" and self.rotary != ""
        # A rotation of layers with a window says nothing of a type without windows.
        needed_entry = ENTRIES[name].within if name in ENTRIES else ""
        return needed_entry != "" and needed_entry not in self.names_of_entries()

    def _is_refused(self, entry: str) -> bool:
        """Returns whether an entry that is not read may change the input or the output layer."""
        # An entry inside an object of a rotation ("rope_scaling: beta") may change the rotation.
        if ": " in entry:
            return True
        # The epsilon is about norms, which all models have. It concerns the input layer only if
        # the input layer has a norm.
        if ENTRY_OF_NAME.get(entry) == "layer_norm_eps":
            return self.norm != ""
        return is_loud(entry)

    def tensors(self, files: Collection[str], stack: str, prefix: str) -> dict[str, str]:
        """Returns the name of each parameter's tensor, by the path of the parameter.

        The result is {} if a tensor that this type needs is missing.

        Args:
            files: The names of all tensors in the checkpoint.
            stack: The stack that is read, "encoder" or "decoder".
            prefix: How the names of the input layer's tensors begin. The names of the output layer
                may begin with a shorter prefix, because the head of a model for images is in its
                text model, or beside the text model.
        """
        names = {}
        may_lack = (*self.may_lack.split(), OUTPUT_TABLE, OUTPUT_BIAS)
        for parameter, (part, ends) in TENSORS.items():
            modules = getattr(self, part).format(stack=stack).split()
            prefixes = outer_prefixes(prefix) if part == "head" else [prefix]
            possible_names = (
                start + end.format(module)
                for start in prefixes
                for module in modules
                for end in ends.split()
            )
            name = next((name for name in possible_names if name in files), None)
            if name is not None:
                names[parameter] = name
            elif modules and not parameter.endswith(may_lack):
                return {}
        return names


def outer_prefixes(prefix: str) -> list[str]:
    """Returns a prefix and the shorter ones: ["a.b.", "a.", ""] for "a.b."."""
    modules = prefix.split(".")[:-1]
    counts = range(len(modules), -1, -1)
    return ["".join(f"{module}." for module in modules[:count]) for count in counts]
