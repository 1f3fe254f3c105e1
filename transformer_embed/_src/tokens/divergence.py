"""The divergence between the predictions of two output layers, for distillation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.tokens.chunks import Loss, Value
from transformer_embed._src.tokens.losses import Pair, compute
from transformer_embed._src.tokens.output_layer import OutputLayer, as_output_layer
from transformer_embed._src.tokens.output_split import OutputSplit
from transformer_embed._src.tokens.row_logits import ChunkLogits

KINDS = ("forward", "reverse", "js")


def linear_divergence(
    x: ArrayLike,
    output: OutputLayer | ArrayLike,
    teacher_x: ArrayLike,
    teacher_output: OutputLayer | ArrayLike,
    *,
    kind: str = "forward",
    beta: float | None = None,
    temperature: ArrayLike = 1.0,
    mask: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    shift: int = 0,
    segment_ids: ArrayLike | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Float[Array, "..."]:
    """How far the predictions of a student are from a teacher's, one chunk of tokens at a time.

    For a student with probabilities s and a teacher with t, over one vocabulary:

    - `"forward"`: `sum(t * log(t / s))`, the usual distillation: the student covers all that the
      teacher may say.
    - `"reverse"`: `sum(s * log(s / t))`, for samples of the student: it keeps to what the teacher
      finds likely.
    - `"js"`: Jensen-Shannon, `beta * sum(t * log(t / m)) + (1 - beta) * sum(s * log(s / m))` with
      `m = beta * t + (1 - beta) * s`.

    Logits of a large batch never exist, of neither layer. No divergence is multiplied by the
    square of the temperature. Near equality it is accurate to 1e-9, where differences of
    `log_softmax` are off by 2e-7.

    Args:
        x: [..., d], a floating dtype: the student's hidden states.
        output: the student's, as in `linear_cross_entropy`.
        teacher_x: [..., any width]: the teacher's hidden states of the same tokens. They and the
            teacher's layer have gradients too; what is not differentiated costs nothing.
        teacher_output: The teacher's output layer, with the `vocab_size` and the `pad_id` of
            `output`. If one table has more rows than the other (another `row_multiple`), the
            smaller table is copied.
        kind: `"forward"`, `"reverse"` or `"js"`.
        beta: for `"js"`, a Python number above 0 and below 1: the teacher's part of the mixture.
            None: 0.5.
        temperature: above 0; both logits are divided by it. As in `linear_log_probs`.
        mask: as in `linear_cross_entropy`; here it alone says which tokens count, as there are no
            labels. With shift, leave out padding: `ids != pad_id`.
        weights, segment_ids: as in `linear_cross_entropy`.
        shift: as in `linear_cross_entropy`. It only moves mask and weights, since there are no
            labels: those at t belong to the token that predicts the one at t. With
            `reduction="none"`, its divergence is at t too.
        reduction, chunk_size: as in `linear_cross_entropy`.

    Returns:
        A scalar, or with `reduction="none"` an array [...], as `linear_cross_entropy` does.
        Infinite where the other layer bans an id that may be predicted; the gradients there are
        finite.

    Raises:
        TypeError: as for `linear_cross_entropy`.
        ValueError: as for `linear_cross_entropy`; vocabularies of other sizes, other `pad_id`s, or
            tables whose rows are split over other mesh axes; beta without `kind="js"`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> student, teacher = jnp.array([[0.0], [1.0]]), jnp.array([[0.0, 1.0], [1.0, 1.0]])
        >>> x, teacher_x = jnp.ones([5, 1]), jnp.ones([5, 2])
        >>> def loss(x):
        ...     return te.linear_divergence(x, student, teacher_x, teacher, kind="reverse")
        >>> print(loss(x), loss(2 * x).round(2))  # the first predicts as the teacher
        0.0 0.07

    Source:
        Hinton et al., "Distilling the Knowledge in a Neural Network" (2015),
        https://arxiv.org/abs/1503.02531; Agarwal et al., "On-Policy Distillation of Language
        Models" (2024), section 2, https://arxiv.org/abs/2306.13649
    """
    student, teacher = layers = (
        as_output_layer(x, output),
        as_output_layer(teacher_x, teacher_output, "teacher_"),
    )
    arguments.check_same("teacher_x", "x's tokens", teacher[0].shape[:-1], student[0].shape[:-1])
    if teacher[1].size != student[1].size:
        advice = "give te.OutputLayer a vocab_size, if its table has padding rows"
        want = f"output's vocab_size, {student[1].size} ({advice})"
        raise arguments.value_error("teacher_output", want, teacher[1].size)
    arguments.check_same("teacher_output", "output's pad_id", teacher[1].pad_id, student[1].pad_id)
    if arguments.choice("kind", kind, KINDS) != "js":
        arguments.check_left_out("beta", beta, "kind is not 'js'")
    beta = 0.5 if beta is None else arguments.part("beta", beta)
    layers = _with_equal_row_counts(layers)
    loss = Divergence(shift=shift, chunk_size=chunk_size, reduction=reduction, kind=kind, beta=beta)
    tokens = {"mask": mask, "weights": weights, "segment_ids": segment_ids}
    return compute(loss, layers, temperature=temperature, **tokens)


def _with_equal_row_counts(layers: tuple[Pair, Pair]) -> tuple[Pair, ...]:
    """Adds rows of zeros to the smaller of two tables, which then split alike over devices."""
    row_counts = [output.row_count for _, output in layers]
    if row_counts[0] == row_counts[1]:
        return layers

    def with_padding_rows(x: Array, output: OutputLayer) -> Pair:
        added_rows = max(row_counts) - output.row_count
        table_padding = [(0, 0), (0, 0)]
        table_padding[output.vocab_axis] = (0, added_rows)
        table = jnp.pad(output.table, table_padding)
        bias = output.bias if output.bias is None else jnp.pad(output.bias, (0, added_rows))
        # The vocab_size is given, so the added rows are never predicted.
        return x, dataclasses.replace(output, table=table, bias=bias, vocab_size=output.size)

    return tuple(with_padding_rows(x, output) for x, output in layers)


@dataclasses.dataclass(frozen=True)
class Divergence(Loss):
    """The divergence of a token's predictions by two layers, the student's and the teacher's."""

    kind: str = "forward"
    beta: float = 0.5

    def values_from_logits(self, split, logits, labels, settings) -> tuple[Value, ...]:
        """Computes the divergences.

        All are sums of `a * (exp(w) - 1 - w)`, with `w = log(b / a)`, over probabilities a and b:
        the parts `b - a` sum to 0, and make each term at least 0.
        """
        student, teacher, ratios = _probabilities(split, *logits)
        kl = functools.partial(_kullback_leibler, split)
        if self.kind == "forward":
            values, of_teacher, of_student = kl(teacher, student, ratios)
        elif self.kind == "reverse":
            values, of_student, of_teacher = kl(student, teacher, -ratios)
        else:
            beta = self.beta
            mixture, over_student, over_teacher = _mixture(student, teacher, ratios, beta)
            # Their derivatives in the mixture sum to 0.
            from_teacher, of_teacher, _ = kl(teacher, mixture, over_teacher)
            from_student, of_student, _ = kl(student, mixture, over_student)
            values = beta * from_teacher + (1 - beta) * from_student
            of_student, of_teacher = (1 - beta) * of_student, beta * of_teacher
        return (Value(values=values, slopes=(of_student, of_teacher)),)


