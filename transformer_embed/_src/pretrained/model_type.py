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
MULTIPLIER_OR_HEAD_DIM = "attention_multiplier or head_dim"


class EntryStatus(enum.Enum):
    """What an entry of config.json is to a model type."""

    READ = "read"
    OF_NO_CONCERN = "known, and of no concern"
    REFUSED = "known, and refused"
    UNKNOWN = "unknown"


class ModelType(NamedTuple):
    """Describes the input layer, the output layer and the kinds of layers of one model type.

    A module is the name of a tensor without ".weight", and without the prefix that the names of the
    checkpoint share. For example, "embed_tokens" is the module of "model.embed_tokens.weight". If a
    string has several names, they are separated by spaces. "{stack}" in a name stands for "encoder"
    or "decoder".

    Args:
        name: The type, as config.json's `model_type` names it.
        tokens: The module of the token table. If the string has several modules, the first module
            that is in the file counts.
        positions: The module of the table of learned positions, or several modules, as in `tokens`.
            If empty, the model has no table of positions.
        token_types: The module of the table of token types, or several modules, as in `tokens`. If
            empty, the model has no token types.
        norm: The module of the layer norm on the sum of the embeddings, or several modules. If
            empty, the model has no such norm.
        widen: The module of the linear layer that widens the embeddings (`embedding_width`), or
            several modules. If empty, the model has no such linear layer.
        bias: The module of T5's table of position biases, or several modules. If empty, the model
            has no such table.
        per_layer: The part that the names of three modules share, which make the further inputs of
            all layers (Gemma 3n). If empty, layers have no further inputs.
        may_lack: Which tensors may be missing in a file, as the ends of the paths of their
            parameters.
        start: The position of the first token, a number or the name of an entry. If `start` is the
            name of an entry, the entry has the id of padding, and the first position is this id +
            1. Padding has the position before the first one. If the id of padding is not known,
            padding is counted like tokens.
        sinusoids: The scheme of sinusoidal positions. `start` and the id of padding are filled in
            from the field `start`. If None, the model has no sinusoidal positions.
        scale: The scale of the token vectors: True for the square root of their width, False for 1,
            a number, or the name of the entry that has the scale.
        rotary: The layout of rotary embeddings, as `apply_rotary` takes it, or the name of the
            entry that says whether pairs of channels are interleaved. If empty, no layer has rotary
            embeddings.
        kinds: The kinds of the layers: one kind for all layers, or two kinds. If config.json has a
            list of kinds, the list counts. Otherwise, config.json and `phase` say which layers are
            of the second kind. If empty, the kinds are not known.
        phase: The index of the first layer of the second kind, if every nth layer is of the second
            kind. -1 means the nth layer itself. For example, if n is 3, layers 2, 5, 8 and so on
            are of the second kind.
        rotates: Which layers use rotary embeddings. If SLIDING, only layers with a sliding window
            use them. If WINDOWLESS, only layers with a sliding window use them, but in a model
            without a window, all layers use them. If empty, all layers use them.
        is_causal: Whether a token sees only itself and the tokens before it.
        image_blocks: Which tokens of the same image a token sees: pairs (kind of layer, ANYWHERE or
            IN_WINDOW). `Layer.image_blocks` says what the two words mean.
        has_vision_switch: Whether `image_blocks` applies only if the entry
            `use_bidirectional_attention` is "vision".
        sections: Which pairs of channels are rotated by time, height and width. If CONSECUTIVE, the
            pairs of each of the three follow each other. If IN_TURNS, the three take turns. If
            empty, tokens have one position.
        attention: How attention scales logits. If HEAD_DIM, logits are divided by the root of the
            head size. If QUERY_SCALAR, logits are divided by the root of the entry
            `query_pre_attn_scalar`. If MULTIPLIER, logits are multiplied by the entry
            `attention_multiplier`. If MULTIPLIER_OR_HEAD_DIM, a file without this entry scales as
            HEAD_DIM. If UNSCALED, logits stay as they are. If empty, the scale is not known.
        has_sinks: Whether attention has a learned sink for each head.
        has_alpha: Whether a rotary scaling of type "dynamic" may have the entry `alpha`, which
            `NTKScaling` takes.
        has_alibi: Whether the model adds `alibi_bias` to the attention logits.
        entries: Entries of config.json that this type reads, each with the value that counts if
            config.json leaves the entry out. The method `names_of_entries` lists all entries that
            the type reads. Some of these are left out here: an entry that all types with the same
            part of a layer read, if the entry has its usual default, and an entry that another
            field of this record names.
        unread: Entries that types with the same parts read, but this type ignores. These entries
            have their defaults.
        no_effect: Entries that change nothing in models of this type, although they have an effect
            in other types.
        aliases: The names that an entry has only in this type, as "entry: names". If config.json
            has several names of the entry, these names count first.
        head: The modules that may be the output layer. The first module that is in the file counts.
        has_conv1d: Whether the weights of linear layers are stored as [in, out], as in GPT-2.
        no_output: Why an `OutputConfig` cannot describe the output layer of this type. If empty, an
            `OutputConfig` describes it.

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
        """Returns a copy of this type with changed fields, or changed defaults of entries.

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
        for names in self.names_of_entries().values():
            if entry in names:
                return EntryStatus.READ
        has_no_effect = self.has_no_effect(entry) or changes_nothing(value)
        if has_no_effect or self._says_nothing(entry, value):
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
        names_by_parameter = {}
        may_lack = (*self.may_lack.split(), OUTPUT_TABLE, OUTPUT_BIAS)
        # For each parameter, `part` is the field of this type that has the modules, and `ends` are
        # the possible ends of the tensor's name, such as "{}.weight".
        for parameter, (part, ends) in TENSORS.items():
            modules = getattr(self, part).format(stack=stack).split()
            prefixes = outer_prefixes(prefix) if part == "head" else [prefix]
            names_in_files = []
            for start in prefixes:
                for module in modules:
                    for end in ends.split():
                        name = start + end.format(module)
                        if name in files:
                            names_in_files.append(name)
            if names_in_files:
                names_by_parameter[parameter] = names_in_files[0]
            elif modules and not parameter.endswith(may_lack):
                return {}
        return names_by_parameter


def outer_prefixes(prefix: str) -> list[str]:
    """Returns a prefix and the shorter ones: ["a.b.", "a.", ""] for "a.b."."""
    prefixes = [prefix]
    while prefix:
        # Takes the last module away: "a.b." becomes "a.", and "a." becomes "".
        outer, dot, _ = prefix.removesuffix(".").rpartition(".")
        prefix = outer + dot
        prefixes.append(prefix)
    return prefixes
