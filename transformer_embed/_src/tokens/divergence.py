"""Computes the divergence between the predictions of two output layers, for distillation.

Shapes are written with these letters:

    t  tokens of a chunk
    v  table rows on this device
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_embed._src import arguments
from transformer_embed._src.array_types import ArrayLike
from transformer_embed._src.tokens.loss_arithmetic import Loss, TokenValues
from transformer_embed._src.tokens.losses import compute
from transformer_embed._src.tokens.output_layer import OutputLayer, Pair, as_output_layer
from transformer_embed._src.tokens.output_split import OutputSplit
from transformer_embed._src.tokens.row_logits import ChunkLogits
from transformer_embed._src.tokens.token_data import TokenSettings

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
    """Computes the divergence of a student's predictions from a teacher's predictions.

    Use it to distil a teacher into a student. Both models must have the same vocabulary. Like
    `linear_cross_entropy`, the function computes logits for one chunk of tokens at a time, here of
    both models, so you save memory with a large batch.

    Let s be the probabilities of the student and t the probabilities of the teacher. The divergence
    of a token is a sum over the ids. You choose the formula by `kind`:

    - `"forward"`: `sum(t * log(t / s))`, for the probabilities t of the teacher and s of the
      student. This is the usual distillation: the student learns to give probability to every id
      that the teacher may predict.
    - `"reverse"`: `sum(s * log(s / t))`, for text that the student sampled. The student learns to
      predict only ids that the teacher finds probable.
    - `"js"`: the Jensen-Shannon divergence, which compares the probabilities t of the teacher and s
      of the student with the mixture `m = beta * t + (1 - beta) * s`. With
      `kl(p, q) = sum(p * log(p / q))`, it is `beta * kl(t, m) + (1 - beta) * kl(s, m)`.

    Args:
        x: The student's hidden vectors of the last layer, of a floating dtype. Shape [..., d].
        output: The student's output layer. Pass an `OutputLayer`, for example from
            `Embedder.output`, or the table [vocab_size, d] of a layer that has only a table.
        teacher_x: The teacher's hidden vectors of the same tokens, of a floating dtype. Shape [...,
            width], with any width. You can also differentiate with respect to `teacher_x` and
            `teacher_output`. These gradients cost time only if you ask for them.
        teacher_output: The teacher's output layer, with the same `vocab_size` and `pad_id` as
            `output`. The two tables may differ in the number of rows, because of `row_multiple` in
            a config. Rows of zeros are then added to a copy of the smaller table.
        kind: `"forward"`, `"reverse"` or `"js"`.
        beta: The share of the teacher in the mixture `m = beta * t + (1 - beta) * s`, where t are
            the teacher's probabilities and s the student's. A Python number above 0 and below 1.
            Set it only for `"js"`. If None, the share is 0.5.
        temperature: The number that divides the logits of both layers, above 0 and at most 1e36.
            Pass a number, or a floating array that broadcasts to the tokens, such as [batch, 1]. An
            array may be traced and gets a gradient. The result is not multiplied by
            `temperature**2`. If you want this factor of Hinton et al., multiply the result by
            `temperature**2`.
        mask: Which tokens are counted. Bools that broadcast to the tokens, True = counted. There
            are no labels here, so only the mask can leave out padding. For example, pass
            `ids != pad_id`, even with `shift`. If None, all tokens are counted.
        weights: A factor for each token's divergence between student and teacher. Floats that
            broadcast to the tokens. Set it if some tokens matter more than others. If None, all
            factors are 1.
        shift: How many tokens ahead each token predicts, a Python int. Pass 1 (or True) for a
            language model. Then `x[..., t - 1, :]` predicts token t. Entry t of the mask and the
            weights belongs to this prediction, so you can pass the same mask and weights as for
            `linear_cross_entropy`. With `reduction="none"`, entry t of the result is the divergence
            of this prediction.
        segment_ids: The number of the document that each token belongs to. Integers of shape
            [length], or of a shape that broadcasts to the tokens. If a batch row holds several
            documents and you set `shift`, pass `segment_ids` of your `TokenPositions`. Then a
            prediction of the first token of a document is not counted. 0 is padding. If None, each
            batch row is one document.
        reduction: How the divergences are joined. `"mean"` divides the sum of the divergences by
            the sum of the weights of the counted tokens. `"sum"` returns the sum. `"none"` returns
            the divergence of each token, times the weight of the token.
        chunk_size: The largest number of tokens in a chunk, the part of the batch whose logits are
            held at once. Set a smaller number to save memory. If None, a number is chosen as in
            `linear_cross_entropy`, for the logits of the student and the teacher together.

    Returns:
        The divergence, a scalar in float32, or in float64 if one of the arrays x, `teacher_x` and
        the tables is float64. With `reduction="none"`, an array in the shape of the tokens. If the
        student and the teacher predict nearly the same, the rounding error of the divergence is at
        most 1e-9. (If you computed the divergence from two results of `jax.nn.log_softmax`, the
        error would be 2e-7.)

    Raises:
        TypeError: An argument has a wrong type or dtype. You call the function inside the loss of
            `te.rows.value_and_grad`, with an output layer whose table is trained by rows. (Inside
            that loss, only some rows of the table are known, but the logits need all rows.)
        ValueError: The layers differ in `vocab_size` or in `pad_id`, or different mesh axes split
            the rows of the two tables. An argument is out of its range, or the shapes of the
            arguments do not fit. `beta` is passed without `kind="js"`, or `segment_ids` without
            `shift`. A size of `x` is symbolic (see `jax.export`). The columns of a table are split
            over n devices, and n does not divide the number of rows. (To compute logits, each of
            these devices takes 1/n of the rows, with all columns. A config with `row_multiple=n`
            makes the number of rows a multiple of n.)

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import transformer_embed as te
        >>> student, teacher = jnp.array([[0.0], [1.0]]), jnp.array([[0.0, 1.0], [1.0, 1.0]])
        >>> x, teacher_x = jnp.ones([5, 1]), jnp.ones([5, 2])
        >>> def loss(x):
        ...     return te.linear_divergence(x, student, teacher_x, teacher, kind="reverse")
        >>> print(loss(x), loss(2 * x).round(2))  # the first predicts as the teacher
        0.0 0.07

    Edge cases:
        - A bias of -inf bans an id. If only one of the two layers bans an id, some divergences are
          infinite. For example, `"forward"` is infinite if the student bans an id that the teacher
          may predict. The gradients stay finite.
        - If a layer bans every id, the divergence has no meaning, and may be NaN.

    Source:
        Distillation is from Hinton et al., "Distilling the Knowledge in a Neural Network" (2015),
        https://arxiv.org/abs/1503.02531. The three divergences are compared by Agarwal et al.,
        "On-Policy Distillation of Language Models" (2024), section 2,
        https://arxiv.org/abs/2306.13649
    """
    # Pairs of x and an `OutputLayer`, checked.
    student = as_output_layer(x, output)
    teacher = as_output_layer(teacher_x, teacher_output, "teacher_")
    _check_pairs(student, teacher)
    if arguments.choice("kind", kind, KINDS) != "js":
        arguments.check_left_out("beta", beta, "kind is not 'js'")
    beta = 0.5 if beta is None else arguments.share("beta", beta)
    loss = Divergence(shift=shift, chunk_size=chunk_size, reduction=reduction, kind=kind, beta=beta)
    return compute(
        loss,
        _with_equal_row_counts(student, teacher),
        temperature=temperature,
        mask=mask,
        weights=weights,
        segment_ids=segment_ids,
    )


def _check_pairs(student: Pair, teacher: Pair) -> None:
    """Raises an error unless both layers predict the same ids for the same tokens."""
    token_shape = student.x.shape[:-1]
    arguments.check_same("teacher_x", "x's tokens", teacher.x.shape[:-1], token_shape)
    vocab_size = student.output.size
    if teacher.output.size != vocab_size:
        advice = "give te.OutputLayer a vocab_size, if its table has padding rows"
        want = f"output's vocab_size, {vocab_size} ({advice})"
        raise arguments.value_error("teacher_output", want, teacher.output.size)
    pad_id = student.output.pad_id
    arguments.check_same("teacher_output", "output's pad_id", teacher.output.pad_id, pad_id)


def _with_equal_row_counts(student: Pair, teacher: Pair) -> tuple[Pair, Pair]:
    """Adds rows of zeros to the smaller of two tables, so that devices split both alike."""
    student_count = student.output.row_count
    teacher_count = teacher.output.row_count
    if student_count == teacher_count:
        return student, teacher
    row_count = max(student_count, teacher_count)
    return _with_row_count(student, row_count), _with_row_count(teacher, row_count)


def _with_row_count(pair: Pair, row_count: int) -> Pair:
    """Adds rows of zeros to the end of a table, up to a number of rows."""
    output = pair.output
    added_rows = row_count - output.row_count
    table_padding = [(0, 0), (0, 0)]
    table_padding[output.vocab_axis] = (0, added_rows)
    table = jnp.pad(output.table, table_padding)
    bias = output.bias
    if bias is not None:
        bias = jnp.pad(bias, (0, added_rows))
    # The vocab_size is given, so the added rows are never predicted.
    padded = dataclasses.replace(output, table=table, bias=bias, vocab_size=output.size)
    return pair._replace(output=padded)


@dataclasses.dataclass(frozen=True)
class Divergence(Loss):
    """Computes the divergence between the student's and the teacher's predictions of a token."""

    kind: str = "forward"
    beta: float = 0.5

    def values_from_logits(
        self,
        split: OutputSplit,
        logits: tuple[ChunkLogits, ...],
        labels: Any,
        settings: TokenSettings,
    ) -> tuple[TokenValues, ...]:
        """Computes the divergence of each token, with the gradients for both layers.

        `"forward"` is KL(teacher, student), `"reverse"` is KL(student, teacher), and `"js"` is the
        weighted mean of two divergences from a mixture of both. A divergence has no labels. The
        temperature, its only setting, is in the logits already. The result is a tuple with one
        entry, because other losses return several values, such as a loss and an entropy.
        """
        student_logits, teacher_logits = logits
        probs = _probabilities(split, student_logits, teacher_logits)
        if self.kind == "js":
            return (self._jensen_shannon(split, probs),)
        log_ratio = probs.log_student_over_teacher
        # A divergence KL(p, q) has gradients with respect to the logits of p and of q.
        if self.kind == "forward":
            # p is the teacher, and q is the student.
            divergence = _kullback_leibler(
                split, p=probs.teacher, q=probs.student, log_q_over_p=log_ratio
            )
            student_gradients = divergence.gradients_of_q
            teacher_gradients = divergence.gradients_of_p
        else:
            # p is the student, and q is the teacher.
            divergence = _kullback_leibler(
                split, p=probs.student, q=probs.teacher, log_q_over_p=-log_ratio
            )
            student_gradients = divergence.gradients_of_p
            teacher_gradients = divergence.gradients_of_q
        gradients = (student_gradients, teacher_gradients)
        return (TokenValues(values=divergence.values, undivided_gradients=gradients),)

    def _jensen_shannon(self, split: OutputSplit, probs: "Probabilities") -> TokenValues:
        """Computes the Jensen-Shannon divergence, with the gradients for both layers.

        With `mixture = beta * teacher + (1 - beta) * student`, it is

            beta * KL(teacher, mixture) + (1 - beta) * KL(student, mixture)
        """
        beta = self.beta
        # The mixture `beta * teacher + (1 - beta) * student`, and its ratio to both, as logarithms.
        mixture = _mixture(probs, beta)
        teacher_part = _kullback_leibler(
            split,
            p=probs.teacher,
            q=mixture.probs,
            log_q_over_p=mixture.log_mixture_over_teacher,
        )
        student_part = _kullback_leibler(
            split,
            p=probs.student,
            q=mixture.probs,
            log_q_over_p=mixture.log_mixture_over_student,
        )
        values = beta * teacher_part.values + (1 - beta) * student_part.values
        # Both parts also depend on the logits through the mixture q. But these gradients cancel:
        # `beta * (q - teacher) + (1 - beta) * (q - student)` is `q - q`. So they are left out.
        student_gradients = (1 - beta) * student_part.gradients_of_p
        teacher_gradients = beta * teacher_part.gradients_of_p
        gradients = (student_gradients, teacher_gradients)
        return TokenValues(values=values, undivided_gradients=gradients)


class Probabilities(NamedTuple):
    """Holds the probabilities [t, v] of the ids, as both layers predict them.

    Args:
        student, teacher: The probabilities.
        log_student_over_teacher: `log(student / teacher)`, 0 where both are 0.
    """

    student: Array
    teacher: Array
    log_student_over_teacher: Array


def _probabilities(split: OutputSplit, student: ChunkLogits, teacher: ChunkLogits) -> Probabilities:
    """Computes the probabilities of both layers, and the logarithm of their ratio.

    A probability is `exp(relative_logits) / total`. The total is the sum of these exponentials over
    the vocabulary, which may be split over devices.
    """
    student_exps = jnp.exp(student.relative_logits)
    teacher_exps = jnp.exp(teacher.relative_logits)
    # The logarithm of the ratio needs the student's total minus the teacher's. If the totals are
    # nearly equal, the sum of the differences `exp_differences` is more accurate than the
    # difference of the two sums.
    exp_differences = student_exps - teacher_exps
    sums = split.sum_over_vocabulary((student_exps, teacher_exps, exp_differences))
    student_total, teacher_total, difference_of_totals = sums
    log_ratio_of_totals = _log_ratio_of_totals(student_total, teacher_total, difference_of_totals)

    def from_exponentials():
        """Divides the exponentials, which are known already, by the totals."""
        return student_exps / student_total, teacher_exps / teacher_total

    def from_logits():
        """Computes the exponentials a second time, of `relative_logits - log(total)`."""
        # `from_exponentials` would make a GPU write all exponentials to memory and read them again.
        # To compute the exponentials a second time takes less time.
        student_probs = jnp.exp(student.relative_logits - jnp.log(student_total))
        teacher_probs = jnp.exp(teacher.relative_logits - jnp.log(teacher_total))
        return student_probs, teacher_probs

    student_probs, teacher_probs = jax.lax.platform_dependent(
        cpu=from_exponentials, default=from_logits
    )
    log_ratio = _log_ratio(student, teacher, student_probs, teacher_probs, log_ratio_of_totals)
    return Probabilities(
        student=student_probs, teacher=teacher_probs, log_student_over_teacher=log_ratio
    )


def _log_ratio(
    student: ChunkLogits,
    teacher: ChunkLogits,
    student_probs: Float[Array, "t v"],
    teacher_probs: Float[Array, "t v"],
    log_ratio_of_totals: Float[Array, "t 1"],
) -> Float[Array, "t v"]:
    """Computes `log(student_probs / teacher_probs)`, and 0 where both are 0.

    The logarithm is the difference of the relative logits, minus `log_ratio_of_totals`, which is
    `log(student_total / teacher_total)`.
    """
    are_both_zero = (student_probs == 0) & (teacher_probs == 0)
    # A zero for the ids whose probabilities are both 0, read from one of them. For a constant 0,
    # jax would make an array [t, v], and would keep the array outside of the loop over chunks.
    zeros_where_both = student_probs
    # If both layers ban an id, both relative logits are -inf, and their difference is NaN. The last
    # line replaces this result. But jax_debug_nans with jax_disable_jit stops at any NaN, so the
    # teacher's -inf is replaced too, before the difference.
    teacher_logits = jnp.where(are_both_zero, zeros_where_both, teacher.relative_logits)
    log_ratio = student.relative_logits - teacher_logits - log_ratio_of_totals
    return jnp.where(are_both_zero, zeros_where_both, log_ratio)


def _log_ratio_of_totals(
    student_total: Float[Array, "t 1"],
    teacher_total: Float[Array, "t 1"],
    difference: Float[Array, "t 1"],
) -> Float[Array, "t 1"]:
    """Computes `log(student_total / teacher_total)`, accurately if the totals are nearly equal.

    `difference` is `student_total - teacher_total`, as the sum of the differences of the
    exponentials. This sum is more accurate than a difference of the totals, whose first digits
    would cancel.
    """
    is_near = jnp.abs(difference) < teacher_total / 2
    # Where the totals are not near, log1p gets a 0, because its argument could be -1 or below.
    relative_difference = jnp.where(is_near, difference / teacher_total, 0)
    log_ratio_if_near = jnp.log1p(relative_difference)
    log_ratio_if_far = jnp.log(student_total) - jnp.log(teacher_total)
    return jnp.where(is_near, log_ratio_if_near, log_ratio_if_far)


class Mixture(NamedTuple):
    """Holds the mixture of the student's and the teacher's predictions.

    Args:
        probs: The probabilities of the mixture, [t, v].
        log_mixture_over_student: `log(probs / student)`, [t, v].
        log_mixture_over_teacher: `log(probs / teacher)`, [t, v].
    """

    probs: Array
    log_mixture_over_student: Array
    log_mixture_over_teacher: Array


def _mixture(both: Probabilities, beta: float) -> Mixture:
    """Computes the mixture `beta * teacher + (1 - beta) * student`.

    The mixture is computed as the larger probability plus a change, so no digits are lost where
    both probabilities are nearly equal.
    """
    student = both.student
    teacher = both.teacher
    log_ratio = both.log_student_over_teacher
    is_student_larger = log_ratio > 0
    larger = jnp.where(is_student_larger, student, teacher)
    change = jnp.where(
        is_student_larger, beta * (teacher - student), (1 - beta) * (student - teacher)
    )
    # The derivative of the quotient `change / larger` divides by the square of `larger`. If both
    # probabilities are so tiny that this square would be 0, the divisor is 1.
    is_tiny = larger < jnp.finfo(larger.dtype).tiny ** 0.5
    divisor = jnp.where(is_tiny, 1, larger)
    # With the divisor 1, the ratio of the mixture to `larger` becomes 1. It is then wrong by a
    # factor of 1 / min(beta, 1 - beta) at most. This does not matter, because the terms of such an
    # id in the sum are below 1e-18.
    log_mixture_over_larger = jnp.log1p(change / divisor)
    probs = larger + change
    # The larger probability is the student's or the teacher's. For the other one, the logarithm of
    # student / teacher is subtracted or added: m / student = (m / teacher) / (student / teacher).
    log_mixture_over_student = jnp.where(
        is_student_larger, log_mixture_over_larger, log_mixture_over_larger - log_ratio
    )
    log_mixture_over_teacher = jnp.where(
        is_student_larger, log_mixture_over_larger + log_ratio, log_mixture_over_larger
    )
    return Mixture(
        probs=probs,
        log_mixture_over_student=log_mixture_over_student,
        log_mixture_over_teacher=log_mixture_over_teacher,
    )


class KullbackLeibler(NamedTuple):
    """Holds the Kullback-Leibler divergence KL(p, q) of each token, with the gradients.

    Args:
        values: The sums of `p * log(p / q)`, [t, 1].
        gradients_of_p, gradients_of_q: The gradients with respect to the logits whose softmax is p
            and q, [t, v].
    """

    values: Array
    gradients_of_p: Array
    gradients_of_q: Array


def _kullback_leibler(
    split: OutputSplit,
    *,
    p: Float[Array, "t v"],
    q: Float[Array, "t v"],
    log_q_over_p: Float[Array, "t v"],
) -> KullbackLeibler:
    """Computes KL(p, q), the sum of `p * log(p / q)` over the vocabulary, with the gradients.

    The sum has the term `p * log(p / q) + (q - p)` for each id. The differences `q - p` sum to 0,
    so they do not change the sum. With them, no term is negative, so no digits cancel in the sum if
    p and q are nearly equal. With `w = log(q / p)`, the term is `p * (exp(w) - 1 - w)`. It is
    computed as

        q                       if p is 0, because w may be infinite
        p * (expm1(w) - w)      if w < 1, because it is accurate for w near 0
        q - p * (1 + w)         otherwise, because exp(w) could overflow

    For example, p = 0.5 and q = 0.25 give w = -0.69 and the term 0.097. This is
    0.5 * log(2) - 0.25.

    Args:
        split: How the first layer is split over devices, which may share the vocabulary.
        p, q: The probabilities of two predictions.
        log_q_over_p: `log(q / p)`, as accurate as the caller can compute it.
    """
    # `jnp.where` computes all formulas for each id, and w may be infinite or large. So if an id
    # does not use a formula, the formula gets p, a number from 0 to 1, in place of w.
    w = log_q_over_p
    is_small = w < 1
    small_w = jnp.where(is_small, w, p)
    large_w = jnp.where(is_small | (p == 0), p, w)
    terms = jnp.where(is_small, p * (jnp.expm1(small_w) - small_w), q - p * (1 + large_w))
    terms = jnp.where(p == 0, q, terms)
    values = split.sum_over_vocabulary(terms)
    # The gradient with respect to the logits of p is `p * (log(p / q) - values)`. If p is 0, the
    # logarithm may be infinite, so 0 replaces it, which here is p itself. If the sum is infinite,
    # the gradient is set to 0.
    is_infinite = jnp.isposinf(values)
    log_p_over_q = jnp.where(p == 0, p, -w)
    finite_values = jnp.where(is_infinite, 0, values)
    gradients_of_p = p * (log_p_over_q - finite_values)
    # Zeros are computed by `q - q`. For a constant 0, jax would make an array [t, v], and would
    # keep the array outside of the loop over chunks.
    zeros = q - q
    gradients_of_p = jnp.where(is_infinite, zeros, gradients_of_p)
    # The gradient with respect to the logits of q.
    gradients_of_q = q - p
    return KullbackLeibler(
        values=values, gradients_of_p=gradients_of_p, gradients_of_q=gradients_of_q
    )
