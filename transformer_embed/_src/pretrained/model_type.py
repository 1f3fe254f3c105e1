"""`ModelType`: all that is known of one type of published models, such as "llama"."""

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from transformer_embed._src.positions.schemes import Sinusoidal
from transformer_embed._src.pretrained.entries import (
    ALIASES,
    ENTRIES,
    ENTRY_DEFAULTS,
    ENTRY_OF_NAME,
)
from transformer_embed._src.pretrained.known_entries import (
    UNREAD_IN_ROTATIONS,
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
# A value of `ModelType.rotates`: only sliding layers rotate, but if the model has no sliding
# window, all layers rotate.
SLIDING_OR_ALL = "sliding or all"
# Values of `ModelType.sections`. With six channel pairs and equal sections, the pairs belong to
# time, time, height, height, width and width (CONSECUTIVE), or to time, height, width, time, height
# and width (IN_TURNS).
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

    A module is a part of the model, such as a table or a norm. The name of a module is the name of
    its tensor without ".weight", and without the prefix that all names of the checkpoint share. For
    example, "embed_tokens" is the module of the tensor "model.embed_tokens.weight". A field such as
    `tokens` is a string, which may list several modules with spaces between them. The first of
    these modules that is in the file is used. For example, "embed_tokens embed" means
    "embed_tokens" if the file has it, and otherwise "embed". In the name of a module, "{stack}"
    stands for "encoder" or "decoder".

    Args:
        name: The type, as config.json's `model_type` names it.
        tokens: The names that the module of the token table may have, such as "embed_tokens embed".
            The first name that is in the file is used.
        positions: The names that the table of learned positions may have. If empty, the model has
            no table of positions.
        token_types: The names that the table of token types may have. If empty, the model has no
            token types.
        norm: The names that the layer norm on the sum of the embeddings may have. If empty, the
            model has no such norm.
        widen: The names that the linear layer after the token table may have. This layer changes
            the width of the embeddings from `embedding_width` to `d_model`. If empty, the model has
            no such layer.
        bias: The names that T5's table of position biases may have. If empty, the model has no such
            table.
        per_layer: Which modules compute extra vectors of the tokens, one for each layer (Gemma 3n
            and 4). A layer gets its extra vectors in addition to the hidden vectors of the layer
            before. If "per_layer", these are the modules "embed_tokens_per_layer",
            "per_layer_model_projection" and "per_layer_projection_norm". If empty, layers get no
            extra vectors.
        may_lack: The parameters that may have no tensor in a file. Each parameter is named by the
            end of its path, such as "layer_norm/offset". `may_lack` is one string, with spaces
            between the names.
        start: The position of the first token. This is either a number, or the name of the
            config.json entry that holds the id of padding, such as "pad_token_id". With such a
            name, the position of the first token is the id of padding plus 1. For example, the id
            of padding is 1 in RoBERTa, so the first token has position 2. All padding has the
            position before the first token, here 1. If the id of padding is not known, padding is
            counted like tokens.
        sinusoids: The scheme of sinusoidal positions. If None, the model has no sinusoidal
            positions. Leave the fields `start`, `at_padding` and `pad_id` of the scheme at their
            defaults: `load_embedder` sets them, from `ModelType.start` and from the id of padding
            in config.json.
        scale: The factor of the token vectors. If True, the factor is the square root of the width
            of the vectors. If False, the factor is 1. `scale` may also be the factor itself, or the
            name of an entry of config.json that holds True, False or the factor, such as
            "scale_embedding".
        rotary: The layout of rotary embeddings, "half" or "interleaved", as `apply_rotary` takes
            it. `rotary` may also be the name of the config.json entry that chooses the layout: true
            means "interleaved", and false means "half". If `rotary` is the empty string, no layer
            has rotary embeddings.
        kinds: The kinds of the layers: one kind for all layers, or two kinds, such as
            ("sliding_attention", "full_attention"). If config.json lists the kind of each layer,
            the list of config.json is used instead of `kinds`. Without that list, some layers have
            the second of the two kinds, and all others have the first. For example, if config.json
            has the entry `sliding_window_pattern` = 6, every sixth layer has the second kind. The
            field `phase` says which of the first six layers has it. If `kinds` is empty, the kinds
            of the layers are known only from a list in config.json.
        phase: In some models, every nth layer has the second of the two `kinds`. `phase` is the
            index of the first such layer. For example, with n = 3 and `phase` = 0, the layers 0, 3,
            6 and so on have the second kind. The index -1 means layer n - 1. So with n = 3 and
            `phase` = -1, the first of these layers is layer 2, and the layers 2, 5, 8 and so on
            have the second kind.
        rotates: Which layers use rotary embeddings. If empty, all layers use them, except kinds
            that never rotate, such as "linear_attention". If "sliding_attention", only the layers
            with a sliding window use them. If "sliding or all", it depends on the checkpoint: in a
            model with a sliding window, only the layers with the window use them, and in a model
            without a window, all layers do.
        is_causal: Whether a token sees only itself and the tokens before it.
        image_blocks: The kinds of layers in which a token of an image also sees later tokens of
            this image. The field is a tuple of pairs (kind of layers, value of
            `Layer.image_blocks`), and the value says how far the token sees. For example,
            (("full_attention", "anywhere"),) says that in layers with full attention, a token sees
            all tokens of its image. In layers of all other kinds, images are masked like text.
        has_vision_switch: Whether `image_blocks` applies only if the config.json entry
            `use_bidirectional_attention` is "vision".
        sections: Which pairs of channels are rotated by time, height and width. If "consecutive",
            the first pairs are rotated by time, the next ones by height, and the last ones by
            width. If "in turns", the first pair is rotated by time, the second by height, the third
            by width, the fourth by time again, and so on. If empty, each token has a single
            position, which rotates all pairs.
        attention: How attention scales logits. If "head_dim", logits are divided by the square root
            of the head size. If "query_pre_attn_scalar", logits are divided by the square root of
            the config.json entry of this name. If "attention_multiplier", logits are multiplied by
            the config.json entry of this name. If "attention_multiplier or head_dim", logits are
            multiplied by the entry `attention_multiplier` if config.json has it, and otherwise
            divided by the square root of the head size. If "unscaled", logits stay as they are. If
            empty, the scale is not known.
        has_sinks: Whether attention has a learned sink for each head, a number that the softmax
            takes as one more logit.
        has_alpha: Whether a rotary scaling of type "dynamic" may have the entry `alpha`, which
            `NTKScaling` takes.
        has_alibi: Whether the model adds `alibi_bias` to the attention logits.
        entries: Some of the entries of config.json that this type reads, as a dict {name: default}.
            If config.json leaves an entry out, the default is used. The type also reads the entries
            that other fields stand for. For example, every type with rotary embeddings (the field
            `rotary`) reads the entry `rope_theta`. Such an entry is in the dict only if the default
            is not the usual one, which is 10000 for `rope_theta`. Entries that are named by the
            field `start`, `scale` or `rotary` are not in the dict. The method `names_of_entries`
            returns all entries that the type reads.
        unread: Entries of config.json that this model type does not read, although similar model
            types do. This package always uses the default value of such an entry. If config.json
            has the entry, its value is ignored or raises an error (see the method `status`).
            `unread` is one string, with spaces between the names.
        no_effect: Entries of config.json that change nothing in models of this type. In models of
            other types, the same entries have an effect. `no_effect` may also contain the name of a
            module. The tensors of this module then have no effect. `no_effect` is one string, with
            spaces between the names.
        aliases: Other names for one entry of config.json, used only for this model type. The string
            has the name of the entry, a colon, and the other names. For example, the text
            "logit_scale: lm_head_multiplier logits_scaling" says that the entry `logit_scale` may
            also be called `lm_head_multiplier` or `logits_scaling`. Other names are looked up
            before the name of the entry. So here, `lm_head_multiplier` is used if config.json has
            it, or else `logits_scaling`, or else `logit_scale`. If `aliases` is empty, this model
            type adds no other names.
        head: The names that the module of the output layer may have. The first name that is in the
            file is used.
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
        """Returns the entries that this type reads, each with the names that it may have in a file.

        This package has one name for each entry of config.json, such as "hidden_size". Files of
        some models have another name for the entry, such as "n_embd". So the result is a dict {name
        of the entry in this package: all names of the entry}, such as {"hidden_size":
        ("hidden_size", "n_embd")}. If a file has several names of an entry, the first one in the
        tuple is used. The tuple begins with the names in the field `aliases`. Then comes the name
        in this package, and then the other names that any model may use.
        """
        # `start`, `scale` and `rotary` may hold the name of an entry. If they hold a number or a
        # layout, the loop over `ENTRIES` below leaves it out.
        entries_read = {self.start, self.scale, self.rotary, *self.entries}
        for field_or_entry, further_entries in READS.items():
            has_field = bool(getattr(self, field_or_entry, None))
            if has_field or field_or_entry in self.entries:
                entries_read |= {*further_entries.split()}
        entries_read -= {*self.unread.split()}
        # `aliases` is empty, or such as "logit_scale: lm_head_multiplier logits_scaling".
        entry_with_aliases, _, aliases_of_type = self.aliases.partition(": ")
        names = {}
        # The result has the order of `ENTRIES`, so that messages have a fixed order.
        for entry in ENTRIES:
            if entry in entries_read:
                first_names = aliases_of_type.split() if entry == entry_with_aliases else []
                last_names = ALIASES.get(entry, "").split()
                names[entry] = (*first_names, entry, *last_names)
        return names

    def has_no_effect(self, entry: str) -> bool:
        """Returns whether this type says, in `no_effect`, that an entry changes nothing.

        An entry inside an object is named after the object, such as "rope_scaling: interleaved".
        """
        _, _, name = entry.rpartition(" ")
        return name in self.no_effect.split()

    def status(self, entry: str, value: Any) -> EntryStatus:
        """Returns whether this type reads an entry. If not, returns what is known of the entry.

        The result is one of four values:

        - `READ`: the type reads the entry.
        - `OF_NO_CONCERN`: the entry changes neither the input layer nor the output layer.
        - `REFUSED`: the entry may change the input or the output layer, but this package does not
          know how. So `load_embedder` raises an error.
        - `UNKNOWN`: the entry is in no list of this package. So `load_embedder` warns.

        Args:
            entry: The name of the entry in config.json. An entry inside an object is named after
                the object, such as "rope_scaling: beta".
            value: The value of the entry.
        """
        # The names that files have for each entry that the type reads.
        for names in self.names_of_entries().values():
            if entry in names:
                return EntryStatus.READ
        # A value such as null or false switches its entry off, in any type.
        if changes_nothing(value):
            return EntryStatus.OF_NO_CONCERN
        if self.has_no_effect(entry) or self._adds_nothing(entry, value):
            return EntryStatus.OF_NO_CONCERN
        if self._is_refused(entry):
            return EntryStatus.REFUSED
        return EntryStatus.OF_NO_CONCERN if is_known(entry) else EntryStatus.UNKNOWN

    def _adds_nothing(self, entry: str, value: Any) -> bool:
        """Returns whether an entry adds nothing to what is known of all models of this type.

        There are three cases, with these examples:
            - "rope_scaling: finetuned", which transformers does not read.
            - "position_embedding_type": "rope", if all models of this type rotate heads.
            - "rope_local_base_freq", which is about layers with a window, if no model of this type
              has such layers.
        """
        # An entry inside the object of a rotation is named "rope_scaling: beta".
        object_name, _, name_in_object = entry.rpartition(": ")
        if object_name:
            return name_in_object in UNREAD_IN_ROTATIONS
        name = ENTRY_OF_NAME.get(entry, entry)
        if name == "position_embedding_type":
            type_rotates = self.rotary != ""
            return type_rotates and value == "rope"
        if name not in ENTRIES or not ENTRIES[name].only_with:
            return False
        # This type ignores the entry, unless it reads the entry that this one belongs to.
        return ENTRIES[name].only_with not in self.names_of_entries()

    def _is_refused(self, entry: str) -> bool:
        """Returns whether an entry that is not read may change the input or the output layer."""
        is_in_object = ": " in entry
        if is_in_object:
            # The entry "rope_scaling: beta" is `beta` in the object `rope_scaling`. All objects
            # whose entries have such names are about rotations, so the entry may change a rotation.
            return True
        # The epsilon is about norms, which all models have. It concerns the input layer only if
        # the input layer has a norm. (`ENTRY_OF_NAME` has the entry of each name that files use.)
        if ENTRY_OF_NAME.get(entry) == "layer_norm_eps":
            return self.norm != ""
        return is_loud(entry)

    def tensors(self, files: Collection[str], stack: str, prefix: str) -> dict[str, str]:
        """Returns the name of each parameter's tensor, by the path of the parameter.

        For example, the path "transformer_embedding/~/token_embedding/embeddings" has the name
        "model.embed_tokens.weight". The result is {} if a tensor that this type needs is missing.

        Args:
            files: The names of all tensors in the checkpoint.
            stack: The stack that is read, "encoder" or "decoder".
            prefix: How the names of the input layer's tensors begin, such as
                "model.language_model.". The output layer may be outside of the module that has the
                input layer, as in some models for images. So the names of the output layer's
                tensors may begin with a shorter prefix, here "model." or "".
        """
        names_by_parameter = {}
        # The ends of the paths of parameters that may have no tensor.
        may_lack = (*self.may_lack.split(), OUTPUT_TABLE, OUTPUT_BIAS)
        # For each parameter, `TENSORS` has two texts. `field` is the field of this type that has
        # the modules, such as "norm". `patterns` are the names that the parameter's tensor may have
        # in a module {}, such as "{}.weight {}.gamma".
        for parameter, (field, patterns) in TENSORS.items():
            # The field has module names with spaces between them, such as "{stack}.norm ln_f".
            modules = getattr(self, field).format(stack=stack).split()
            prefixes = outer_prefixes(prefix) if field == "head" else [prefix]
            name = _first_name_in(files, prefixes, modules, patterns.split())
            is_needed = modules != [] and not parameter.endswith(may_lack)
            if name is not None:
                names_by_parameter[parameter] = name
            elif is_needed:
                return {}
        return names_by_parameter


def _first_name_in(
    files: Collection[str],
    prefixes: Sequence[str],
    modules: Sequence[str],
    patterns: Sequence[str],
) -> str | None:
    """Returns the first of a tensor's possible names that is in the files, or None.

    The prefix "model.", the module "norm" and the patterns "{}.weight" and "{}.gamma" make the
    names "model.norm.weight" and "model.norm.gamma".
    """
    for prefix in prefixes:
        for module in modules:
            for pattern in patterns:
                name = prefix + pattern.format(module)
                if name in files:
                    return name
    return None


def ends_with_parts(name: str, end: str) -> bool:
    """Returns whether a tensor's name ends with whole parts, which dots separate.

    "model.wte.weight" and "wte.weight" end with "wte.weight", but "model.my_wte.weight" does not.
    """
    return f".{name}".endswith(f".{end}")


def outer_prefixes(prefix: str) -> list[str]:
    """Returns a prefix and the shorter ones: ["a.b.", "a.", ""] for "a.b."."""
    prefixes = [prefix]
    while prefix:
        # Takes the last module away: "a.b." becomes "a.", and "a." becomes "".
        outer, dot, _ = prefix.removesuffix(".").rpartition(".")
        prefix = outer + dot
        prefixes.append(prefix)
    return prefixes