def _probabilities(
    split: OutputSplit, student: ChunkLogits, teacher: ChunkLogits
) -> tuple[Array, Array, Array]:
    """Those of both layers, and the logarithms of their ratio: 0 where both are 0."""
    of_student, of_teacher = jnp.exp(student.shifted), jnp.exp(teacher.shifted)
    *totals, difference = split.total((of_student, of_teacher, of_student - of_teacher))
    # Where the sums are alike, their difference is more accurate than they are.
    is_near = jnp.abs(difference) < totals[1] / 2
    near = jnp.log1p(jnp.where(is_near, difference / totals[1], 0))
    log_ratio = jnp.where(is_near, near, jnp.log(totals[0]) - jnp.log(totals[1]))

    def divided():
        return of_student / totals[0], of_teacher / totals[1]

    def computed_again():
        # A GPU would write the exponentials and read them again, which takes longer.
        return tuple(
            jnp.exp(each.shifted - jnp.log(total))
            for each, total in zip((student, teacher), totals, strict=True)
        )

    of_student, of_teacher = jax.lax.platform_dependent(cpu=divided, default=computed_again)
    # Where both are 0, so is the ratio. (Not as a constant, here and below: jax would take [t, r]
    # of them out of the loop.)
    is_none = (of_student == 0) & (of_teacher == 0)
    # Not minus infinity minus itself, which jax_debug_nans would see with jax_disable_jit.
    of_both = student.shifted - jnp.where(is_none, of_student, teacher.shifted)
    ratios = jnp.where(is_none, of_student, of_both - log_ratio)
    return of_student, of_teacher, ratios


def _mixture(
    student: Float[Array, "t r"], teacher: Float[Array, "t r"], ratios: Array, beta: float
) -> tuple[Array, Array, Array]:
    """The probabilities of the mixture, and the logarithms of its ratio to both.

    It is reached from the larger of the two: nothing is lost where both are alike.
    """
    is_larger = ratios > 0
    larger = jnp.where(is_larger, student, teacher)
    change = jnp.where(is_larger, beta * (teacher - student), (1 - beta) * (student - teacher))
    over_larger = jnp.log1p(change / jnp.where(larger == 0, 1, larger))
    over_student = jnp.where(is_larger, over_larger, over_larger - ratios)
    over_teacher = jnp.where(is_larger, over_larger + ratios, over_larger)
    return larger + change, over_student, over_teacher


def _kullback_leibler(
    split: OutputSplit, a: Float[Array, "t r"], b: Float[Array, "t r"], w: Float[Array, "t r"]
) -> tuple[Float[Array, "t 1"], Array, Array]:
    """The sums of `a * log(a / b)` where w is `log(b / a)`, and the gradients in the logits."""
    is_small = w < 1
    small = jnp.where(is_small, w, a)
    large = jnp.where(is_small | (a == 0), a, w)
    # `a * (exp(w) - 1 - w)`, at least 0.
    terms = jnp.where(is_small, a * (jnp.expm1(small) - small), b - a * (1 + large))
    values = split.total(jnp.where(a == 0, b, terms))
    # 0 where a is, whatever w; and where the sum is infinite.
    is_infinite = jnp.isposinf(values)
    of_a = a * (jnp.where(a == 0, a, -w) - jnp.where(is_infinite, 0, values))
    return values, jnp.where(is_infinite, b - b, of_a), b - a
