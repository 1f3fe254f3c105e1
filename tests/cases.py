"""A few cases of a long list: the same ones in each run, others with `pytest --cases NUMBER`, and
all of them with `pytest --cases all`."""

import random

CHOICE = "few"


def few(cases, count):
    """`count` of the cases, in their order."""
    cases = list(cases)
    if CHOICE == "all" or count >= len(cases):
        return cases
    kept = random.Random(CHOICE).sample(range(len(cases)), count)
    return [cases[index] for index in sorted(kept)]
